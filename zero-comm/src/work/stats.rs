//! What a queue has done so far.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zero_core::Bytes;

/// What a [`WorkQueue`](crate::WorkQueue) has done so far.
///
/// A work counts here by the time its [`Work::wait`](crate::Work::wait) returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkStats {
    /// Works that were submitted.
    pub submitted: u64,
    /// Works that have ended, well or not.
    pub ended: u64,
    /// Works that have ended with an error.
    pub failed: u64,
    /// What the ended works were about, whatever part of it this rank had to move: for each, the longest of
    /// its buffers.
    pub bytes: Bytes,
    /// Transfers that carried several buffers of one work.
    pub shared_transfers: u64,
    /// Buffers in shared transfers.
    pub shared_buffers: u64,
    /// How long the queue's thread was at work, waiting for other ranks included.
    pub busy: Duration,
    /// How long callers were kept in [`Work::wait`](crate::Work::wait): the part of `busy` that nothing hid,
    /// if one thread waits and all works are waited for.
    pub exposed: Duration,
}

/// [`WorkStats`] in the making.
#[derive(Debug, Default)]
pub(super) struct Counters {
    submitted: AtomicU64,
    ended: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    shared_transfers: AtomicU64,
    shared_buffers: AtomicU64,
    busy_nanos: AtomicU64,
    exposed_nanos: AtomicU64,
}

impl Counters {
    pub(super) fn submitted(&self) {
        add(&self.submitted, 1);
    }

    pub(super) fn ended(&self, bytes: usize, busy: Duration, failed: bool) {
        add(&self.failed, u64::from(failed));
        add(&self.bytes, bytes as u64);
        add(&self.busy_nanos, nanos(busy));
        add(&self.ended, 1);
    }

    /// One transfer carried several buffers.
    pub(super) fn shared(&self, buffers: usize) {
        add(&self.shared_transfers, 1);
        add(&self.shared_buffers, buffers as u64);
    }

    pub(super) fn exposed(&self, time: Duration) {
        add(&self.exposed_nanos, nanos(time));
    }

    pub(super) fn snapshot(&self) -> WorkStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WorkStats {
            ended: get(&self.ended),
            failed: get(&self.failed),
            bytes: Bytes::new(get(&self.bytes)),
            shared_transfers: get(&self.shared_transfers),
            shared_buffers: get(&self.shared_buffers),
            busy: Duration::from_nanos(get(&self.busy_nanos)),
            exposed: Duration::from_nanos(get(&self.exposed_nanos)),
            submitted: get(&self.submitted),
        }
    }
}

// Who waits for a work sees its counts through the lock of its result.
fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
