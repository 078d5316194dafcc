//! What an engine is in the middle of, and what went wrong without a call to tell it.

use std::sync::Mutex;

use crate::ZeroError;
use crate::engine::lock;

/// Backward or not, and errors on their way to the next fallible call.
#[derive(Debug, Default)]
pub(crate) struct Phase(Mutex<State>);

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
        lock(&self.0).in_backward = in_backward;
    }

    pub(crate) fn is_in_backward(&self) -> bool {
        lock(&self.0).in_backward
    }

    /// The first failure or, once, the first misuse.
    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        let mut state = lock(&self.0);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.misuse.take().map_or(Ok(()), Err)
    }

    /// The failure alone.
    pub(crate) fn check_failure(&self) -> Result<(), ZeroError> {
        lock(&self.0).failure.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn note(&self, misuse: ZeroError) {
        lock(&self.0).misuse.get_or_insert(misuse);
    }

    pub(crate) fn fail(&self, failure: &ZeroError) {
        lock(&self.0).failure.get_or_insert_with(|| failure.clone());
    }
}
