//! What a world knows about its ranks: who has finished, and why it failed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;

use zero_core::{Rank, WorldSize};

use super::lock;
use super::rendezvous::Rendezvous;
use crate::failure::Failure;
use crate::{CommError, OpKind};

/// How often a waiting rank looks before it sleeps: a few microseconds, about what falling asleep and being
/// woken costs.
const SPINS: u32 = 200;

/// The state of one world, shared by all groups of it.
pub(super) struct Health {
    spins: u32,
    /// For each rank that came to its end while the world had not failed, the how manieth it was.
    finished: Vec<AtomicUsize>,
    /// How many ranks have finished.
    finishes: AtomicUsize,
    failure: OnceLock<Failure>,
    /// Where ranks may be asleep.
    rendezvous: Mutex<Vec<Weak<Rendezvous>>>,
}

impl Health {
    pub(super) fn new(size: WorldSize) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            // With fewer cores than ranks, spinning takes the core from the rank that is waited for.
            spins: if size.get() <= cores { SPINS } else { 0 },
            finished: size.ranks().map(|_| AtomicUsize::new(0)).collect(),
            finishes: AtomicUsize::new(0),
            failure: OnceLock::new(),
            rendezvous: Mutex::new(Vec::new()),
        }
    }

    pub(super) const fn spins(&self) -> u32 {
        self.spins
    }

    /// Makes [`announce`](Self::announce) reach `rendezvous`.
    pub(super) fn register(&self, rendezvous: &Arc<Rendezvous>) {
        let mut all = lock(&self.rendezvous);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(rendezvous));
    }

    /// Fails the world, unless it has failed before.
    pub(super) fn fail(&self, failure: Failure) {
        if self.record(failure) {
            self.announce();
        }
    }

    /// Fails the world without waking anybody; `announce` must follow if this was the first failure.
    ///
    /// Takes no lock, so that a rendezvous can call it with its own lock held.
    pub(super) fn record(&self, failure: Failure) -> bool {
        self.failure.set(failure).is_ok()
    }

    /// Notes that `rank` will not come again.
    pub(super) fn finish(&self, rank: Rank) {
        // Otherwise a rank that ends because of a failure would hide the failure.
        if self.failure.get().is_some() || self.finished(rank).is_some() {
            return;
        }
        let order = self.finishes.fetch_add(1, Ordering::SeqCst) + 1;
        self.finished[rank.index()].store(order, Ordering::SeqCst);
        tracing::debug!(%rank, "rank finished");
        self.wake();
    }

    /// If `rank` has finished, its place in the order in which ranks did.
    pub(super) fn finished(&self, rank: Rank) -> Option<usize> {
        Some(self.finished[rank.index()].load(Ordering::SeqCst)).filter(|order| *order > 0)
    }

    /// The error that `operation` gets if the world has failed.
    pub(super) fn check(&self, operation: OpKind, label: &str) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.error(operation, label)))
    }

    /// The rank that the first failure names as its origin.
    pub(super) fn blamed(&self) -> Option<Rank> {
        self.failure.get()?.blamed()
    }

    /// Lets every waiting rank see the failure.
    pub(super) fn announce(&self) {
        if let Some(failure) = self.failure.get() {
            tracing::debug!(cause = %failure, "world failed");
        }
        self.wake();
    }

    fn wake(&self) {
        let all: Vec<_> = lock(&self.rendezvous).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|rendezvous| rendezvous.wake());
    }
}
