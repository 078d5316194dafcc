//! One block on its way: what is resumed, and what is an error.

use std::io;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::memory::PAGE;
use crate::store::batch::BatchState;
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
    pub(crate) fn new(request: Request, batch: Arc<BatchState>) -> Self {
        Self { request, done: 0, stalls: 0, batch }
    }

    pub(crate) fn batch(&self) -> &BatchState {
        &self.batch
    }

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
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> Result<bool, StoreError> {
        let length = self.request.memory.len();
        let stalled = match result {
            Ok(bytes) if self.done + bytes >= length => {
                self.done = length;
                return Ok(true);
            }
            // The end of the file; trying again finds it again.
            Ok(0) => return Err(self.short()),
            Ok(bytes) => {
                let mut done = self.done + bytes;
                if self.request.file.direct() {
                    // What goes past the page cache goes by whole pages.
                    done -= done % PAGE;
                }
                if done > self.done {
                    (self.done, self.stalls) = (done, 0);
                    return Ok(false);
                }
                self.short()
            }
            Err(error) if [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock].contains(&error.kind()) => {
                self.failed(error)
            }
            Err(error) => return Err(self.failed(error)),
        };
        self.stalls += 1;
        if self.stalls > STALLS { Err(stalled) } else { Ok(false) }
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
    pub(crate) fn check(&self) {
        let Request { direction, file, tensor, offset, memory, sum } = &self.request;
        // SAFETY: `Queue::start` was promised that the memory is there until the batch is done.
        if *direction == Direction::Read && checksum(unsafe { memory.bytes() }) != *sum {
            let (tensor, path, offset) = (tensor.to_string(), file.path().to_owned(), *offset);
            self.batch.fail(StoreError::Corrupt { tensor, path, offset, length: memory.len() });
        }
    }

    /// Tells who waits.
    pub(crate) fn finish(self) {
        // Whoever waits may count on the file to be gone once they drop the store.
        drop(self.request);
        self.batch.finish_one();
    }
}
