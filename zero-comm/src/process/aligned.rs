//! Bytes that are aligned for every element type.

/// A buffer of bytes that are aligned for every element type. It grows, and never shrinks.
#[derive(Debug, Default)]
pub(crate) struct Aligned(Vec<u64>);

impl Aligned {
    /// Room for `length` bytes, whose content is unspecified.
    pub(crate) fn room(&mut self, length: usize) -> &mut [u8] {
        let words = length.div_ceil(size_of::<u64>());
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..length]
    }

    /// The first `length` bytes, for which there must be room.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..length]
    }
}
