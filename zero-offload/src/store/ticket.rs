//! Reads and writes of whole tensors that go on while the caller does something else.

use std::sync::Arc;

use crate::buffer::HostBuffer;
use crate::memory::Memory;
use crate::store::batch::Batch;
use crate::store::error::StoreError;
use crate::store::slot::{Extent, Slot, Staged};
use crate::store::span::Span;

impl Slot {
    /// Begins to read the whole tensor into `buffer`, which must have its size.
    ///
    /// A buffer of 128 KiB or more is read into directly, a smaller one by way of memory beside it.
    ///
    /// # Errors
    ///
    /// [`StoreError::Range`] if the sizes differ.
    pub fn start_read(&self, buffer: HostBuffer) -> Result<ReadTicket, StoreError> {
        self.check_whole(&buffer)?;
        let mut buffer = Staging::new(buffer);
        let all = buffer.pages();
        self.zero_unwritten(0..self.blocks(), all);
        let requests = self.reads(0..self.blocks(), Span::of_mut(all));
        // SAFETY: the ticket owns the memory behind the batch, and leaking it leaks both.
        let batch = unsafe { self.store.queue.start(requests) };
        Ok(ReadTicket { batch, buffer, slot: self.hold() })
    }

    /// Begins to replace the whole tensor by `buffer`, which must have its size. Slot and buffer come back from the
    /// ticket.
    ///
    /// Nothing is returned here for an error to be lost with: [`WriteTicket::wait`] tells all of them.
    pub fn start_write(self, buffer: HostBuffer) -> WriteTicket {
        let mut staged = Staged::default();
        let mut staging = Staging::new(buffer);
        let batch = self.check_whole(&staging.buffer).and_then(|()| self.check_not_read()).map(|()| {
            staging.fill();
            let memory = Span::of_mut(staging.pages());
            // SAFETY: the ticket owns the memory behind the batch, and leaking it leaks both.
            unsafe {
                let requests = self.writes(0..self.blocks(), memory, &mut staged);
                self.store.queue.start(requests)
            }
        });
        WriteTicket { batch, buffer: staging, slot: self, staged }
    }

    fn check_whole(&self, buffer: &HostBuffer) -> Result<(), StoreError> {
        if buffer.len() as u64 == self.bytes() {
            return Ok(());
        }
        let (tensor, bytes, length) = (self.name().to_owned(), self.bytes(), buffer.len());
        Err(StoreError::Range { tensor, bytes, offset: 0, length })
    }
}

/// A read on its way. While it is there its slot cannot be written. Dropping it waits for the read.
#[derive(Debug)]
#[must_use = "dropping a ticket waits for its read"]
pub struct ReadTicket {
    // Dropped first, which waits.
    batch: Batch,
    buffer: Staging,
    slot: Arc<Extent>,
}

impl ReadTicket {
    /// Whether waiting would take no time.
    pub fn is_done(&self) -> bool {
        self.batch.is_done()
    }

    /// Waits for the read; the buffer then holds the tensor.
    ///
    /// # Errors
    ///
    /// When reading fails or finds other bytes than were written.
    pub fn wait(self) -> Result<HostBuffer, StoreError> {
        let Self { batch, buffer, slot } = self;
        batch.wait()?;
        drop(slot);
        Ok(buffer.into_read())
    }
}

/// A write on its way. Dropping it waits for the write and gives up the slot.
#[derive(Debug)]
#[must_use = "dropping a ticket waits for its write and drops its slot"]
pub struct WriteTicket {
    // Dropped first, which waits.
    batch: Result<Batch, StoreError>,
    buffer: Staging,
    slot: Slot,
    staged: Staged,
}

impl WriteTicket {
    /// Whether waiting would take no time.
    pub fn is_done(&self) -> bool {
        self.batch.as_ref().map_or(true, Batch::is_done)
    }

    /// Waits for the write. The slot then holds what the buffer does, or, if there is an error, what it held before.
    pub fn wait(self) -> (Slot, HostBuffer, Result<(), StoreError>) {
        let Self { batch, buffer, mut slot, staged } = self;
        let result = batch.and_then(Batch::wait);
        if result.is_ok() {
            slot.commit(staged);
        }
        (slot, buffer.buffer, result)
    }
}

/// A buffer, and pages to use in its place where it has none of its own.
#[derive(Debug)]
struct Staging {
    buffer: HostBuffer,
    beside: Option<Memory>,
}

impl Staging {
    fn new(mut buffer: HostBuffer) -> Self {
        let beside = buffer.whole_pages_mut().is_none().then(|| Memory::infallible_pages(buffer.len()));
        Self { buffer, beside }
    }

    /// Whole pages, the last of them longer than the tensor.
    fn pages(&mut self) -> &mut [u8] {
        let own = match &mut self.beside {
            Some(beside) => beside.whole_pages_mut(),
            None => self.buffer.whole_pages_mut(),
        };
        own.unwrap_or_default()
    }

    /// Makes the pages hold what the buffer does.
    fn fill(&mut self) {
        if let Some(beside) = &mut self.beside {
            beside.bytes_mut().copy_from_slice(&self.buffer);
        }
    }

    /// The buffer with what the pages hold.
    fn into_read(mut self) -> HostBuffer {
        if let Some(beside) = &self.beside {
            self.buffer.copy_from_slice(beside.bytes());
        }
        self.buffer
    }
}
