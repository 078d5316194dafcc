//! Memory that somebody else keeps alive.

use std::slice;

/// Bytes at an address. What may be done with them is for whoever made the span to promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    start: *mut u8,
    length: usize,
}

// SAFETY: an address and a length; all access is `unsafe`, and promised to be sound where it is made.
unsafe impl Send for Span {}

// SAFETY: as for `Send`.
unsafe impl Sync for Span {}

impl Span {
    /// The bytes of `memory`, to write to.
    pub(crate) fn of_mut(memory: &mut [u8]) -> Self {
        Self { start: memory.as_mut_ptr(), length: memory.len() }
    }

    /// The bytes of `memory`, which are only read.
    pub(crate) fn of(memory: &[u8]) -> Self {
        Self { start: memory.as_ptr().cast_mut(), length: memory.len() }
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn start(self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(self) -> usize {
        self.length
    }

    /// The rest, without its first `skipped` bytes.
    pub(crate) fn from(self, skipped: usize) -> Self {
        self.part(skipped, self.length - skipped)
    }

    /// `length` bytes at `offset`.
    pub(crate) fn part(self, offset: usize, length: usize) -> Self {
        assert!(offset <= self.length && length <= self.length - offset, "part of a span lies within it");
        // Nothing is read or written here, so wrapping arithmetic will do.
        Self { start: self.start.wrapping_add(offset), length }
    }

    /// # Safety
    ///
    /// The memory must be there as long as the slice, initialised, and nobody may write to it meanwhile.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts(self.start, self.length) }
    }

    /// # Safety
    ///
    /// As [`bytes`](Self::bytes), nobody may read it either, and it must have been made of memory to write to.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: promised by the caller.
        unsafe { slice::from_raw_parts_mut(self.start, self.length) }
    }
}
