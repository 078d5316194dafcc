//! Elements of several ranks into one.
//!
//! Work goes in blocks that stay in the first-level cache, so each source is read from memory once and each
//! result written once. Sources are taken in rank order, element by element, whatever the block size.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::DType;

use crate::{Element, ReduceOp};

/// Elements per block: 8 KiB of `f32` for the accumulator beside as much of one source.
const BLOCK: usize = 2048;

/// A sum is outside the range of its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooNarrow;

macro_rules! for_dtype {
    ($dtype:expr, $Number:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $Number = f64;
                $body
            }
            DType::F32 => {
                type $Number = f32;
                $body
            }
            DType::F16 => {
                type $Number = f16;
                $body
            }
            DType::BF16 => {
                type $Number = bf16;
                $body
            }
            DType::I64 => {
                type $Number = i64;
                $body
            }
            DType::I32 => {
                type $Number = i32;
                $body
            }
            DType::U8 => {
                type $Number = u8;
                $body
            }
        }
    };
}

/// Writes the reduction of `sources`, one per rank, into `target`. All have one length.
pub(crate) fn into(
    op: ReduceOp,
    dtype: DType,
    sources: &[&[u8]],
    target: &mut [u8],
) -> Result<(), TooNarrow> {
    for_dtype!(dtype, N => {
        let sources: Vec<&[N]> = sources.iter().map(|source| bytemuck::cast_slice(source)).collect();
        let target: &mut [N] = bytemuck::cast_slice_mut(target);
        let mut wide = [<N as Number>::Wide::ZERO; BLOCK];
        let mut fits = true;
        for start in (0..target.len()).step_by(BLOCK) {
            let range = start..target.len().min(start + BLOCK);
            let wide = &mut wide[..range.len()];
            accumulate(op, sources.iter().map(|source| &source[range.clone()]), wide);
            fits &= N::store(wide, divisor(op, sources.len()), &mut target[range]);
        }
        if fits { Ok(()) } else { Err(TooNarrow) }
    })
}

/// Replaces `own` by the reduction of `sources`, one per rank; where there is `None`, the source is `own`.
pub(crate) fn into_own(
    op: ReduceOp,
    dtype: DType,
    sources: &[Option<&[u8]>],
    own: &mut [u8],
) -> Result<(), TooNarrow> {
    for_dtype!(dtype, N => {
        let sources: Vec<Option<&[N]>> =
            sources.iter().map(|source| source.map(bytemuck::cast_slice)).collect();
        let own: &mut [N] = bytemuck::cast_slice_mut(own);
        let mut wide = [<N as Number>::Wide::ZERO; BLOCK];
        let mut fits = true;
        for start in (0..own.len()).step_by(BLOCK) {
            let range = start..own.len().min(start + BLOCK);
            let wide = &mut wide[..range.len()];
            let here = &own[range.clone()];
            accumulate(op, sources.iter().map(|source| source.map_or(here, |source| &source[range.clone()])), wide);
            fits &= N::store(wide, divisor(op, sources.len()), &mut own[range]);
        }
        if fits { Ok(()) } else { Err(TooNarrow) }
    })
}

/// How many bytes the accumulator of one element takes.
pub(crate) fn wide_size(dtype: DType) -> usize {
    for_dtype!(dtype, N => size_of::<<N as Number>::Wide>())
}

/// Combines `sources`, further ranks in their order, into accumulators; `wide` holds those of the ranks
/// before, if there are any. It is aligned to 16 bytes.
pub(crate) fn accumulate_more(
    op: ReduceOp,
    dtype: DType,
    sources: &[&[u8]],
    wide: &mut [u8],
    is_first: bool,
) {
    for_dtype!(dtype, N => {
        let sources: Vec<&[N]> = sources.iter().map(|source| bytemuck::cast_slice(source)).collect();
        let wide: &mut [<N as Number>::Wide] = bytemuck::cast_slice_mut(wide);
        for start in (0..wide.len()).step_by(BLOCK) {
            let range = start..wide.len().min(start + BLOCK);
            let parts = sources.iter().map(|source| &source[range.clone()]);
            let wide = &mut wide[range.clone()];
            if is_first { accumulate(op, parts, wide) } else { continue_with::<N>(op, parts, wide) }
        }
    });
}

/// Writes what `ranks` ranks have accumulated into `target`. `wide` is aligned to 16 bytes.
pub(crate) fn finish(
    op: ReduceOp,
    dtype: DType,
    ranks: usize,
    wide: &[u8],
    target: &mut [u8],
) -> Result<(), TooNarrow> {
    for_dtype!(dtype, N => {
        let wide: &[<N as Number>::Wide] = bytemuck::cast_slice(wide);
        let target: &mut [N] = bytemuck::cast_slice_mut(target);
        let mut fits = true;
        for (wide, target) in wide.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
            fits &= N::store(wide, divisor(op, ranks), target);
        }
        if fits { Ok(()) } else { Err(TooNarrow) }
    })
}

/// Replaces each of `buffers`, one per rank and all of one length, by the reduction of all.
pub(crate) fn in_place(op: ReduceOp, dtype: DType, buffers: Vec<&mut [u8]>) -> Result<(), TooNarrow> {
    for_dtype!(dtype, N => {
        let mut buffers: Vec<&mut [N]> = buffers.into_iter().map(bytemuck::cast_slice_mut).collect();
        let (ranks, length) = (buffers.len(), buffers.first().map_or(0, |first| first.len()));
        let mut wide = [<N as Number>::Wide::ZERO; BLOCK];
        let mut fits = true;
        for start in (0..length).step_by(BLOCK) {
            let range = start..length.min(start + BLOCK);
            let wide = &mut wide[..range.len()];
            accumulate(op, buffers.iter().map(|buffer| &buffer[range.clone()]), wide);
            if let Some((first, others)) = buffers.split_first_mut() {
                fits &= N::store(wide, divisor(op, ranks), &mut first[range.clone()]);
                others.iter_mut().for_each(|other| other[range.clone()].copy_from_slice(&first[range.clone()]));
            }
        }
        if fits { Ok(()) } else { Err(TooNarrow) }
    })
}

/// By what a result is divided before it is rounded.
fn divisor(op: ReduceOp, ranks: usize) -> Option<usize> {
    (op == ReduceOp::Mean).then_some(ranks)
}

fn accumulate<'a, N: Number>(op: ReduceOp, sources: impl Iterator<Item = &'a [N]>, wide: &mut [N::Wide]) {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => accumulate_with(N::Wide::add, sources, wide),
        ReduceOp::Max => accumulate_with(N::Wide::max, sources, wide),
        ReduceOp::Min => accumulate_with(N::Wide::min, sources, wide),
    }
}

/// Combines further sources into `wide`.
fn continue_with<'a, N: Number>(op: ReduceOp, sources: impl Iterator<Item = &'a [N]>, wide: &mut [N::Wide]) {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => sources.for_each(|source| N::combine(source, wide, N::Wide::add)),
        ReduceOp::Max => sources.for_each(|source| N::combine(source, wide, N::Wide::max)),
        ReduceOp::Min => sources.for_each(|source| N::combine(source, wide, N::Wide::min)),
    }
}

fn accumulate_with<'a, N: Number>(
    op: impl Fn(N::Wide, N::Wide) -> N::Wide,
    mut sources: impl Iterator<Item = &'a [N]>,
    wide: &mut [N::Wide],
) {
    match (sources.next(), sources.next()) {
        (Some(first), Some(second)) => N::combine_two(first, second, wide, &op),
        (Some(only), None) => N::load(only, wide),
        (None, _) => {}
    }
    sources.for_each(|source| N::combine(source, wide, &op));
}

/// An element as it is sent. The slices of one call have one length, at most [`BLOCK`].
trait Number: Element {
    /// In what it is accumulated.
    type Wide: Wide;

    fn widen(self) -> Self::Wide;

    /// Rounds to nearest, ties to even, and makes every NaN the canonical one: which NaN an addition yields
    /// depends on the instructions that the compiler chose.
    fn narrow(wide: Self::Wide) -> Self;

    /// Whether `narrow` of `wide` has its value, up to rounding.
    fn fits(_wide: Self::Wide) -> bool {
        true
    }

    fn load(source: &[Self], wide: &mut [Self::Wide]) {
        wide.iter_mut().zip(source).for_each(|(wide, source)| *wide = source.widen());
    }

    fn combine(source: &[Self], wide: &mut [Self::Wide], op: impl Fn(Self::Wide, Self::Wide) -> Self::Wide) {
        wide.iter_mut().zip(source).for_each(|(wide, source)| *wide = op(*wide, source.widen()));
    }

    /// `load` of the first and `combine` of the second, in one pass.
    fn combine_two(
        first: &[Self],
        second: &[Self],
        wide: &mut [Self::Wide],
        op: impl Fn(Self::Wide, Self::Wide) -> Self::Wide,
    ) {
        let sources = first.iter().zip(second);
        wide.iter_mut().zip(sources).for_each(|(wide, (a, b))| *wide = op(a.widen(), b.widen()));
    }

    /// Divides and narrows; false if a value does not fit.
    fn store(wide: &[Self::Wide], divisor: Option<usize>, target: &mut [Self]) -> bool {
        let pairs = target.iter_mut().zip(wide);
        match divisor {
            None => pairs.for_each(|(target, wide)| *target = Self::narrow(*wide)),
            Some(divisor) => {
                pairs.for_each(|(target, wide)| *target = Self::narrow(wide.divide(divisor)));
            }
        }
        wide.iter().fold(true, |fits, wide| fits & Self::fits(*wide))
    }
}

/// The arithmetic of accumulators.
trait Wide: bytemuck::Pod {
    const ZERO: Self;

    fn add(self, other: Self) -> Self;

    fn max(self, other: Self) -> Self;

    fn min(self, other: Self) -> Self;

    fn divide(self, divisor: usize) -> Self;
}

/// `max` and `min` are `maximum` and `minimum` of IEEE 754-2019.
macro_rules! wide_float {
    ($($float:ident),*) => {$(
        impl Wide for $float {
            const ZERO: Self = 0.0;

            fn add(self, other: Self) -> Self {
                self + other
            }

            fn max(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if self > other {
                    self
                } else if other > self {
                    other
                } else {
                    // Equal, so the bits differ at most in the sign of zero.
                    Self::from_bits(self.to_bits() & other.to_bits())
                }
            }

            fn min(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if self < other {
                    self
                } else if other < self {
                    other
                } else {
                    Self::from_bits(self.to_bits() | other.to_bits())
                }
            }

            fn divide(self, divisor: usize) -> Self {
                self / divisor as Self
            }
        }

        impl Number for $float {
            type Wide = Self;

            fn widen(self) -> Self {
                self
            }

            fn narrow(wide: Self) -> Self {
                if wide.is_nan() { Self::NAN } else { wide }
            }
        }
    )*};
}

/// No number of ranks that fits an address space overflows these sums.
macro_rules! wide_integer {
    ($($wide:ident for $($integer:ident),*);* $(;)?) => {$(
        impl Wide for $wide {
            const ZERO: Self = 0;

            fn add(self, other: Self) -> Self {
                self + other
            }

            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            fn divide(self, divisor: usize) -> Self {
                self / divisor as Self
            }
        }

        $(impl Number for $integer {
            type Wide = $wide;

            fn widen(self) -> $wide {
                self.into()
            }

            fn narrow(wide: $wide) -> Self {
                wide as Self
            }

            fn fits(wide: $wide) -> bool {
                $wide::from(wide as Self) == wide
            }
        })*
    )*};
}

wide_float!(f32, f64);
wide_integer!(i64 for i32, u8; i128 for i64);

/// The methods of `half` branch on NaN, which keeps loops from being vectorised.
impl Number for bf16 {
    type Wide = f32;

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn narrow(wide: f32) -> Self {
        let bits = f32::narrow(wide).to_bits();
        // Just below half of the last place, and one more if that place is odd.
        Self::from_bits(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
    }
}

/// Whole slices at once, for which `half` uses the conversion instructions of the processor.
impl Number for f16 {
    type Wide = f32;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn narrow(wide: f32) -> Self {
        Self::from_f32(f32::narrow(wide))
    }

    fn load(source: &[Self], wide: &mut [f32]) {
        source.convert_to_f32_slice(wide);
    }

    fn combine(source: &[Self], wide: &mut [f32], op: impl Fn(f32, f32) -> f32) {
        let mut widened = [0.0; BLOCK];
        let widened = &mut widened[..source.len()];
        Self::load(source, widened);
        f32::combine(widened, wide, op);
    }

    fn combine_two(first: &[Self], second: &[Self], wide: &mut [f32], op: impl Fn(f32, f32) -> f32) {
        Self::load(first, wide);
        Self::combine(second, wide, op);
    }

    fn store(wide: &[f32], divisor: Option<usize>, target: &mut [Self]) -> bool {
        let mut narrowed = [0.0; BLOCK];
        let narrowed = &mut narrowed[..wide.len()];
        f32::store(wide, divisor, narrowed);
        target.convert_from_f32_slice(narrowed);
        true
    }
}
