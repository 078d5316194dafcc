//! How many transfers are on their way at once, and in which order.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};

use crate::lock::{lock, wait};
use crate::store::batch::{Batch, BatchState};
use crate::store::driver::{Attempt, Driver, Sink};
use crate::store::error::StoreError;
use crate::store::options::Engine;
use crate::store::transfer::{Request, Transfer};

/// Keeps up to a number of transfers with a driver, in the order in which they came.
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

impl Queue {
    /// A queue for `depth` transfers at once over what `make` makes of where results go, and which engine that is.
    pub(crate) fn new(
        depth: usize,
        make: impl FnOnce(Arc<dyn Sink>) -> Result<(Box<dyn Driver>, Engine), StoreError>,
    ) -> Result<(Self, Engine), StoreError> {
        let relay = Arc::new(Relay::default());
        let (driver, engine) = make(relay.clone())?;
        let shared = Arc::new(Shared { driver, depth, state: Mutex::default(), idle: Condvar::new() });
        // It was made above, empty.
        let _ = relay.0.set(Arc::downgrade(&shared));
        Ok((Self { shared }, engine))
    }

    /// Begins all the requests.
    ///
    /// # Safety
    ///
    /// Until the batch is done (waited for, or dropped, which waits), the memory of the requests must be there,
    /// nobody may write to it, and nobody may read what is read into. The batch must not be leaked if that can
    /// end earlier.
    pub(crate) unsafe fn start(&self, requests: Vec<Request>) -> Batch {
        let batch = Arc::new(BatchState::new(requests.len()));
        let transfers = requests.into_iter().map(|request| Transfer::new(request, Arc::clone(&batch)));
        lock(&self.shared.state).pending.extend(transfers);
        self.shared.feed();
        Batch(batch)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        while state.in_flight > 0 || !state.pending.is_empty() {
            state = wait(&self.shared.idle, state);
        }
        drop(state);
        self.shared.driver.stop();
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.shared.state);
        f.debug_struct("Queue")
            .field("depth", &self.shared.depth)
            .field("in_flight", &state.in_flight)
            .finish()
    }
}

struct Shared {
    driver: Box<dyn Driver>,
    depth: usize,
    state: Mutex<State>,
    /// Notified when nothing is in flight or pending any more.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Transfer>,
    in_flight: usize,
}

impl Shared {
    /// Hands the driver what it may have.
    fn feed(&self) {
        let (mut attempts, mut skipped) = (Vec::new(), Vec::new());
        let mut state = lock(&self.state);
        while state.in_flight < self.depth {
            let Some(transfer) = state.pending.pop_front() else { break };
            if transfer.batch().failed() {
                skipped.push(transfer);
            } else {
                state.in_flight += 1;
                let length = transfer.rest().len();
                attempts.push(Attempt { transfer, length });
            }
        }
        if state.in_flight == 0 && state.pending.is_empty() {
            self.idle.notify_all();
        }
        drop(state);
        skipped.into_iter().for_each(Transfer::finish);
        if !attempts.is_empty() {
            self.driver.start(attempts);
        }
    }
}

impl Sink for Shared {
    fn ended(&self, attempts: Vec<(Attempt, io::Result<usize>)>) {
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        let mut state = lock(&self.state);
        state.in_flight -= attempts.len();
        for (Attempt { mut transfer, .. }, result) in attempts {
            match transfer.advance(result) {
                Ok(false) => state.pending.push_front(transfer),
                Ok(true) => done.push(transfer),
                Err(error) => {
                    transfer.batch().fail(error);
                    failed.push(transfer);
                }
            }
        }
        drop(state);
        // The device first, it must not wait for the hashing.
        self.feed();
        failed.into_iter().for_each(Transfer::finish);
        for transfer in done {
            transfer.check();
            transfer.finish();
        }
    }
}

/// Where a driver's results go; it is made before the queue that gets them.
#[derive(Default)]
struct Relay(OnceLock<Weak<Shared>>);

impl Sink for Relay {
    fn ended(&self, attempts: Vec<(Attempt, io::Result<usize>)>) {
        // Always there: a driver has results only of what a queue gave it, and the queue stops it before it goes.
        if let Some(shared) = self.0.get().and_then(Weak::upgrade) {
            shared.ended(attempts);
        }
    }
}
