//! Ranks as threads of one process, which read each other's memory.
//!
//! Nothing is serialised and nothing is copied twice: each rank lends its buffers to a rendezvous, and as
//! soon as all have come each computes its own part straight from the memory of the others. The argument why
//! that is sound stands in `rendezvous`, the code that relies on it in `meeting`.

mod communicator;
mod group;
mod health;
mod meeting;
mod presence;
mod rendezvous;
mod windows;
mod world;
mod world_error;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use world::LocalWorld;
pub use world_error::{RankFailure, WorldError};

/// Locks `mutex` even if a thread panicked with it: every critical section here leaves its data whole.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
