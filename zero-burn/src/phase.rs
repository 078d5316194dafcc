//! What an engine is in the middle of, and what went wrong without a call to tell it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::ZeroError;
use crate::engine::lock;

/// Backward or not, and errors on their way to the next fallible call.
#[derive(Debug, Default)]
pub(crate) struct Phase {
    state: Mutex<State>,
    shards: Arc<Shards>,
}

/// Whether shards are moved out, to be updated.
#[derive(Debug, Default)]
struct Shards {
    are_out: Mutex<bool>,
    are_back: Condvar,
}

/// Shards are moved out for as long as this is held.
#[derive(Debug)]
pub(crate) struct Updating(Arc<Shards>);

impl Drop for Updating {
    fn drop(&mut self) {
        *lock(&self.0.are_out) = false;
        self.0.are_back.notify_all();
    }
}

#[derive(Debug, Default)]
struct State {
    in_backward: bool,
    /// Something that should not have come; told once, by the next fallible call.
    misuse: Option<ZeroError>,
    /// A failed operation between ranks; final.
    failure: Option<ZeroError>,
}

impl Phase {
    pub(crate) fn set_in_backward(&self, in_backward: bool) {
        lock(&self.state).in_backward = in_backward;
    }

    pub(crate) fn is_in_backward(&self) -> bool {
        lock(&self.state).in_backward
    }

    /// The first failure or, once, the first misuse.
    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.misuse.take().map_or(Ok(()), Err)
    }

    /// The failure alone.
    pub(crate) fn check_failure(&self) -> Result<(), ZeroError> {
        lock(&self.state).failure.clone().map_or(Ok(()), Err)
    }

    /// Shards are about to be moved out: who asks for them waits.
    pub(crate) fn begin_update(&self) -> Updating {
        *lock(&self.shards.are_out) = true;
        Updating(Arc::clone(&self.shards))
    }

    /// Waits until all shards are in place, for another thread may be in a step; none is moved out while the guard is held.
    pub(crate) fn wait_for_shards(&self) -> MutexGuard<'_, bool> {
        let mut are_out = lock(&self.shards.are_out);
        while *are_out {
            are_out = self.shards.are_back.wait(are_out).unwrap_or_else(PoisonError::into_inner);
        }
        are_out
    }

    pub(crate) fn note(&self, misuse: ZeroError) {
        lock(&self.state).misuse.get_or_insert(misuse);
    }

    pub(crate) fn fail(&self, failure: &ZeroError) {
        lock(&self.state).failure.get_or_insert_with(|| failure.clone());
    }
}
