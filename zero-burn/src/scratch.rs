//! Memory that is needed for a moment, again and again, in ever the same sizes.

use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use zero_core::Bytes;
use zero_offload::{HostBuffer, HostPool};

/// A pool whose buffers come in few sizes, powers of two, so that little has to be kept for all of them.
#[derive(Clone, Debug)]
pub(crate) struct Scratch(HostPool);

/// Memory of a [`Scratch`]; as long as was asked for.
#[derive(Debug)]
pub(crate) struct ScratchBuffer {
    buffer: HostBuffer,
    bytes: usize,
}

impl Scratch {
    pub(crate) const fn new(pool: HostPool) -> Self {
        Self(pool)
    }

    /// Keeps what is needed where several buffers, of up to `largest` bytes, are needed at once.
    pub(crate) fn expect(&self, largest: Bytes) {
        // Five of the largest size, and the sizes below it together as many.
        let retain = largest.get().checked_next_power_of_two().unwrap_or(u64::MAX).saturating_mul(10);
        self.0.set_retain(Bytes::new(retain));
    }

    /// A buffer whose content is unspecified.
    pub(crate) fn take(&self, bytes: usize) -> ScratchBuffer {
        let size = if bytes == 0 { 0 } else { bytes.checked_next_power_of_two().unwrap_or(bytes) };
        ScratchBuffer { buffer: self.0.take(size), bytes }
    }

    pub(crate) const fn pool(&self) -> &HostPool {
        &self.0
    }
}

impl ScratchBuffer {
    pub(crate) fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(self)
    }

    pub(crate) fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self)
    }
}

impl Deref for ScratchBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.bytes]
    }
}

impl DerefMut for ScratchBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}
