//! Mutexes whose state no panic can leave half changed: their poison has nothing to tell.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits to be notified.
#[cfg(unix)]
pub(crate) fn wait<'a, T>(notified: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    notified.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
