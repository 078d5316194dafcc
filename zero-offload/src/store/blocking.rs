//! Reads and writes that wait, of any part of a tensor, from and to memory of any alignment.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;

use crate::memory::PAGE;
use crate::store::arena::Lease;
use crate::store::batch::Batch;
use crate::store::error::StoreError;
use crate::store::slot::{Slot, Staged};
use crate::store::span::Span;
use crate::store::transfer::Request;

impl Slot {
    /// Reads the bytes from `offset` on into `into`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Range`]; and when reading fails or finds other bytes than were written. `into` then holds
    /// anything.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.check_range(offset, into.len())?;
        let mut window = Window::new(self);
        let mut rest = into;
        for part in self.parts(offset, rest.len()) {
            let (into, later) = mem::take(&mut rest).split_at_mut(part.within.len());
            rest = later;
            if !self.is_written(part.block) {
                into.fill(0);
            } else if part.is_direct(self, into) {
                let requests = self.reads(part.block..part.block + 1, Span::of_mut(into));
                window.start(requests, Kept::Callers)?;
            } else {
                let mut lease = window.lease()?;
                let requests = self.reads(part.block..part.block + 1, Span::of_mut(&mut lease));
                window.start(requests, Kept::Copied { lease, from: part.within, into })?;
            }
        }
        window.finish()
    }

    /// Replaces the bytes from `offset` on by `from`. If that fails, all of them are what they were.
    ///
    /// # Errors
    ///
    /// [`StoreError::Range`]; [`StoreError::Busy`] while a [`ReadTicket`](crate::ReadTicket) of the slot is there;
    /// and when writing fails, or reading what shares a block with the bytes.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.check_range(offset, from.len())?;
        self.check_not_read()?;
        let staged = self.stage(offset, from)?;
        self.commit(staged);
        Ok(())
    }

    fn stage(&self, offset: u64, from: &[u8]) -> Result<Staged, StoreError> {
        let mut window = Window::new(self);
        let mut staged = Staged::default();
        let mut rest = from;
        for part in self.parts(offset, from.len()) {
            let (from, later) = rest.split_at(part.within.len());
            rest = later;
            let blocks = part.block..part.block + 1;
            if part.is_direct(self, from) {
                // SAFETY: the memory is borrowed until the window is finished or dropped.
                let requests = unsafe { self.writes(blocks, Span::of(from), &mut staged) };
                window.start(requests, Kept::Callers)?;
                continue;
            }
            let mut lease = window.lease()?;
            let stored = self.stored_len(part.block);
            let partial = part.within.len() < self.block_len(part.block);
            if partial && self.is_written(part.block) {
                let requests = self.reads(blocks.clone(), Span::of_mut(&mut lease[..stored]));
                // SAFETY: the lease is held until the batch has been waited for, in this statement.
                unsafe { self.store.queue.start(requests) }.wait()?;
            } else {
                lease[..part.within.start].fill(0);
                lease[part.within.end..stored].fill(0);
            }
            lease[part.within].copy_from_slice(from);
            // SAFETY: the lease goes into the window, which keeps it until the batch is done.
            let requests = unsafe { self.writes(blocks, Span::of(&lease), &mut staged) };
            window.start(requests, Kept::Leased { _lease: lease })?;
        }
        window.finish()?;
        Ok(staged)
    }

    /// The blocks that `length` bytes at `offset` lie in.
    fn parts(&self, offset: u64, length: usize) -> impl Iterator<Item = Part> + use<> {
        let block = self.store.block as u64;
        let end = offset + length as u64;
        let blocks = if length == 0 { 0..0 } else { offset / block..end.div_ceil(block) };
        blocks.map(move |index| {
            let start = index * block;
            let within = offset.max(start) - start..end.min(start + block) - start;
            Part { block: index as usize, within: within.start as usize..within.end as usize }
        })
    }
}

/// A part of one block.
struct Part {
    block: usize,
    within: Range<usize>,
}

impl Part {
    /// Whether `memory` can be transferred as it is: it is all of the block and aligned.
    fn is_direct(&self, slot: &Slot, memory: &[u8]) -> bool {
        memory.len() == slot.stored_len(self.block) && memory.as_ptr().addr().is_multiple_of(PAGE)
    }
}

/// Transfers of one caller, of which the oldest are waited for when there are too many.
struct Window<'a> {
    slot: &'a Slot,
    flights: VecDeque<Flight<'a>>,
}

/// The batch comes first: dropping it waits, and only then may the memory go.
struct Flight<'a> {
    batch: Batch,
    kept: Kept<'a>,
}

/// The memory of a transfer.
enum Kept<'a> {
    /// The caller's, whose borrow outlives the window.
    Callers,
    /// A block to write.
    Leased { _lease: Lease<'a> },
    /// A block to read into, of which the caller wants a part.
    Copied { lease: Lease<'a>, from: Range<usize>, into: &'a mut [u8] },
}

impl<'a> Window<'a> {
    fn new(slot: &'a Slot) -> Self {
        Self { slot, flights: VecDeque::new() }
    }

    /// A block to go between the caller's memory and the file.
    fn lease(&mut self) -> Result<Lease<'a>, StoreError> {
        loop {
            if let Some(lease) = self.slot.store.arena.try_lease() {
                return Ok(lease);
            }
            match self.flights.pop_front() {
                Some(flight) => flight.finish()?,
                None => return Ok(self.slot.store.arena.lease()),
            }
        }
    }

    /// Begins requests for memory that `kept` holds.
    fn start(&mut self, requests: Vec<Request>, kept: Kept<'a>) -> Result<(), StoreError> {
        // SAFETY: `kept` holds the memory, or the caller's borrow does beyond the window; the batch is waited for
        // before either goes: nothing here leaks it.
        let batch = unsafe { self.slot.store.queue.start(requests) };
        self.flights.push_back(Flight { batch, kept });
        // Enough for the queue never to run dry.
        if self.flights.len() > 2 * self.slot.store.depth
            && let Some(oldest) = self.flights.pop_front()
        {
            oldest.finish()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), StoreError> {
        self.flights.drain(..).try_for_each(Flight::finish)
    }
}

impl Flight<'_> {
    fn finish(self) -> Result<(), StoreError> {
        self.batch.wait()?;
        if let Kept::Copied { lease, from, into } = self.kept {
            into.copy_from_slice(&lease[from]);
        }
        Ok(())
    }
}
