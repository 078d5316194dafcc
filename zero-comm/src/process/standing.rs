//! What one rank knows of its world: who has finished, and why it failed.

use std::fmt;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use zero_core::{Rank, WorldSize};

use super::fabric::Fabric;
use crate::failure::Failure;
use crate::flight::{Begun, GroupId, Lane, Recorder};
use crate::{CommError, OpKind, lock, text};

/// How long a rank waits for the coordinator to say what the world's first failure was. After that it goes
/// by what it saw itself.
const VERDICT: Duration = Duration::from_millis(1500);

/// What a rank has to say to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// This rank is connected with all others.
    Ready,
    /// The world has failed, as far as this rank can see.
    Failed(Failure),
    /// This rank's patience is over.
    TimedOut(TimedOut),
    /// This rank will begin no more operations. How many it began, by lane.
    Finished(Begun),
    /// This rank has dropped a group of so many members.
    Left { group: GroupId, members: usize },
}

/// An operation that not all its ranks have come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimedOut {
    pub(crate) operation: OpKind,
    pub(crate) label: String,
    pub(crate) after: Duration,
    /// Who should have come, each in which lane.
    pub(crate) expected: Vec<(Rank, Lane)>,
    /// The number of the operation in that lane, from 1.
    pub(crate) sequence: u64,
    /// Who has not come, by the light of the rank that says so.
    pub(crate) missing: Vec<Rank>,
}

impl TimedOut {
    /// The failure, once it is known who did not come.
    pub(crate) fn failure(&self, missing: Vec<Rank>, blamed: Rank) -> Failure {
        let error = CommError::Timeout {
            operation: self.operation,
            label: self.label.clone(),
            after: self.after,
            missing,
        };
        Failure::Error { error, blamed: Some(blamed) }
    }
}

/// How a rank finished.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    /// The how manieth of all ranks it was.
    pub(crate) order: usize,
    /// How many operations it began in each lane.
    pub(crate) begun: Begun,
}

/// What one rank knows of its world. Written by the agent that talks to the coordinator.
pub(crate) struct Standing {
    rank: Rank,
    size: WorldSize,
    /// The rank in whose process the coordinator runs.
    host: Option<Rank>,
    recorder: Arc<Recorder>,
    failure: OnceLock<Failure>,
    finishes: Vec<OnceLock<Finish>>,
    /// Whether all ranks are connected with each other.
    started: OnceLock<()>,
    /// Whether this rank has said that it has finished.
    left: OnceLock<()>,
    notices: Mutex<Option<Sender<Notice>>>,
    /// What serves this rank's windows.
    fabric: OnceLock<Weak<dyn Fabric>>,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Standing {
    /// Notices go to `notices`; the receiver's end passes them on to the coordinator.
    pub(crate) fn new(rank: Rank, size: WorldSize, host: Option<Rank>, notices: Sender<Notice>) -> Arc<Self> {
        Arc::new(Self {
            rank,
            size,
            host,
            recorder: Arc::default(),
            failure: OnceLock::new(),
            finishes: size.ranks().map(|_| OnceLock::new()).collect(),
            started: OnceLock::new(),
            left: OnceLock::new(),
            notices: Mutex::new(Some(notices)),
            fabric: OnceLock::new(),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        })
    }

    pub(crate) const fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) const fn size(&self) -> WorldSize {
        self.size
    }

    pub(crate) const fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Why the world has failed, if it has.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// The error that `operation` gets if the world has failed.
    pub(crate) fn check(&self, operation: OpKind, label: &str) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.error(operation, label)))
    }

    /// How `rank` finished, if it has.
    pub(crate) fn finish_of(&self, rank: Rank) -> Option<&Finish> {
        self.finishes[rank.index()].get()
    }

    /// For the agent: the coordinator has decided why the world has failed, or can't be reached any more.
    pub(crate) fn settle(&self, failure: Failure) {
        if self.failure.set(failure).is_ok() {
            if let Some(failure) = self.failure() {
                tracing::debug!(cause = %failure, "world failed");
            }
        }
        self.announce();
    }

    /// For the agent: all ranks are connected with each other.
    pub(crate) fn note_start(&self) {
        // Told once.
        let _ = self.started.set(());
        self.announce();
    }

    /// For the agent: `rank` has finished.
    pub(crate) fn note_finish(&self, rank: Rank, finish: Finish) {
        // Told once; told again it would be the same.
        let _ = self.finishes[rank.index()].set(finish);
        self.announce();
    }

    /// Fails the world, unless it has failed before, and returns why it has.
    pub(crate) fn fail(&self, failure: Failure) -> &Failure {
        let failure = failure.cut();
        self.decide(Notice::Failed(failure.clone()), || failure)
    }

    /// Fails the world because not all ranks came, unless it has failed before, and returns why it has.
    pub(crate) fn time_out(&self, mut timed_out: TimedOut) -> &Failure {
        text::cut(&mut timed_out.label);
        self.decide(Notice::TimedOut(timed_out.clone()), || {
            // The coordinator has not answered: the rank in whose process it runs is stopped or out of reach.
            // Whoever else has not come may be waiting for that one, too.
            let host = self.host.filter(|host| timed_out.expected.iter().any(|(rank, _)| rank == host));
            let missing = host.map_or_else(|| timed_out.missing.clone(), |host| vec![host]);
            timed_out.failure(missing, self.rank)
        })
    }

    /// Waits a little for the world to be found failed: what this rank sees may be the consequence of what
    /// the coordinator is about to tell.
    pub(crate) fn verdict(&self) -> Option<&Failure> {
        self.wait_until(VERDICT, || self.failure().is_some());
        self.failure()
    }

    /// Says that this rank is connected with all others, and waits until all ranks are, so that what any of
    /// them does meets ranks of the same world. False if that does not happen within `deadline`, or if the
    /// world fails before.
    pub(crate) fn start(&self, deadline: Duration) -> bool {
        self.post(Notice::Ready);
        self.wait_until(deadline, || self.started.get().is_some() || self.failure().is_some());
        self.started.get().is_some()
    }

    /// Says that this rank has finished. Only the first call counts.
    pub(crate) fn finish(&self) {
        if self.left.set(()).is_ok() {
            self.post(Notice::Finished(self.recorder.begun()));
        }
    }

    /// Waits until all ranks have finished or the world has failed, as it does when one falls silent.
    pub(crate) fn linger(&self) {
        self.wait_until(Duration::MAX, || self.is_over());
    }

    /// Takes note of what serves this rank's windows. Only the first call counts.
    pub(crate) fn attach(&self, fabric: &Arc<dyn Fabric>) {
        let _ = self.fabric.set(Arc::downgrade(fabric));
    }

    /// Says that this rank has dropped `group`, which has so many `members`.
    pub(crate) fn leave(&self, group: GroupId, members: usize) {
        self.post(Notice::Left { group, members });
    }

    /// For the agent: all members have dropped `group`.
    pub(crate) fn forget(&self, group: GroupId) {
        let Some(fabric) = self.fabric.get().and_then(Weak::upgrade) else { return };
        let Some(windows) = fabric.forget(group) else { return };
        if windows.is_empty() {
            return;
        }
        // A region may do anything when it goes, and the coordinator waits for answers meanwhile.
        let go = move || drop(windows);
        if let Err(error) = thread::Builder::new().name("zero-comm-forget".to_owned()).spawn(go) {
            tracing::debug!(%error, "no thread to drop windows, so the agent did");
        }
    }

    /// Whether all ranks have finished or the world has failed.
    pub(crate) fn is_over(&self) -> bool {
        self.failure().is_some() || self.finishes.iter().all(|finish| finish.get().is_some())
    }

    /// Takes no more notices: nobody is there to pass them on.
    pub(crate) fn close(&self) {
        lock(&self.notices).take();
    }

    fn decide(&self, notice: Notice, own: impl FnOnce() -> Failure) -> &Failure {
        if self.failure().is_none() && self.post(notice) {
            self.wait_until(VERDICT, || self.failure().is_some());
        }
        if self.failure().is_none() {
            self.settle(own());
        }
        self.failure.get_or_init(|| unreachable!("settled above"))
    }

    /// Whether somebody will pass the notice on.
    fn post(&self, notice: Notice) -> bool {
        let notices = lock(&self.notices);
        notices.as_ref().is_some_and(|notices| notices.send(notice).is_ok())
    }

    fn announce(&self) {
        drop(lock(&self.lock));
        self.changed.notify_all();
    }

    fn wait_until(&self, limit: Duration, reached: impl Fn() -> bool) {
        let until = Instant::now().checked_add(limit);
        let mut guard = lock(&self.lock);
        while !reached() {
            guard = match until {
                None => self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl fmt::Debug for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standing")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
