//! How a save that went on beside training ended.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::CheckpointError;
use crate::save::protocol::Saved;

/// Shared by who saves, who started it and who holds a [`Pending`].
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    done: bool,
    /// Taken by the first who asks.
    result: Option<Result<Saved, CheckpointError>>,
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, result: Result<Saved, CheckpointError>) {
        *self.state() = State { done: true, result: Some(result) };
        self.done.notify_all();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state().done
    }

    /// Waits for the end; `None` if somebody else has taken the result.
    pub(crate) fn wait(&self) -> Option<Result<Saved, CheckpointError>> {
        let state = self.done.wait_while(self.state(), |state| !state.done);
        state.unwrap_or_else(PoisonError::into_inner).result.take()
    }
}

/// A save that goes on beside training.
///
/// To drop it changes nothing: an error that nobody has waited for is returned by the saver's next call.
#[derive(Debug)]
pub struct Pending {
    pub(crate) step: u64,
    pub(crate) outcome: Arc<Outcome>,
}

impl Pending {
    /// The step that is being saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.outcome.is_done()
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// Those of [`Saver::save`](crate::Saver::save); [`CheckpointError::AlreadyTold`] if the saver has returned the error
    /// of this save already.
    pub fn wait(self) -> Result<Saved, CheckpointError> {
        self.outcome.wait().unwrap_or(Err(CheckpointError::AlreadyTold { step: self.step }))
    }
}
