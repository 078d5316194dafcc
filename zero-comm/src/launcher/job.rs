//! A job from the first rank's start to the last one's end.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use zero_core::Rank;

use super::cli::LaunchOptions;
use super::error::LaunchError;
use super::guard::Guard;
use super::memory::Kills;
use super::placement::Place;
use super::printer::Printer;
use super::process;
use super::rank::{Outlets, RankProcess};
use super::remote::News;
use super::report::{Report, Trigger};
use super::starter::Starter;
use super::{coordinator, rendezvous, signals};
use crate::{Coordinator, Token};

/// How long the others get after a failure to notice it by themselves: the library tells them within two seconds.
const PATIENCE: Duration = Duration::from_millis(2500);

/// What ranks that are asked to end get by default after a failure, so that the job is over within five seconds
/// of it. Processes that a rank has left behind get it too.
pub(crate) const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// What ranks get by default after a signal.
const GRACE_AFTER_SIGNAL: Duration = Duration::from_secs(5);

/// How often processes that a rank has left behind are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What happens.
#[derive(Debug)]
pub(crate) enum Event {
    /// The process of a rank has ended.
    Ended { rank: Rank, at: Instant },
    /// The coordinator says that the ranks' world has failed.
    WorldFailed,
    /// An output stream of a rank is at its end.
    Closed { rank: Rank },
    /// Another machine has news of its rank.
    Told { rank: Rank, at: Instant, news: News },
    /// This program has got a signal.
    Signal(i32),
    /// One of our output streams takes nothing any more.
    OutputFailed(io::Error),
}

/// Runs a job and gives its exit code.
pub(crate) fn run(cli: &LaunchOptions, places: Vec<Place>) -> Result<u8, LaunchError> {
    process::adopt_orphans();
    let (sender, events) = channel();
    // Before the first rank: what comes while ranks are started is for them too.
    signals::listen(sender.clone()).map_err(LaunchError::Signals)?;
    let (listener, address) = rendezvous::bind(&places)?;
    let token = Token::generate().map_err(LaunchError::Random)?;
    let coordinator = coordinator::host(listener, places.len(), &token, cli.join_deadline, sender.clone())?;
    let folder = tempfile::Builder::new()
        .prefix("zero-run-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(LaunchError::Folder)?;

    let prefix = !cli.no_prefix;
    let outlets = Outlets {
        stdout: Arc::new(Printer::new(rustix::stdio::stdout(), places.len(), prefix)),
        stderr: Arc::new(Printer::new(rustix::stdio::stderr(), places.len(), prefix)),
        events: sender,
    };
    let starter = Starter::new(cli, folder.path(), (address, token), places.len())?;
    let mut job = Job {
        ranks: Vec::with_capacity(places.len()),
        guard: Guard::start(folder.path()).map_err(LaunchError::Guard)?,
        events,
        kills: Kills::now(),
        grace: cli.grace,
        deadline: cli.deadline.and_then(|after| Instant::now().checked_add(after)),
        coordinator: &coordinator,
        patience: None,
        is_in_doubt: false,
        interrupts: 0,
        is_ending: false,
        trigger: None,
    };
    for place in places {
        job.ranks.push(starter.start(place, &outlets)?);
        job.tell_guard();
    }
    job.wait();

    let report = job.into_report();
    if let Some(text) = report.text() {
        let mut page = outlets.stderr.page();
        page.add_text(&text);
        if let Some(flight) = coordinator.report() {
            page.add_text(&format!("{flight}\n"));
        }
        // Where nobody can read it, the exit code has to do.
        let _ = page.send();
    }
    Ok(report.exit_code())
}

/// The ranks, and how far they are on their way to the end.
struct Job<'a> {
    // Before the guard: when a job is dropped before its end, its ranks are killed and waited for first.
    ranks: Vec<RankProcess>,
    guard: Guard,
    events: Receiver<Event>,
    /// What the kernel had killed when the job began.
    kills: Kills,
    grace: Option<Duration>,
    deadline: Option<Instant>,
    coordinator: &'a Coordinator,
    /// Until when the others may end by themselves after a failure.
    patience: Option<Instant>,
    /// Whether the world has failed for the lack of ranks of which nothing else is known yet. A process that goes
    /// without a word may have come to its end.
    is_in_doubt: bool,
    interrupts: usize,
    /// Whether the ranks have been asked to end.
    is_ending: bool,
    trigger: Option<Trigger>,
}

impl Job<'_> {
    /// Waits until all ranks are over, and ends them when it is time.
    fn wait(&mut self) {
        while !self.ranks.iter().all(RankProcess::is_over) {
            match self.events.recv_timeout(self.pause()) {
                // Nobody reads what is left to be written, and that is all that is waited for.
                Ok(Event::Signal(signal)) if signals::asks_for_end(signal) && self.has_only_output() => {
                    self.begin_end(Trigger::Output(io::ErrorKind::Interrupted.into()));
                    return;
                }
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.advance(Instant::now());
            self.tell_guard();
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Ended { rank, at } => {
                let limit = at + self.grace.unwrap_or(GRACE_AFTER_FAILURE);
                self.ranks[rank.index()].leader_ended(at, limit, self.kills);
            }
            Event::WorldFailed if self.is_ending => {}
            // A rank that is not there for the others has not done its part, however its process ends.
            Event::WorldFailed if !self.coordinator.has_begun() => self.blame_lost(Instant::now()),
            Event::WorldFailed => self.is_in_doubt = true,
            Event::Closed { rank } => self.ranks[rank.index()].stream_closed(Instant::now()),
            Event::Told { rank, at, news } => self.ranks[rank.index()].told(at, news),
            Event::Signal(signal) if signals::asks_for_end(signal) => self.end_by_signal(signal),
            Event::Signal(signal) => self.ranks.iter_mut().for_each(|rank| rank.signal(signal)),
            Event::OutputFailed(error) => {
                if self.begin_end(Trigger::Output(error)) {
                    self.ask(SIGTERM, GRACE_AFTER_FAILURE);
                }
            }
        }
    }

    fn end_by_signal(&mut self, signal: i32) {
        self.begin_end(Trigger::Signal(signal));
        self.interrupts += usize::from(signal == SIGINT);
        if self.interrupts < 2 {
            self.ask(signal, GRACE_AFTER_SIGNAL);
        } else {
            let now = Instant::now();
            self.ranks.iter_mut().for_each(|rank| rank.kill(now));
        }
    }

    /// Does what is due.
    fn advance(&mut self, now: Instant) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if !self.is_ending {
            for rank in &mut self.ranks {
                if let Some((rank, how)) = rank.take_end() {
                    self.coordinator.note_end(rank, &how);
                }
            }
        }
        if !self.is_ending && (self.has_failed() || self.is_in_doubt) {
            if self.patience.is_none() {
                self.patience = Some(now + PATIENCE);
            } else if is_due(self.patience) {
                if std::mem::take(&mut self.is_in_doubt) {
                    self.blame_lost(now);
                }
                self.patience = None;
                if self.has_failed() {
                    self.is_ending = true;
                    self.ask(SIGTERM, GRACE_AFTER_FAILURE);
                }
            }
        } else if is_due(self.deadline) && self.begin_end(Trigger::Deadline) {
            self.ask(SIGTERM, GRACE_AFTER_FAILURE);
        }
        self.ranks.iter_mut().for_each(|rank| rank.advance(now));
    }

    /// How long nothing is due.
    fn pause(&self) -> Duration {
        let now = Instant::now();
        let due = match (self.is_ending, self.patience) {
            (true, _) => None,
            (false, None) => self.deadline,
            (false, patience) => patience,
        };
        let due = due.into_iter().chain(self.ranks.iter().filter_map(RankProcess::next)).min();
        let pause = due.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
        if self.ranks.iter().any(RankProcess::is_survived) { pause.min(LOOK) } else { pause }
    }

    /// Notes that the job is to end, and why, if that is not because of a rank's failure; false if it is to end
    /// already.
    fn begin_end(&mut self, trigger: Trigger) -> bool {
        if !self.has_failed() && !self.is_ending {
            self.trigger = Some(trigger);
        }
        !std::mem::replace(&mut self.is_ending, true)
    }

    fn ask(&mut self, signal: i32, grace: Duration) {
        let limit = Instant::now() + self.grace.unwrap_or(grace);
        self.ranks.iter_mut().for_each(|rank| rank.ask(signal, limit));
    }

    fn has_only_output(&self) -> bool {
        self.ranks.iter().all(|rank| rank.group().is_none())
    }

    fn has_failed(&self) -> bool {
        self.ranks.iter().any(RankProcess::has_failed)
    }

    /// Takes it for a failure of those ranks that the others have to do without them, unless their process came to its
    /// end when the world had begun: that is up to them.
    fn blame_lost(&mut self, now: Instant) {
        let has_begun = self.coordinator.has_begun();
        for (rank, how) in self.coordinator.lost() {
            let rank = &mut self.ranks[rank.index()];
            if !has_begun || rank.ending().is_none() {
                rank.blame(now, how);
            }
        }
    }

    fn tell_guard(&mut self) {
        self.guard.watch(self.ranks.iter().filter_map(RankProcess::group));
    }

    fn into_report(self) -> Report {
        Report::new(self.ranks.into_iter().map(RankProcess::into_ending).collect(), self.trigger)
    }
}
