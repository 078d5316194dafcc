//! One rank: its process, what is known about it, and its way to the end.

use std::io;
use std::mem;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use zero_core::Rank;

use super::ending::{Ending, Fault, Status};
use super::error::LaunchError;
use super::job::Event;
use super::lines::Tail;
use super::memory::{Kills, OutOfMemory};
use super::placement::Place;
use super::printer::Printer;
use super::process;
use super::relay::Relay;
use super::remote::{Link, News};
use crate::last_words::LastWords;

/// How long a remote shell gets to end its rank when its input is closed.
const REMOTE_KILL: Duration = Duration::from_secs(2);

/// How long a killed process is waited for. It may hang in a system call that nothing ends.
const BURIAL: Duration = Duration::from_secs(5);

/// A rank that has been started, here or by way of a remote shell, as the leader of a process group.
#[derive(Debug)]
pub(crate) struct RankProcess {
    place: Place,
    process: Child,
    group: Pid,
    /// For a rank on another machine.
    link: Option<Link>,
    /// Where a rank here leaves its last words.
    last_words: PathBuf,
    tail: Arc<Mutex<Tail>>,
    /// Closed when nobody is left whose output matters.
    lifeline: Option<UnixStream>,
    /// How many output streams are not at their end.
    streams: usize,
    asked: Option<i32>,
    next: Option<(Instant, Step)>,
    leader_has_ended: bool,
    group_has_ended: bool,
    ending: Option<Ending>,
    /// Whether [`take_end`](Self::take_end) has told its end.
    end_is_told: bool,
    fault: Option<Fault>,
}

/// What is done next with a rank that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Kill,
    /// Kills what connects us to another machine.
    Sever,
    GiveUp,
}

/// Where a rank's output and news go.
#[derive(Clone, Debug)]
pub(crate) struct Outlets {
    pub(crate) stdout: Arc<Printer>,
    pub(crate) stderr: Arc<Printer>,
    pub(crate) events: Sender<Event>,
}

impl RankProcess {
    /// Starts `command` and whatever watches it. Ranks that have been started are killed when they are dropped.
    ///
    /// `remote` is, for a rank elsewhere, the script for the remote shell, and what marks news from it.
    pub(crate) fn start(
        place: Place,
        mut command: Command,
        last_words: PathBuf,
        remote: Option<(Vec<u8>, String)>,
        outlets: &Outlets,
    ) -> Result<Self, LaunchError> {
        let rank = place.rank;
        process::as_group(&mut command);
        command.stdin(if remote.is_some() { Stdio::piped() } else { Stdio::null() });
        let process = command.spawn().map_err(|source| {
            let program = command.get_program().to_string_lossy().into_owned();
            match source.kind() {
                io::ErrorKind::NotFound => LaunchError::NoProgram { program, rank },
                _ => LaunchError::Start { program, rank, source },
            }
        })?;
        let mut rank = Self {
            place,
            group: Pid::from_child(&process),
            process,
            link: None,
            last_words,
            tail: Arc::default(),
            lifeline: None,
            streams: 0,
            asked: None,
            next: None,
            leader_has_ended: false,
            group_has_ended: false,
            ending: None,
            end_is_told: false,
            fault: None,
        };
        rank.attend(remote, outlets)
            .map_err(|source| LaunchError::Attend { rank: rank.place.rank, source })?;
        Ok(rank)
    }

    /// Starts the threads that copy the output, write to the remote shell and wait for the end.
    fn attend(&mut self, remote: Option<(Vec<u8>, String)>, outlets: &Outlets) -> io::Result<()> {
        let (script, mark) = remote.unzip();
        if let Some((stdin, script)) = self.process.stdin.take().zip(script) {
            self.link = Some(Link::open(stdin, script)?);
        }
        let (lifeline, end) = UnixStream::pair()?;
        self.lifeline = Some(lifeline);
        let (end, rank) = (Arc::new(end), self.place.rank);
        let stdout = self.process.stdout.take().map(OwnedFd::from);
        let stderr = self.process.stderr.take().map(OwnedFd::from);
        let streams = [
            (stdout, &outlets.stdout, None, None),
            (stderr, &outlets.stderr, Some(Arc::clone(&self.tail)), mark),
        ];
        for (source, printer, tail, mark) in streams {
            let Some(source) = source else { continue };
            let end = Arc::clone(&end);
            let relay =
                Relay { rank, printer: Arc::clone(printer), tail, mark, events: outlets.events.clone() };
            spawn(format!("output of {rank}"), move || relay.run(source, &end))?;
            self.streams += 1;
        }
        let (leader, events) = (self.group, outlets.events.clone());
        spawn(format!("end of {rank}"), move || {
            process::wait_for_end(leader);
            let _ = events.send(Event::Ended { rank, at: Instant::now() });
        })
    }

    /// The group of all its processes here, while there are any.
    pub(crate) fn group(&self) -> Option<Pid> {
        (!self.group_has_ended).then_some(self.group)
    }

    /// Whether it has ended, with all it has started, and all its output has been passed on.
    pub(crate) fn is_over(&self) -> bool {
        self.group_has_ended && self.streams == 0
    }

    /// Whether what it has started is still there, whose end nothing tells.
    pub(crate) fn is_survived(&self) -> bool {
        self.leader_has_ended && !self.group_has_ended
    }

    pub(crate) fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    /// Who it is and how its process ended, once.
    pub(crate) fn take_end(&mut self) -> Option<(Rank, String)> {
        let ending = self.ending.as_ref().filter(|_| !self.end_is_told)?;
        self.end_is_told = true;
        Some((self.place.rank, ending.status.to_string()))
    }

    /// The other ranks have to do without it, because of `what` was seen of it at `at`.
    pub(crate) fn blame(&mut self, at: Instant, what: String) {
        self.fault.get_or_insert(Fault { at, what });
    }

    /// Whether it has failed, as far as is known yet.
    pub(crate) fn has_failed(&self) -> bool {
        self.fault.is_some() || self.ending.as_ref().is_some_and(|ending| !ending.status.is_success())
    }

    /// When `advance` has to be called at the latest.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.next.map(|(at, _)| at)
    }

    /// Passes a signal on to all its processes.
    pub(crate) fn signal(&mut self, signal: i32) {
        match &mut self.link {
            Some(link) => link.signal(signal),
            None => {
                if let Some((group, signal)) = self.group().zip(Signal::from_named_raw(signal)) {
                    process::signal_group(group, signal);
                }
            }
        }
    }

    /// Asks it with a signal to end, and kills it at `limit` if it does not.
    pub(crate) fn ask(&mut self, signal: i32, limit: Instant) {
        if self.group_has_ended {
            return;
        }
        self.signal(signal);
        self.asked.get_or_insert(signal);
        self.next.get_or_insert((limit, Step::Kill));
    }

    /// Kills it, unless it has been already.
    pub(crate) fn kill(&mut self, now: Instant) {
        if matches!(self.next, None | Some((_, Step::Kill))) && !self.group_has_ended {
            self.asked.get_or_insert(Signal::KILL.as_raw());
            self.step(Step::Kill, now);
        }
    }

    /// Does what is due.
    pub(crate) fn advance(&mut self, now: Instant) {
        match self.next {
            Some((at, step)) if at <= now => self.step(step, now),
            _ => {}
        }
        if self.is_survived() && !process::group_is_alive(self.group) {
            self.bury();
        }
    }

    fn step(&mut self, step: Step, now: Instant) {
        self.next = match (step, &mut self.link) {
            (Step::Kill, Some(link)) => {
                link.close();
                Some((now + REMOTE_KILL, Step::Sever))
            }
            (Step::Kill | Step::Sever, _) => {
                process::signal_group(self.group, Signal::KILL);
                Some((now + BURIAL, Step::GiveUp))
            }
            (Step::GiveUp, _) => {
                self.end(now, Status::Stuck);
                self.bury();
                None
            }
        };
    }

    /// Its process has ended. What that has started gets until `limit` to end too.
    pub(crate) fn leader_ended(&mut self, at: Instant, limit: Instant, kills: Kills) {
        let status = self.process.wait();
        self.leader_has_ended = true;
        if self.link.is_none() {
            // An error would mean that somebody else has waited for it.
            let status = status.map_or(Status::Stuck, Status::from);
            let out_of_memory = || Kills::now().since(kills);
            let last_words = LastWords::read(&self.last_words);
            let killed = status.may_be_killed_by_kernel() && self.asked.is_none();
            self.end(at, status);
            self.explain(killed.then(out_of_memory).flatten(), last_words);
        }
        if process::group_is_alive(self.group) {
            if self.next.is_none() {
                process::signal_group(self.group, Signal::TERM);
                self.next = Some((limit, Step::Kill));
            }
        } else {
            self.bury();
        }
    }

    /// News from another machine.
    pub(crate) fn told(&mut self, at: Instant, news: News) {
        match news {
            News::Ready => {
                if let Some(link) = &mut self.link {
                    link.ready();
                }
            }
            News::Refused { code, reason } => self.end(at, Status::Refused { code, reason }),
            News::Ended { status, out_of_memory, last_words } => {
                let killed = status.may_be_killed_by_kernel() && self.asked.is_none();
                self.end(at, status);
                self.explain((killed && out_of_memory).then_some(OutOfMemory::Machine), last_words);
                if !self.group_has_ended {
                    // Nothing is left for the remote shell to do.
                    self.next = Some((at + REMOTE_KILL, Step::Sever));
                }
            }
        }
    }

    /// One of its streams is at its end.
    pub(crate) fn stream_closed(&mut self, now: Instant) {
        self.streams = self.streams.saturating_sub(1);
        if self.is_over() {
            self.settle(now);
        }
    }

    /// Takes note that what its machine has not said about it will not come any more.
    fn settle(&mut self, now: Instant) {
        if self.ending.is_none() {
            let status = self.process.try_wait().ok().flatten();
            self.end(now, status.map_or(Status::Stuck, Status::Lost));
        }
    }

    fn end(&mut self, at: Instant, status: Status) {
        if self.ending.is_none() {
            self.ending = Some(Ending::new(self.place.clone(), at, status, self.asked));
        }
    }

    fn explain(&mut self, out_of_memory: Option<OutOfMemory>, last_words: Option<LastWords>) {
        if let Some(ending) = &mut self.ending {
            (ending.out_of_memory, ending.last_words) = (out_of_memory, last_words);
        }
    }

    /// Nobody of its group is left.
    fn bury(&mut self) {
        self.group_has_ended = true;
        self.next = None;
        self.lifeline = None;
    }

    /// What became of it, for the report.
    pub(crate) fn into_ending(mut self) -> Ending {
        let now = Instant::now();
        self.settle(now);
        let (place, asked) = (self.place.clone(), self.asked);
        let unknown = || Ending::new(place, now, Status::Stuck, asked);
        let mut ending = self.ending.take().unwrap_or_else(unknown);
        ending.fault = self.fault.take();
        ending.tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner).lines().collect();
        ending
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if !self.group_has_ended {
            process::signal_group(self.group, Signal::KILL);
            let _ = self.process.wait();
        }
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name).spawn(run).map(mem::drop)
}
