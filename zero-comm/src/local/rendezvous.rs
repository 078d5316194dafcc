//! Where ranks meet.
//!
//! # States
//!
//! A rendezvous goes through rounds, one per operation, each in two phases:
//!
//! ```text
//!             last rank comes,
//!             all agree                    last rank is done
//! gathering ------------------> moving ------------------------> gathering of the next round
//!   |    \
//!   |     `-- last rank comes, two disagree --> gathering of the next round; all get the mismatch
//!   |
//!   `-------- a rank gives up: it takes its memory back and leaves
//! ```
//!
//! # Why nobody reads memory that is gone
//!
//! A rank lends its memory when it sits down, under the lock. While gathering nobody touches lent memory, so
//! a rank may give up at any time: at the deadline, or when the world fails. Once moving, everybody is here
//! and has only a bounded amount of copying and adding to do, so a rank stays until all are done, whatever
//! happens to the world meanwhile; no deadline is needed for that. [`Stay`] makes this true even for a rank
//! that unwinds. The lock orders what a rank wrote before it sat down before what others read, and what they
//! wrote before its return.

use std::hint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zero_core::Rank;

use super::health::Health;
use super::meeting::{Lent, Meeting, Seat, Table};
use crate::failure::Failure;
use crate::lock;
use crate::request::{self, Request};
use crate::{Call, CommError, LossCause, OpKind};

/// A place where a fixed set of ranks meets, again and again.
pub(super) struct Rendezvous {
    health: Arc<Health>,
    /// The rank of each seat.
    members: Vec<Rank>,
    /// Held by a rank from sitting down to leaving: one operation of a rank at a time.
    turns: Vec<Mutex<()>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Changes of `state` that waiting ranks must see, so that they can look without the lock.
    changes: AtomicU64,
}

/// Who comes to a rendezvous, and how long it waits there for the others.
#[derive(Clone, Copy)]
pub(super) struct Guest {
    pub(super) seat: usize,
    pub(super) deadline: Duration,
}

struct State {
    /// Counts rounds. It goes on only when all members of a round are in it, so a rank that has not yet
    /// left round `n` keeps round `n + 1` gathering, and finds `outcome` as `n` left it.
    round: u64,
    /// Who has come to this round; empty once moving.
    seats: Vec<Option<Seat>>,
    /// Present while moving.
    table: Option<Arc<Table>>,
    /// Members that are still moving.
    busy: usize,
    /// What went wrong while moving.
    flaw: Option<CommError>,
    /// How the round before ended.
    outcome: Result<(), CommError>,
}

impl Rendezvous {
    pub(super) fn new(health: &Arc<Health>, members: Vec<Rank>) -> Arc<Self> {
        let rendezvous = Arc::new(Self {
            health: Arc::clone(health),
            turns: members.iter().map(|_| Mutex::new(())).collect(),
            state: Mutex::new(State {
                round: 0,
                seats: members.iter().map(|_| None).collect(),
                table: None,
                busy: 0,
                flaw: None,
                outcome: Ok(()),
            }),
            changed: Condvar::new(),
            changes: AtomicU64::new(0),
            members,
        });
        health.register(&rendezvous);
        rendezvous
    }

    /// Meets all other members for `request` and lets `act` do this rank's part of it.
    ///
    /// `act` runs when all are here. It must do no more than move and combine data. Returns when all are
    /// done, with the first error that any member's `act` returned.
    pub(super) fn meet(
        &self,
        Guest { seat, deadline }: Guest,
        request: Request,
        label: &str,
        lent: Lent<'_>,
        act: impl FnOnce(&mut Meeting<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let _turn = lock(&self.turns[seat]);
        let operation = request.kind();
        let until = Instant::now().checked_add(deadline);

        // Declared before the lock is taken, so that unwinding releases the lock before it drops the stay.
        let mut stay = Stay { rendezvous: self, seat, operation, label, round: None };
        let mut state = lock(&self.state);
        self.check(&state, operation, label)?;
        let round = state.round;
        stay.round = Some(round);
        state.seats[seat] = Some(Seat::new(request, label, lent));
        if state.seats.iter().all(Option::is_some) {
            if let Err(error) = self.begin(&mut state) {
                drop(state);
                self.health.announce();
                return Err(error);
            }
        }
        let table = loop {
            if state.round != round {
                return state.outcome.clone();
            }
            if let Some(table) = &state.table {
                break Arc::clone(table);
            }
            if let Err(error) = self.check(&state, operation, label) {
                state.seats[seat] = None;
                return Err(error);
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                let error = self.timeout(&state, operation, label, deadline);
                let blamed = Some(self.members[seat]);
                // Recorded under the lock: whoever times out next must not find this rank missing.
                let first = self.health.record(Failure::Error { error: error.clone(), blamed });
                state.seats[seat] = None;
                drop(state);
                if first {
                    self.health.announce();
                }
                return Err(error);
            }
            state = self.wait(state, until);
        };
        drop(state);

        // SAFETY: the round is moving, so every member is in `meet` with what it lent still borrowed, waits
        // or moves through its own `Meeting`, and does not leave before `stay` counts this rank as done.
        // The turn keeps a second thread of this rank out.
        let moved = act(&mut unsafe { Meeting::new(&table, seat) });
        stay.finish(moved)
    }

    /// Makes all waiting ranks look at the state again.
    pub(super) fn wake(&self) {
        let _state = lock(&self.state);
        self.notify();
    }

    /// Why the present round will never be complete, if so.
    fn check(&self, state: &State, operation: OpKind, label: &str) -> Result<(), CommError> {
        let absent = self.absent(state).filter_map(|rank| Some((self.health.finished(rank)?, rank)));
        // Who finished later may have done so because of the first.
        if let Some((_, rank)) = absent.min() {
            let (cause, label) = (LossCause::Finished, label.to_owned());
            return Err(CommError::PeerLost { rank, cause, operation, label });
        }
        self.health.check(operation, label)
    }

    /// Goes from gathering to moving, or to the next round if two requests disagree.
    fn begin(&self, state: &mut State) -> Result<(), CommError> {
        let seats: Vec<_> = state.seats.iter_mut().filter_map(Option::take).collect();
        let sides: Vec<_> = seats.iter().map(|seat| (&seat.request, seat.label.as_str())).collect();
        if let Some((first, second)) = request::disagreement(&sides) {
            let call = |seat: usize| {
                let (request, label) = sides[seat];
                Box::new(Call {
                    rank: self.members[seat],
                    operation: request.kind(),
                    arguments: request.arguments(),
                    label: label.to_owned(),
                })
            };
            let error = CommError::Mismatch { first: call(first), second: call(second) };
            self.health.record(Failure::Error { error: error.clone(), blamed: None });
            self.end(state, Err(error.clone()));
            return Err(error);
        }
        state.busy = seats.len();
        state.table = Some(Table::new(seats));
        self.notify();
        Ok(())
    }

    /// Ends a member's part of a moving round, and waits for the others to end theirs.
    fn leave<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        round: u64,
        flaw: Option<CommError>,
    ) -> Result<(), CommError> {
        state.flaw = state.flaw.take().or(flaw);
        state.busy -= 1;
        if state.busy == 0 {
            let outcome = state.flaw.take().map_or(Ok(()), Err);
            self.end(&mut state, outcome);
        }
        while state.round == round {
            state = self.wait(state, None);
        }
        state.outcome.clone()
    }

    /// Begins the next round.
    fn end(&self, state: &mut State, outcome: Result<(), CommError>) {
        state.table = None;
        state.outcome = outcome;
        state.round += 1;
        self.notify();
    }

    /// Must be called with the lock held.
    fn notify(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    /// Who has not come to the present round.
    fn absent(&self, state: &State) -> impl Iterator<Item = Rank> {
        state.seats.iter().zip(&self.members).filter(|(seat, _)| seat.is_none()).map(|(_, rank)| *rank)
    }

    fn timeout(&self, state: &State, operation: OpKind, label: &str, after: Duration) -> CommError {
        CommError::Timeout {
            operation,
            label: label.to_owned(),
            after,
            missing: self.absent(state).collect(),
        }
    }

    /// Waits for a change of the state, or until `until`, or for no reason.
    fn wait<'a>(&'a self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        let seen = self.changes.load(Ordering::Relaxed);
        let changed = || self.changes.load(Ordering::Relaxed) != seen;
        drop(state);
        for _ in 0..self.health.spins() {
            if changed() {
                break;
            }
            hint::spin_loop();
        }
        let state = lock(&self.state);
        if changed() {
            return state;
        }
        match until {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// A rank's presence at a rendezvous. Dropping it waits until the rank may leave.
struct Stay<'a> {
    rendezvous: &'a Rendezvous,
    seat: usize,
    operation: OpKind,
    label: &'a str,
    /// The round it has sat down in, unless it has left it properly.
    round: Option<u64>,
}

impl Stay<'_> {
    /// Leaves when all members are done.
    fn finish(mut self, moved: Result<(), CommError>) -> Result<(), CommError> {
        let state = lock(&self.rendezvous.state);
        match self.round.take() {
            Some(round) => self.rendezvous.leave(state, round, moved.err()),
            None => moved,
        }
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        let Some(round) = self.round else { return };
        let mut state = lock(&self.rendezvous.state);
        if state.round != round {
            return;
        }
        if state.table.is_none() {
            state.seats[self.seat] = None;
            return;
        }
        // Unwinding while moving: the others must learn that this rank's part is missing.
        let flaw = CommError::PeerLost {
            rank: self.rendezvous.members[self.seat],
            cause: LossCause::Panicked("while it moved data".to_owned()),
            operation: self.operation,
            label: self.label.to_owned(),
        };
        // The rank's own error is the panic.
        let _ = self.rendezvous.leave(state, round, Some(flaw));
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use zero_core::WorldSize;

    use super::*;
    use crate::Buffer;

    #[test]
    fn a_rank_that_unwinds_while_moving_stays_until_the_others_are_done() {
        let size = WorldSize::new(2).unwrap();
        let health = Arc::new(Health::new(size));
        let rendezvous = Rendezvous::new(&health, size.ranks().collect());
        let unwound = AtomicBool::new(false);
        let read = AtomicBool::new(false);
        let meet = |seat: usize, act: &dyn Fn(&mut Meeting<'_>)| {
            let numbers = vec![seat as u8; 64];
            let lent = Lent::Read(Buffer::from(numbers.as_slice()));
            rendezvous.meet(
                Guest { seat, deadline: Duration::from_secs(60) },
                Request::Barrier,
                "label",
                lent,
                |meeting| {
                    act(meeting);
                    Ok(())
                },
            )
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let unwinds = |_: &mut Meeting<'_>| {
                    unwound.store(true, Ordering::SeqCst);
                    resume_unwind(Box::new("bug"));
                };
                assert!(catch_unwind(AssertUnwindSafe(|| meet(0, &unwinds))).is_err());
                assert!(read.load(Ordering::SeqCst));
            });
            let reads = |meeting: &mut Meeting<'_>| {
                while !unwound.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                assert_eq!(meeting.read(0).unwrap(), [0; 64]);
                read.store(true, Ordering::SeqCst);
            };
            let result = meet(1, &reads);
            assert!(matches!(result, Err(CommError::PeerLost { rank: Rank::ROOT, .. })), "got {result:?}");
        });
    }
}
