//! Slices in blocks of as many numbers as are worked on together.

use half::{bf16, f16};

use crate::floats::{Floats, FloatsMut};
use crate::simd::{LANES, Lanes};

/// Floats in blocks of [`LANES`].
pub(crate) enum Blocks<'a> {
    F32(&'a [[f32; LANES]]),
    Bf16(&'a [[bf16; LANES]]),
    F16(&'a [[f16; LANES]]),
}

impl<'a> Blocks<'a> {
    /// Of the whole blocks.
    pub(crate) fn new(floats: Floats<'a>) -> Self {
        match floats {
            Floats::F32(values) => Self::F32(values.as_chunks().0),
            Floats::Bf16(values) => Self::Bf16(values.as_chunks().0),
            Floats::F16(values) => Self::F16(values.as_chunks().0),
        }
    }

    /// Has the machine begin to fetch a block, which may be beyond the last.
    #[inline(always)]
    pub(crate) fn prefetch<L: Lanes>(&self, lanes: L, at: usize) {
        match self {
            Self::F32(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
            Self::Bf16(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
            Self::F16(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
        }
    }

    #[inline(always)]
    pub(crate) fn load<L: Lanes>(&self, lanes: L, at: usize) -> L::Floats {
        match self {
            Self::F32(blocks) => lanes.load_f32(&blocks[at]),
            Self::Bf16(blocks) => lanes.load_bf16(&blocks[at]),
            Self::F16(blocks) => lanes.load_f16(&blocks[at]),
        }
    }
}

/// Floats to change in blocks of [`LANES`].
pub(crate) enum BlocksMut<'a> {
    F32(&'a mut [[f32; LANES]]),
    Bf16(&'a mut [[bf16; LANES]]),
    F16(&'a mut [[f16; LANES]]),
}

impl<'a> BlocksMut<'a> {
    /// Of the whole blocks.
    pub(crate) fn new(floats: FloatsMut<'a>) -> Self {
        match floats {
            FloatsMut::F32(values) => Self::F32(values.as_chunks_mut().0),
            FloatsMut::Bf16(values) => Self::Bf16(values.as_chunks_mut().0),
            FloatsMut::F16(values) => Self::F16(values.as_chunks_mut().0),
        }
    }

    /// Has the machine begin to fetch a block, which may be beyond the last.
    #[inline(always)]
    pub(crate) fn prefetch<L: Lanes>(&self, lanes: L, at: usize) {
        match self {
            Self::F32(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
            Self::Bf16(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
            Self::F16(blocks) => lanes.prefetch(blocks.as_ptr().wrapping_add(at)),
        }
    }

    #[inline(always)]
    pub(crate) fn load<L: Lanes>(&self, lanes: L, at: usize) -> L::Floats {
        match self {
            Self::F32(blocks) => lanes.load_f32(&blocks[at]),
            Self::Bf16(blocks) => lanes.load_bf16(&blocks[at]),
            Self::F16(blocks) => lanes.load_f16(&blocks[at]),
        }
    }

    #[inline(always)]
    pub(crate) fn store<L: Lanes>(&mut self, lanes: L, values: L::Floats, at: usize) {
        match self {
            Self::F32(blocks) => lanes.store_f32(values, &mut blocks[at]),
            Self::Bf16(blocks) => lanes.store_bf16(values, &mut blocks[at]),
            Self::F16(blocks) => lanes.store_f16(values, &mut blocks[at]),
        }
    }
}
