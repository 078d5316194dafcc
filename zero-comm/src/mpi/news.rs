//! How a thread learns that something has happened for it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;

/// A bell that one thread listens to.
#[derive(Debug, Default)]
pub(super) struct News {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl News {
    pub(super) fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_one();
    }

    /// Waits until it has rung since the last wait, or `limit` has passed.
    pub(super) fn wait(&self, limit: Duration) {
        let waited = self.changed.wait_timeout_while(lock(&self.rung), limit, |rung| !*rung);
        let (mut rung, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *rung = false;
    }
}
