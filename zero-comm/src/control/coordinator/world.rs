//! A world as its coordinator sees it: what it decides when something is heard or time passes. No I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use super::super::heartbeat::{BEATS, Heartbeat};
use super::super::join_error::Refusal;
use super::super::message::{FromRank, Hello, ToRank};
use super::inquiry::{Answer, Inquiry};
use crate::LossCause;
use crate::failure::Failure;
use crate::flight::{Begun, FlightReport, GroupId};
use crate::process::{Notice, TimedOut};

/// Names a connection.
pub(in crate::control) type LineId = usize;

/// What the world asks its connections to do.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::control) enum Action {
    Send(Vec<LineId>, ToRank),
    /// Closes the connection once it has sent everything.
    Close(LineId),
}

pub(in crate::control) struct World {
    size: WorldSize,
    host: Option<Rank>,
    seats: Vec<Option<Seat>>,
    /// How the processes ended that had not joined.
    ended: BTreeMap<Rank, String>,
    phase: Phase,
    actions: Vec<Action>,
}

/// A rank that has joined.
struct Seat {
    hello: Hello,
    address: SocketAddr,
    /// The rank's connection; `None` when it is closed.
    line: Option<LineId>,
    heartbeat: Heartbeat,
    /// Whether the rank is connected with all others.
    is_ready: bool,
    /// How many operations it began, if it has finished.
    finish: Option<Begun>,
}

enum Phase {
    /// Not all are there. Who has been waited for until then, has been for that long.
    Joining { until: Option<Instant>, deadline: Duration },
    /// They never were.
    Refused(Refusal),
    /// All were there.
    Running(Box<Running>),
}

struct Running {
    /// How long a rank may be silent.
    silence: Duration,
    beat: Option<Instant>,
    finishes: usize,
    /// Who has dropped a group that others have not dropped yet.
    left: HashMap<GroupId, BTreeSet<Rank>>,
    inquiry: Option<Inquiry>,
    verdict: Option<Failure>,
    report: Option<FlightReport>,
}

impl World {
    pub(in crate::control) fn new(
        size: WorldSize,
        host: Option<Rank>,
        deadline: Duration,
        now: Instant,
    ) -> Self {
        Self {
            size,
            host,
            seats: size.ranks().map(|_| None).collect(),
            ended: BTreeMap::new(),
            phase: Phase::Joining { until: now.checked_add(deadline), deadline },
            actions: Vec::new(),
        }
    }

    /// What is to be done because of what was heard, in order.
    pub(in crate::control) fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Why the world has failed, if it has.
    pub(in crate::control) fn failure(&self) -> Option<String> {
        match &self.phase {
            Phase::Joining { .. } => None,
            Phase::Refused(refusal) => Some(refusal.to_string()),
            Phase::Running(running) => running.verdict.as_ref().map(Failure::to_string),
        }
    }

    /// The rank that the failure originates from.
    pub(in crate::control) fn blamed(&self) -> Option<Rank> {
        match &self.phase {
            Phase::Joining { .. } => None,
            Phase::Refused(refusal) => refusal.blamed(),
            Phase::Running(running) => running.verdict.as_ref().and_then(Failure::blamed),
        }
    }

    /// Why it cannot begin any more, if it did not.
    pub(in crate::control) const fn refusal(&self) -> Option<&Refusal> {
        match &self.phase {
            Phase::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Whether all ranks have joined.
    pub(in crate::control) const fn has_begun(&self) -> bool {
        matches!(self.phase, Phase::Running(_))
    }

    /// The ranks for the lack of which the world has failed, and what became of each. None if nobody has joined: the
    /// processes may not want a world.
    pub(in crate::control) fn lost(&self) -> Vec<(Rank, String)> {
        match &self.phase {
            Phase::Refused(Refusal::Missing { missing, after }) if missing.len() < self.size.get() => {
                missing.iter().map(|rank| (*rank, format!("did not join within {after:?}"))).collect()
            }
            Phase::Refused(Refusal::Ended { rank, .. }) => {
                vec![(*rank, "ended before it joined its world".to_owned())]
            }
            Phase::Refused(Refusal::Left { rank, how }) => {
                vec![(*rank, format!("left before its world began: {how}"))]
            }
            Phase::Running(running) => match &running.verdict {
                Some(Failure::Lost { rank, cause: LossCause::Died(how) }) => vec![(*rank, how.clone())],
                _ => Vec::new(),
            },
            Phase::Joining { .. } | Phase::Refused(_) => Vec::new(),
        }
    }

    pub(in crate::control) const fn report(&self) -> Option<&FlightReport> {
        match &self.phase {
            Phase::Running(running) => running.report.as_ref(),
            _ => None,
        }
    }

    /// Seats a rank, and says whether it could be.
    pub(in crate::control) fn join(
        &mut self,
        line: LineId,
        address: SocketAddr,
        hello: Hello,
        now: Instant,
    ) -> bool {
        if let Some(refusal) = self.objection(address, &hello) {
            tracing::warn!(%address, %refusal, "a process cannot join");
            self.turn_away(vec![line], &refusal);
            return false;
        }
        tracing::debug!(rank = %hello.rank, %address, host = hello.host, "rank joined");
        let rank = hello.rank;
        self.ended.remove(&rank);
        if let Phase::Joining { until, deadline } = &mut self.phase {
            // Who has waited long enough leaves; the others are to learn who did not come, and not who left.
            let patience = now.checked_add(hello.deadline);
            if patience.is_some_and(|patience| until.is_none_or(|until| patience < until)) {
                (*until, *deadline) = (patience, hello.deadline);
            }
        }
        self.seats[rank.index()] = Some(Seat {
            hello,
            address,
            line: Some(line),
            heartbeat: Heartbeat::default(),
            is_ready: false,
            finish: None,
        });
        if self.seats.iter().all(Option::is_some) {
            self.start(now);
        }
        self.give_up_on_ended();
        true
    }

    /// Takes note that the process of `rank` has ended.
    pub(in crate::control) fn note_end(&mut self, rank: Rank, how: String) {
        if self.seats.get(rank.index()).is_some_and(Option::is_none) {
            self.ended.insert(rank, how);
        }
        self.give_up_on_ended();
    }

    /// Nobody waits for a rank that cannot come any more.
    fn give_up_on_ended(&mut self) {
        let is_awaited =
            matches!(self.phase, Phase::Joining { .. }) && self.seats.iter().any(Option::is_some);
        if let Some((rank, how)) = self.ended.first_key_value().filter(|_| is_awaited) {
            let refusal = Refusal::Ended { rank: *rank, how: how.clone() };
            self.refuse(refusal);
        }
    }

    /// Takes in what a rank says.
    ///
    /// # Errors
    ///
    /// What is wrong with it. The connection is then of no use.
    pub(in crate::control) fn hear(
        &mut self,
        rank: Rank,
        message: FromRank,
        now: Instant,
    ) -> Result<(), &'static str> {
        if let Some(seat) = &mut self.seats[rank.index()] {
            seat.heartbeat.heard();
        }
        let Phase::Running(running) = &mut self.phase else {
            return Err("it spoke before all ranks had joined");
        };
        match message {
            FromRank::Join(_) => return Err("it joined twice"),
            FromRank::Pong => {}
            FromRank::State { begun, records } => {
                if let Some(inquiry) = &mut running.inquiry {
                    inquiry.answer(rank, Answer { begun, records });
                }
                self.conclude(now);
            }
            FromRank::Notice(Notice::Ready) => {
                let Some(seat) = &mut self.seats[rank.index()] else { return Ok(()) };
                if std::mem::replace(&mut seat.is_ready, true) {
                    return Err("it said twice that it is ready");
                }
                if self.seats.iter().flatten().all(|seat| seat.is_ready) {
                    self.tell(ToRank::Go);
                }
            }
            FromRank::Notice(Notice::Finished(begun)) => self.finish(rank, begun),
            FromRank::Notice(Notice::Left { group, members }) => {
                let left = running.left.entry(group).or_default();
                left.insert(rank);
                if left.len() >= members {
                    let lines = running.left.remove(&group).into_iter().flatten();
                    let lines = lines.filter_map(|rank| self.seats[rank.index()].as_ref()?.line).collect();
                    self.actions.push(Action::Send(lines, ToRank::Forget(group)));
                }
            }
            FromRank::Notice(Notice::Failed(failure)) => self.decide(failure, now),
            FromRank::Notice(Notice::TimedOut(timed_out)) => {
                // Whoever says so later says nothing new.
                if running.inquiry.is_none() {
                    self.inquire(Some((timed_out, rank)), now);
                    self.conclude(now);
                }
            }
        }
        Ok(())
    }

    /// Takes note that a rank's connection has closed.
    pub(in crate::control) fn lose(&mut self, rank: Rank, how: &str, now: Instant) {
        let Some(seat) = &mut self.seats[rank.index()] else { return };
        seat.line = None;
        let finished = seat.finish.is_some();
        match &self.phase {
            Phase::Joining { .. } => self.refuse(Refusal::Left { rank, how: how.to_owned() }),
            Phase::Refused(_) => {}
            Phase::Running(_) => {
                if !finished {
                    self.decide(Failure::Lost { rank, cause: LossCause::Died(how.to_owned()) }, now);
                }
                self.conclude(now);
            }
        }
    }

    /// Takes note that no more connections can be taken in.
    pub(in crate::control) fn fill(&mut self, how: String) {
        if let Phase::Joining { .. } = &self.phase {
            self.refuse(Refusal::Full { how });
        }
    }

    /// When [`pass`](Self::pass) is to be called next, if nothing happens before.
    pub(in crate::control) fn next(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Joining { until, .. } => *until,
            Phase::Refused(_) => None,
            Phase::Running(running) => {
                let inquiry = running.inquiry.as_ref().filter(|_| running.report.is_none());
                running.beat.into_iter().chain(inquiry.map(Inquiry::until)).min()
            }
        }
    }

    /// Takes note of the time.
    pub(in crate::control) fn pass(&mut self, now: Instant) {
        let due = |until: Option<Instant>| until.is_some_and(|until| until <= now);
        match &self.phase {
            Phase::Joining { until, deadline } if due(*until) => {
                let after = *deadline;
                let missing = self.size.ranks().filter(|rank| self.seats[rank.index()].is_none()).collect();
                self.refuse(Refusal::Missing { missing, after });
            }
            Phase::Running(running) if due(running.beat) => self.beat(now),
            _ => {}
        }
        self.conclude(now);
    }

    /// Why `hello` cannot be seated, if it can't.
    fn objection(&self, address: SocketAddr, hello: &Hello) -> Option<Refusal> {
        if let Phase::Refused(refusal) = &self.phase {
            return Some(refusal.clone());
        }
        let (rank, size) = (hello.rank, self.size);
        if hello.size != size {
            return Some(Refusal::Size { rank, theirs: hello.size, ours: size });
        }
        if !size.contains(rank) {
            return Some(Refusal::Range { rank, size });
        }
        if let Some(seat) = &self.seats[rank.index()] {
            let process = |hello: &Hello, address: SocketAddr| (hello.pid, address.ip());
            if process(&seat.hello, seat.address) == process(hello, address) && seat.hello.host == hello.host
            {
                return Some(Refusal::Again { rank });
            }
            return Some(Refusal::Taken { rank, first: seat.address, second: address });
        }
        let other = &self.seats.iter().flatten().next()?.hello;
        (other.build != hello.build).then(|| Refusal::Build {
            rank,
            theirs: hello.build.clone(),
            other: other.rank,
            ours: other.build.clone(),
        })
    }

    fn start(&mut self, now: Instant) {
        tracing::debug!(size = %self.size, "all ranks joined");
        for rank in self.size.ranks() {
            if let Some(hello) = self.seats[rank.index()].as_ref().map(|seat| seat.hello.clone()) {
                self.tell(ToRank::Present(hello));
            }
        }
        let deadlines = self.seats.iter().flatten().map(|seat| seat.hello.deadline);
        let silence = Heartbeat::silence(deadlines.max().unwrap_or_default());
        self.tell(ToRank::Start { host: self.host, silence });
        self.phase = Phase::Running(Box::new(Running {
            silence,
            beat: now.checked_add(silence / BEATS),
            finishes: 0,
            left: HashMap::new(),
            inquiry: None,
            verdict: None,
            report: None,
        }));
    }

    /// Nobody can join any more.
    fn refuse(&mut self, refusal: Refusal) {
        tracing::error!(%refusal, "the world cannot begin");
        let lines = self.seats.iter_mut().flatten().filter_map(|seat| seat.line.take()).collect();
        self.turn_away(lines, &refusal);
        self.phase = Phase::Refused(refusal);
    }

    fn turn_away(&mut self, lines: Vec<LineId>, refusal: &Refusal) {
        self.actions.push(Action::Send(lines.clone(), ToRank::Refused(refusal.clone())));
        self.actions.extend(lines.into_iter().map(Action::Close));
    }

    fn finish(&mut self, rank: Rank, begun: Begun) {
        let (Phase::Running(running), Some(seat)) = (&mut self.phase, &mut self.seats[rank.index()]) else {
            return;
        };
        // A rank that finishes because the world has failed would hide the failure.
        if seat.finish.is_some() || running.verdict.is_some() {
            return;
        }
        seat.finish = Some(begun.clone());
        running.finishes += 1;
        let order = running.finishes;
        self.tell(ToRank::Finished { rank, order, begun });
    }

    fn beat(&mut self, now: Instant) {
        let Phase::Running(running) = &mut self.phase else { return };
        let silence = running.silence;
        running.beat = now.checked_add(silence / BEATS);
        let seats = self.seats.iter_mut().flatten();
        let open = seats.filter(|seat| seat.line.is_some() && seat.finish.is_none());
        let lost = open.filter_map(|seat| seat.heartbeat.missed().then_some(seat.hello.rank)).min();
        self.tell(ToRank::Ping);
        if let Some(rank) = lost {
            let cause = LossCause::Died(format!("not heard of for {silence:?}"));
            self.decide(Failure::Lost { rank, cause }, now);
        }
    }

    /// The first failure is the world's.
    fn decide(&mut self, failure: Failure, now: Instant) {
        let Phase::Running(running) = &mut self.phase else { return };
        if running.verdict.is_some() {
            return;
        }
        tracing::error!(%failure, "the world has failed");
        running.verdict = Some(failure.clone());
        if running.inquiry.is_none() {
            // Ranks answer before they learn of the failure, and so with what they did before it.
            self.inquire(None, now);
        }
        self.tell(ToRank::Verdict(failure));
        self.conclude(now);
    }

    /// Asks all ranks what they do.
    fn inquire(&mut self, timed_out: Option<(TimedOut, Rank)>, now: Instant) {
        let inquiry = Inquiry::new(self.size, timed_out, now);
        for seat in self.seats.iter().flatten() {
            if let Some(line) = seat.line {
                self.actions.push(Action::Send(vec![line], ToRank::Ask(inquiry.lane(seat.hello.rank))));
            }
        }
        if let Phase::Running(running) = &mut self.phase {
            running.inquiry = Some(inquiry);
        }
    }

    /// Draws conclusions from answers and from those that did not come.
    fn conclude(&mut self, now: Instant) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(inquiry) = running.inquiry.as_mut().filter(|_| running.report.is_none()) else { return };
        let seats = &self.seats;
        let seat = |rank: Rank| seats[rank.index()].as_ref();
        let can_answer = |rank: Rank| seat(rank).is_some_and(|seat| seat.line.is_some());
        if running.verdict.is_none() {
            let finish = |rank: Rank| seat(rank)?.finish.as_ref();
            if let Some(failure) = inquiry.failure(now, can_answer, finish) {
                self.decide(failure, now);
            }
            return;
        }
        if let Some(records) = inquiry.records(now, can_answer) {
            let report = FlightReport::new(&records);
            tracing::error!("{report}");
            running.report = Some(report.clone());
            self.tell(ToRank::Flight(report));
        }
    }

    /// Sends `message` to all ranks that can hear it.
    fn tell(&mut self, message: ToRank) {
        let lines = self.seats.iter().flatten().filter_map(|seat| seat.line).collect();
        self.actions.push(Action::Send(lines, message));
    }
}

#[cfg(test)]
mod tests;
