//! Transfers on their way: how many at once, what is resumed, what is an error.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use xxhash_rust::xxh3::xxh3_64;

use crate::memory::PAGE;
use crate::store::driver::{Attempt, Driver, Sink};
use crate::store::error::{Direction, StoreError};
use crate::store::file::DataFile;
use crate::store::span::Span;

/// How often in a row a transfer may be interrupted, put off or cut to nothing before that is an error.
const STALLS: u32 = 1000;

/// One block to be read or written.
pub(crate) struct Request {
    pub(crate) direction: Direction,
    pub(crate) file: Arc<DataFile>,
    pub(crate) tensor: Arc<str>,
    /// Where in the file.
    pub(crate) offset: u64,
    pub(crate) memory: Span,
    /// What the bytes must hash to.
    pub(crate) sum: u64,
}

/// The hash by which a block is known again.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// A request, what is done of it, and who waits for it.
pub(crate) struct Transfer {
    request: Request,
    done: usize,
    stalls: u32,
    batch: Arc<BatchState>,
}

impl Transfer {
    pub(crate) fn direction(&self) -> Direction {
        self.request.direction
    }

    pub(crate) fn file(&self) -> &DataFile {
        &self.request.file
    }

    /// Where the rest begins in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.request.offset + self.done as u64
    }

    /// The memory of the rest.
    pub(crate) fn rest(&self) -> Span {
        self.request.memory.from(self.done)
    }

    /// Takes in what one attempt came to; true if all is done, false if it must be tried again.
    fn advance(&mut self, result: io::Result<usize>) -> Result<bool, StoreError> {
        let length = self.request.memory.len();
        match result {
            Ok(bytes) if self.done + bytes >= length => {
                self.done = length;
                return Ok(true);
            }
            Ok(bytes) => {
                let mut done = self.done + bytes;
                if self.request.file.direct() {
                    // What goes past the page cache goes by whole pages.
                    done -= done % PAGE;
                }
                if bytes == 0 {
                    // The end of the file; trying again finds it again.
                    return Err(self.short());
                }
                if done > self.done {
                    (self.done, self.stalls) = (done, 0);
                    return Ok(false);
                }
            }
            Err(error) if [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock].contains(&error.kind()) => {
                if self.stalls >= STALLS {
                    return Err(self.failed(error));
                }
            }
            Err(error) => return Err(self.failed(error)),
        }
        self.stalls += 1;
        if self.stalls > STALLS { Err(self.short()) } else { Ok(false) }
    }

    fn failed(&self, source: io::Error) -> StoreError {
        let Request { direction, file, tensor, .. } = &self.request;
        StoreError::Io {
            direction: *direction,
            tensor: tensor.to_string(),
            path: file.path().to_owned(),
            offset: self.offset(),
            length: self.rest().len(),
            source,
        }
    }

    fn short(&self) -> StoreError {
        let Request { direction, file, tensor, offset, memory, .. } = &self.request;
        StoreError::Short {
            direction: *direction,
            tensor: tensor.to_string(),
            path: file.path().to_owned(),
            offset: *offset,
            length: memory.len(),
            done: self.done,
        }
    }

    /// Compares what was read with what was written.
    fn check(&self) {
        let Request { direction, file, tensor, offset, memory, sum } = &self.request;
        // SAFETY: `Queue::start` was promised that the memory is there until the batch is done.
        if *direction == Direction::Read && checksum(unsafe { memory.bytes() }) != *sum {
            let (tensor, path, offset) = (tensor.to_string(), file.path().to_owned(), *offset);
            self.batch.fail(StoreError::Corrupt { tensor, path, offset, length: memory.len() });
        }
    }

    /// Tells who waits.
    fn finish(self) {
        // Whoever waits may count on the file to be gone once they drop the store.
        drop(self.request);
        self.batch.finish_one();
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { direction, tensor, offset, memory, .. } = &self.request;
        write!(f, "{direction} {tensor}, {} of {} bytes at {offset}", self.done, memory.len())
    }
}

/// Keeps up to a number of transfers with a driver, in the order in which they came.
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

impl Queue {
    /// A queue for `depth` transfers at once over what `make` makes of where results go.
    pub(crate) fn new(
        depth: usize,
        make: impl FnOnce(Arc<dyn Sink>) -> Result<Box<dyn Driver>, StoreError>,
    ) -> Result<Self, StoreError> {
        let relay = Arc::new(Relay::default());
        let driver = make(relay.clone())?;
        let shared = Arc::new(Shared { driver, depth, state: Mutex::default(), idle: Condvar::new() });
        // It was made above, empty.
        let _ = relay.0.set(Arc::downgrade(&shared));
        Ok(Self { shared })
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
        let transfers = requests.into_iter().map(|request| Transfer {
            request,
            done: 0,
            stalls: 0,
            batch: Arc::clone(&batch),
        });
        lock(&self.shared.state).pending.extend(transfers);
        self.shared.feed();
        Batch(batch)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        while state.in_flight > 0 || !state.pending.is_empty() {
            state = self.shared.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
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
            if transfer.batch.failed() {
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
                    transfer.batch.fail(error);
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

/// Transfers that are waited for together. Dropping it waits too.
#[derive(Debug)]
pub(crate) struct Batch(Arc<BatchState>);

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

#[derive(Debug)]
struct BatchState {
    progress: Mutex<Progress>,
    done: Condvar,
}

#[derive(Debug)]
struct Progress {
    left: usize,
    error: Option<StoreError>,
    failed: bool,
}

impl BatchState {
    fn new(transfers: usize) -> Self {
        let progress = Progress { left: transfers, error: None, failed: false };
        Self { progress: Mutex::new(progress), done: Condvar::new() }
    }

    fn failed(&self) -> bool {
        lock(&self.progress).failed
    }

    /// Keeps the first error; what has not begun then never does.
    fn fail(&self, error: StoreError) {
        let mut progress = lock(&self.progress);
        progress.failed = true;
        progress.error.get_or_insert(error);
    }

    fn finish_one(&self) {
        let mut progress = lock(&self.progress);
        progress.left -= 1;
        if progress.left == 0 {
            self.done.notify_all();
        }
    }

    fn wait(&self) -> Option<StoreError> {
        let mut progress = lock(&self.progress);
        while progress.left > 0 {
            progress = self.done.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress.error.take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No panic can leave the state of a queue half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
