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
enum State {
    #[default]
    GoesOn,
    Saved(Saved),
    /// The error is taken by the first who asks.
    Failed(Option<CheckpointError>),
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_done(&self) -> bool {
        !matches!(*self.state(), State::GoesOn)
    }

    /// Waits for the end; `None` if somebody else has taken the error.
    pub(crate) fn wait(&self) -> Option<Result<Saved, CheckpointError>> {
        let state = self.done.wait_while(self.state(), |state| matches!(state, State::GoesOn));
        match &mut *state.unwrap_or_else(PoisonError::into_inner) {
            State::GoesOn => None,
            State::Saved(saved) => Some(Ok(saved.clone())),
            State::Failed(error) => error.take().map(Err),
        }
    }
}

/// The duty to set an outcome. Who drops it has panicked, or has nobody left to do the work.
#[derive(Debug)]
pub(crate) struct Promise(Arc<Outcome>);

impl Promise {
    /// A promise, and what will be set.
    pub(crate) fn new() -> (Self, Arc<Outcome>) {
        let outcome = Arc::new(Outcome::default());
        (Self(Arc::clone(&outcome)), outcome)
    }

    pub(crate) fn keep(self, result: Result<Saved, CheckpointError>) {
        self.set(result);
    }

    /// Only the first one counts.
    fn set(&self, result: Result<Saved, CheckpointError>) {
        let mut state = self.0.state();
        if let State::GoesOn = *state {
            *state = match result {
                Ok(saved) => State::Saved(saved),
                Err(error) => State::Failed(Some(error)),
            };
            self.0.done.notify_all();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.set(Err(CheckpointError::WorkerGone));
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
    /// of this save already; [`CheckpointError::WorkerGone`] if the thread that saves has panicked.
    pub fn wait(self) -> Result<Saved, CheckpointError> {
        self.outcome.wait().unwrap_or(Err(CheckpointError::AlreadyTold { step: self.step }))
    }
}
