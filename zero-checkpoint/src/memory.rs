//! Memory that the system can transfer from and to past its cache.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// What the system transfers past its cache: multiples of this, in bytes, from and to memory that begins at one.
pub(crate) const PAGE: usize = 4096;

/// Bytes in a huge page: in those, a device finds memory in few pieces.
const HUGE_PAGE: usize = 2 << 20;

/// From this size on, memory begins with a huge page: what is lost before it is an eighth at most.
const HUGE: usize = 8 * HUGE_PAGE;

/// Bytes that begin at a page, or at a huge one if there are many.
#[derive(Default)]
pub(crate) struct Memory {
    /// Longer than what is used of it by one alignment.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` zeros; `None` if there is not so much memory.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        let alignment = if len < HUGE { PAGE } else { HUGE_PAGE };
        let mut bytes: Vec<u8> = Vec::new();
        bytes.try_reserve_exact(len.checked_add(alignment)?).ok()?;
        let start = bytes.as_ptr().align_offset(alignment);
        prefer_huge_pages(&mut bytes, start, len);
        bytes.resize(start + len, 0);
        Some(Self { bytes, start, len })
    }

    /// At least `len` bytes, the same memory if it has room; what is in it is of no use.
    pub(crate) fn at_least(self, len: usize) -> Option<Self> {
        if self.start + len <= self.bytes.len() {
            return Some(Self { len, ..self });
        }
        // Not both at once.
        drop(self);
        Self::zeroed(len)
    }
}

/// Asks for huge pages before the memory is first written to.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(bytes: &mut Vec<u8>, start: usize, len: usize) {
    use rustix::mm::{Advice, madvise};

    if let Some(memory) = bytes.spare_capacity_mut().get_mut(start..start + len) {
        // SAFETY: the range is this vector's own, and the advice changes nothing about what can be read from it.
        let advised = unsafe { madvise(memory.as_mut_ptr().cast(), memory.len(), Advice::LinuxHugepage) };
        // Only an advice: kernels without huge pages refuse it.
        let _ = advised;
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_bytes: &mut Vec<u8>, _start: usize, _len: usize) {}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl fmt::Debug for Memory {
    // Contents are training state: large, and of no use in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::Memory;

    #[test]
    fn memory_is_aligned_and_used_again() {
        let mut memory = Memory::default();
        for len in [1, 4096, 5 << 20, 17 << 20, 1 << 20, 3 << 20] {
            memory = memory.at_least(len).unwrap();
            assert_eq!((memory.len(), memory.as_ptr().addr() % 4096), (len, 0), "{len} bytes");
        }
        let before = memory.as_ptr();
        memory = memory.at_least(16 << 20).unwrap();
        assert_eq!(memory.as_ptr(), before);
        assert!(Memory::zeroed(usize::MAX).is_none());
    }
}
