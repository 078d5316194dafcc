//! Memory aligned to a cache line, or to a page, and page-locked if asked for.

use std::fmt;
use std::mem::{self, MaybeUninit};
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::cuda::{Device, PageLockError};

/// Bytes in a cache line; also the widest SIMD register in use.
pub(crate) const LINE: usize = 64;

/// Bytes in a page, and the alignment that I/O past the page cache asks for.
pub(crate) const PAGE: usize = 4096;

/// From this size on memory begins on a page: allocators deal in whole pages there, so it costs nothing.
pub(crate) const PAGED: usize = 128 << 10;

/// Bytes in a huge page, of the smallest kind that a machine has.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// One cache line: a vector of these is aligned memory without a hand-written allocation.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

/// One page, likewise.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

const _: () = assert!(size_of::<Line>() == LINE && align_of::<Line>() == LINE);
const _: () = assert!(size_of::<Page>() == PAGE && align_of::<Page>() == PAGE);

// SAFETY: all-zero bytes are a valid `[u8; 64]`, the only field.
unsafe impl Zeroable for Line {}

// SAFETY: `repr(C)` over one `[u8; 64]`, every bit pattern of which is valid; the size equals the alignment
// (asserted above), so there is no padding; the type is `Copy`, `'static` and holds no pointer.
unsafe impl Pod for Line {}

// SAFETY: all-zero bytes are a valid `[u8; 4096]`, the only field.
unsafe impl Zeroable for Page {}

// SAFETY: as for `Line`, over `[u8; 4096]`.
unsafe impl Pod for Page {}

/// `len` initialised bytes that begin on a cache line, or on a page. The default is empty and holds no
/// allocation.
///
/// Vectors, not boxes: memory that a device writes to may be moved about meanwhile, and moving a box claims that
/// nobody else uses what it points to.
#[derive(Default)]
pub(crate) struct Memory {
    units: Units,
    /// Less than what `units` hold by less than one of them.
    len: usize,
    /// Who has page-locked `units`.
    locked_by: Option<Arc<Device>>,
}

enum Units {
    Lines(Vec<Line>),
    Pages(Vec<Page>),
}

impl Default for Units {
    fn default() -> Self {
        Self::Lines(Vec::new())
    }
}

impl Memory {
    /// Allocates `len` zeroed bytes; none for 0. They begin on a page if they are [`PAGED`] or more.
    pub(crate) fn zeroed(len: usize) -> Self {
        if len >= PAGED {
            return Self::infallible_pages(len);
        }
        Self { units: Units::Lines(bytemuck::zeroed_vec(len.div_ceil(LINE))), len, locked_by: None }
    }

    /// Allocates `len` zeroed bytes that begin on a page; none if there is not so much memory.
    #[cfg(unix)]
    pub(crate) fn pages(len: usize) -> Option<Self> {
        let mut pages = Vec::new();
        pages.try_reserve_exact(len.div_ceil(PAGE)).ok()?;
        Some(Self::of_pages(pages, len))
    }

    /// The same, where running out of memory is a panic as with any other allocation.
    pub(crate) fn infallible_pages(len: usize) -> Self {
        Self::of_pages(Vec::with_capacity(len.div_ceil(PAGE)), len)
    }

    /// Zeroes `pages`, which have room for `len` bytes and hold nothing yet.
    fn of_pages(mut pages: Vec<Page>, len: usize) -> Self {
        // Before the first write to it decides which pages it gets.
        prefer_huge_pages(pages.spare_capacity_mut());
        pages.resize(len.div_ceil(PAGE), Page::zeroed());
        Self { units: Units::Pages(pages), len, locked_by: None }
    }

    /// Page-locks memory that begins on a page, until it is dropped.
    pub(crate) fn page_lock(&mut self, device: &Arc<Device>) -> Result<(), PageLockError> {
        // SAFETY: dropping the memory unregisters it first, and does not free it if that fails.
        unsafe { device.register(self.whole_mut()) }?;
        self.locked_by = Some(Arc::clone(device));
        Ok(())
    }

    pub(crate) fn is_page_locked(&self) -> bool {
        self.locked_by.is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.units {
            Units::Lines(lines) => bytemuck::cast_slice(lines),
            Units::Pages(pages) => bytemuck::cast_slice(pages),
        };
        &all[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.whole_mut()[..len]
    }

    /// The bytes up to the end of the last page, if they are pages.
    #[cfg(unix)]
    pub(crate) fn whole_pages_mut(&mut self) -> Option<&mut [u8]> {
        matches!(self.units, Units::Pages(_)).then(|| self.whole_mut())
    }

    fn whole_mut(&mut self) -> &mut [u8] {
        match &mut self.units {
            Units::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Units::Pages(pages) => bytemuck::cast_slice_mut(pages),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(device) = self.locked_by.take()
            && let Err(error) = device.unregister(self.whole_mut())
        {
            tracing::warn!(%error, bytes = self.len, "memory that the CUDA driver does not let go is not freed");
            mem::forget(mem::take(&mut self.units));
        }
    }
}

/// Asks for huge pages where `memory` can hold some: a device then finds it in few pieces, which it transfers up to
/// twice as fast.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(memory: &mut [MaybeUninit<Page>]) {
    use rustix::mm::{Advice, madvise};

    if size_of_val(memory) >= HUGE_PAGE {
        // SAFETY: the range is ours, and the advice changes nothing about what can be read from it.
        let advised =
            unsafe { madvise(memory.as_mut_ptr().cast(), size_of_val(memory), Advice::LinuxHugepage) };
        // Only an advice: kernels without huge pages refuse it.
        let _ = advised;
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_memory: &mut [MaybeUninit<Page>]) {}

impl fmt::Debug for Memory {
    // Contents are training state: large, and of no use in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("bytes", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE, Memory, PAGE, PAGED};

    #[test]
    fn memory_is_exact_zeroed_and_aligned_at_every_size() {
        for len in [0, 1, 63, 64, 65, 1000, PAGED - 1, PAGED, PAGED + 1] {
            let mut memory = Memory::zeroed(len);
            assert_eq!(memory.len(), len);
            assert_eq!(memory.bytes(), vec![0; len]);
            let alignment = if len < PAGED { LINE } else { PAGE };
            assert_eq!(memory.bytes().as_ptr().addr() % alignment, 0, "{len} bytes");
            memory.bytes_mut().fill(0xA5);
            assert_eq!(memory.bytes(), vec![0xA5; len]);
        }
    }

    #[cfg(unix)]
    #[test]
    fn pages_are_whole_up_to_the_last() {
        for (len, whole) in [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)] {
            let mut memory = Memory::pages(len).unwrap();
            assert_eq!((memory.bytes().len(), memory.bytes().as_ptr().addr() % PAGE), (len, 0));
            assert_eq!(memory.whole_pages_mut().map(|whole| whole.len()), Some(whole));
        }
        assert!(Memory::pages(usize::MAX).is_none());
        assert!(Memory::zeroed(PAGED - 1).whole_pages_mut().is_none());
    }
}
