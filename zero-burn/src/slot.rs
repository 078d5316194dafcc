//! Where the engine in charge is found.

use std::sync::{Arc, Mutex};

use crate::ZeroError;
use crate::engine::{Engine, lock};

/// Holds the engine once there is one. Freezing and adding parameters put another one in its place.
#[derive(Debug, Default)]
pub(crate) struct Slot(Mutex<Option<Arc<Engine>>>);

impl Slot {
    pub(crate) fn get(&self) -> Result<Arc<Engine>, ZeroError> {
        lock(&self.0).clone().ok_or(ZeroError::NotSharded)
    }

    pub(crate) fn set(&self, engine: Arc<Engine>) {
        // What was there goes after the lock.
        let previous = lock(&self.0).replace(engine);
        drop(previous);
    }
}
