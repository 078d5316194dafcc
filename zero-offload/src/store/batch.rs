//! Several transfers that somebody waits for.

use std::sync::{Arc, Condvar, Mutex};

use crate::lock::{lock, wait};
use crate::store::error::StoreError;

/// Transfers that are waited for together. Dropping it waits too.
#[derive(Debug)]
pub(crate) struct Batch(pub(crate) Arc<BatchState>);

impl Batch {
    /// Waits for all of them; the first error, if there was one.
    pub(crate) fn wait(self) -> Result<(), StoreError> {
        self.0.wait().map_or(Ok(()), Err)
    }

    /// Whether waiting would take no time.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.0.progress).left == 0
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// What waiter and transfers share.
#[derive(Debug)]
pub(crate) struct BatchState {
    progress: Mutex<Progress>,
    done: Condvar,
}

#[derive(Debug)]
struct Progress {
    left: usize,
    error: Option<StoreError>,
}

impl BatchState {
    pub(crate) fn new(transfers: usize) -> Self {
        let progress = Progress { left: transfers, error: None };
        Self { progress: Mutex::new(progress), done: Condvar::new() }
    }

    pub(crate) fn failed(&self) -> bool {
        lock(&self.progress).error.is_some()
    }

    /// Keeps the first error; what has not begun then never does.
    pub(crate) fn fail(&self, error: StoreError) {
        lock(&self.progress).error.get_or_insert(error);
    }

    pub(crate) fn finish_one(&self) {
        let mut progress = lock(&self.progress);
        progress.left -= 1;
        if progress.left == 0 {
            self.done.notify_all();
        }
    }

    fn wait(&self) -> Option<StoreError> {
        let mut progress = lock(&self.progress);
        while progress.left > 0 {
            progress = wait(&self.done, progress);
        }
        progress.error.take()
    }
}
