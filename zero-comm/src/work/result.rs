//! What becomes of a submitted operation.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::stats::Counters;
use crate::CommError;
use crate::lock::lock;

/// An operation on its way, with the buffers that moved into it.
///
/// Dropping it does not cancel the operation, for which other ranks may wait; nor does it wait. The buffers
/// are then dropped when the operation has ended.
#[must_use = "whether the operation succeeded is told by `wait` alone"]
pub struct Work<B> {
    slot: Arc<Slot<B>>,
    counters: Arc<Counters>,
}

/// An operation that failed, and the buffers that moved into it.
///
/// Contents of buffers that were to be written are unspecified; those that were only read are unchanged.
#[derive(Clone, thiserror::Error)]
#[error("{error}")]
pub struct WorkError<B> {
    /// Why it failed.
    #[source]
    pub error: CommError,
    /// The buffers, as they were submitted.
    pub buffers: B,
}

impl<B> From<WorkError<B>> for CommError {
    fn from(failed: WorkError<B>) -> Self {
        failed.error
    }
}

impl<B> fmt::Debug for WorkError<B> {
    // Without the buffers, so that any can be in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> Work<B> {
    pub(super) const fn new(slot: Arc<Slot<B>>, counters: Arc<Counters>) -> Self {
        Self { slot, counters }
    }

    /// Whether the operation has ended, well or not, so that [`wait`](Self::wait) returns at once.
    pub fn is_done(&self) -> bool {
        lock(&self.slot.outcome).is_some()
    }

    /// Waits for the end of the operation and gives the buffers back.
    ///
    /// It ends: when the operations before it have ended and this one has, each at its deadline at the latest.
    ///
    /// # Errors
    ///
    /// What the operation returned, with the buffers.
    pub fn wait(self) -> Result<B, WorkError<B>> {
        let mut outcome = lock(&self.slot.outcome);
        if let Some(outcome) = outcome.take() {
            return outcome;
        }
        let begun = Instant::now();
        loop {
            outcome = self.slot.ended.wait(outcome).unwrap_or_else(PoisonError::into_inner);
            if let Some(outcome) = outcome.take() {
                self.counters.exposed(begun.elapsed());
                return outcome;
            }
        }
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("is_done", &self.is_done()).finish()
    }
}

/// Where a queue leaves the outcome of an operation.
pub(super) struct Slot<B> {
    outcome: Mutex<Option<Result<B, WorkError<B>>>>,
    ended: Condvar,
}

impl<B> Slot<B> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: Mutex::new(None), ended: Condvar::new() })
    }

    pub(super) fn fill(&self, outcome: Result<B, WorkError<B>>) {
        *lock(&self.outcome) = Some(outcome);
        self.ended.notify_one();
    }
}
