//! A buffer on loan from a pool.

use std::fmt;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytemuck::Pod;

use crate::memory::{LINE, Memory};
use crate::pool::Shared;

/// Host memory of an exact size, aligned to 64 bytes, from 128 KiB on and where its pool page-locks memory to a page of
/// 4096; dropping it returns it to its pool.
///
/// A buffer may outlive every handle of the pool it came from. It reads and writes as a byte slice, or as a
/// slice of numbers through [`as_slice`](Self::as_slice) and [`as_mut_slice`](Self::as_mut_slice).
pub struct HostBuffer {
    memory: Memory,
    pool: Arc<Shared>,
}

impl HostBuffer {
    /// The least alignment of a buffer, in bytes: a cache line.
    pub const ALIGNMENT: usize = LINE;

    pub(crate) fn new(memory: Memory, pool: Arc<Shared>) -> Self {
        Self { memory, pool }
    }

    /// The contents as elements of `T`, in the machine's byte order.
    ///
    /// # Panics
    ///
    /// If the length in bytes is not a multiple of the size of `T`, or `T` needs more than 64-byte alignment.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self)
    }

    /// The contents as elements of `T` to write to, in the machine's byte order.
    ///
    /// # Panics
    ///
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self)
    }

    /// The bytes up to the end of the last page, if the buffer consists of pages.
    #[cfg(unix)]
    pub(crate) fn whole_pages_mut(&mut self) -> Option<&mut [u8]> {
        self.memory.whole_pages_mut()
    }

    /// Whether the memory is page-locked: see [`HostPool::page_locked`](crate::HostPool::page_locked).
    pub fn is_page_locked(&self) -> bool {
        self.memory.is_page_locked()
    }

    /// Where the memory begins: a multiple of 64, also for an empty buffer, which must not be read from.
    pub fn as_ptr(&self) -> *const u8 {
        self.memory.bytes().as_ptr()
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.bytes()
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.pool.give_back(mem::take(&mut self.memory));
    }
}

impl fmt::Debug for HostBuffer {
    // Contents are training state: large, and of no use in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("bytes", &self.memory.len()).finish_non_exhaustive()
    }
}
