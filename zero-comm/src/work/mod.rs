//! Operations that a thread of their own does, while the caller goes on.
//!
//! # What travels together
//!
//! [`WorkQueue::all_reduce_many`] and [`WorkQueue::all_gather_many`] take the whole set at once. What goes into
//! one transfer follows from the lengths and from [`WorkQueue::with_transfer_bytes`] alone, so all ranks cut
//! alike, however fast their queues fill and empty. Elements are reduced one by one, in rank order, so sharing
//! a transfer does not change a bit of the result.
//!
//! # Why large operations are not cut
//!
//! Operations are done first in, first out. A large one that is cut does not let the next one begin earlier,
//! and each piece costs another latency; within a transfer it is the backend that pipelines. What must not
//! wait behind a large operation belongs on a queue of its own, with a group of its own.

mod many;
mod queue;
mod result;
mod stats;

pub use many::Gather;
pub use queue::WorkQueue;
pub use result::{Work, WorkError};
pub use stats::WorkStats;
