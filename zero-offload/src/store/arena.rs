//! Aligned blocks for what is not aligned itself.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex};

use crate::lock::{lock, wait};
use crate::memory::Memory;
use crate::store::span::Span;

/// A fixed number of blocks of one size, each lent to one user at a time.
pub(crate) struct Arena {
    all: Span,
    block: usize,
    /// Where the blocks begin that nobody has.
    free: Mutex<Vec<usize>>,
    freed: Condvar,
    /// Owns what `all` spans.
    _memory: Memory,
}

impl Arena {
    /// As many blocks of `block` bytes as `bytes` hold; none if there is not so much memory.
    pub(crate) fn new(bytes: usize, block: usize) -> Option<Self> {
        let length = bytes - bytes % block;
        let mut memory = Memory::pages(length)?;
        let all = Span::of_mut(memory.bytes_mut());
        let free = Mutex::new((0..length).step_by(block).collect());
        Some(Self { all, block, free, freed: Condvar::new(), _memory: memory })
    }

    /// All the memory.
    pub(crate) fn span(&self) -> Span {
        self.all
    }

    /// A block, if there is one.
    pub(crate) fn try_lease(&self) -> Option<Lease<'_>> {
        let offset = lock(&self.free).pop()?;
        Some(Lease { arena: self, offset })
    }

    /// Waits for a block. Whoever has one already must give it back first, or all may wait for each other.
    pub(crate) fn lease(&self) -> Lease<'_> {
        let mut free = lock(&self.free);
        loop {
            if let Some(offset) = free.pop() {
                return Lease { arena: self, offset };
            }
            free = wait(&self.freed, free);
        }
    }
}

/// A block on loan; it holds whatever its last user left.
pub(crate) struct Lease<'a> {
    arena: &'a Arena,
    offset: usize,
}

impl Lease<'_> {
    fn span(&self) -> Span {
        self.arena.all.part(self.offset, self.arena.block)
    }
}

impl Deref for Lease<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the arena's memory is initialised and outlives the lease, which alone has this part of it.
        unsafe { self.span().bytes() }
    }
}

impl DerefMut for Lease<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the span was made of memory to write to.
        unsafe { self.span().bytes_mut() }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        lock(&self.arena.free).push(self.offset);
        self.arena.freed.notify_one();
    }
}
