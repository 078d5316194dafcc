//! Memory aligned to a cache line.

use bytemuck::{Pod, Zeroable};

/// Bytes in a cache line; also the widest SIMD register in use.
pub(crate) const LINE: usize = 64;

/// One cache line: a vector of these is aligned memory without a hand-written allocation.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE]);

const _: () = assert!(size_of::<Line>() == LINE && align_of::<Line>() == LINE);

// SAFETY: all-zero bytes are a valid `[u8; 64]`, the only field.
unsafe impl Zeroable for Line {}

// SAFETY: `repr(C)` over one `[u8; 64]`, every bit pattern of which is valid; the size equals the alignment
// (asserted above), so there is no padding; the type is `Copy`, `'static` and holds no pointer.
unsafe impl Pod for Line {}

/// `len` initialised bytes that begin on a cache line. The default is empty and holds no allocation.
#[derive(Default)]
pub(crate) struct Memory {
    lines: Box<[Line]>,
    /// At most `LINE - 1` less than what `lines` holds.
    len: usize,
}

impl Memory {
    /// Allocates `len` zeroed bytes; none for 0.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self { lines: bytemuck::zeroed_slice_box(len.div_ceil(LINE)), len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{LINE, Memory};

    #[test]
    fn memory_is_exact_zeroed_and_aligned_at_every_size() {
        for len in [0, 1, 63, 64, 65, 1000] {
            let mut memory = Memory::zeroed(len);
            assert_eq!(memory.len(), len);
            assert_eq!(memory.bytes(), vec![0; len]);
            assert_eq!(memory.bytes().as_ptr().addr() % LINE, 0, "{len} bytes");
            memory.bytes_mut().fill(0xA5);
            assert_eq!(memory.bytes(), vec![0xA5; len]);
        }
    }
}
