//! Floating-point numbers of one of three types in host memory: converted, added up, looked at.

use std::ops::Range;

use burn::tensor::FloatDType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::DType;

/// How many numbers are converted at a time: they stay in the first cache.
const CHUNK: usize = 1024;

/// Numbers to read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// A sum of squares, in `f64` and in a fixed order: eight running sums, added up at the end. It is finite if, and only if,
/// all numbers are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Squares {
    lanes: [f64; 8],
    rest: f64,
}

impl Squares {
    /// Adds numbers. Several calls are as one if all but the last add a multiple of [`CHUNK`].
    pub(crate) fn add(&mut self, floats: Floats<'_>) {
        let square = |number: &f32| f64::from(*number) * f64::from(*number);
        floats.each_chunk(|chunk| {
            let eights = chunk.chunks_exact(self.lanes.len());
            self.rest += eights.remainder().iter().map(square).sum::<f64>();
            for eight in eights {
                self.lanes.iter_mut().zip(eight).for_each(|(lane, number)| *lane += square(number));
            }
        });
    }

    pub(crate) fn sum(&self) -> f64 {
        self.lanes.iter().sum::<f64>() + self.rest
    }
}

/// Numbers to write.
#[derive(Debug)]
pub(crate) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

/// What becomes of the numbers that are written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// They are replaced.
    Put,
    /// They are added to, in `f32`, and rounded once.
    Add,
}

/// Burn's name for a type of numbers that parameters may have.
///
/// # Panics
///
/// For any other; a configuration that names one is refused.
pub(crate) fn burn_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        other => unreachable!("{other} is refused by the configuration"),
    }
}

impl<'a> Floats<'a> {
    /// The numbers in `bytes`.
    pub(crate) fn new(dtype: DType, bytes: &'a [u8]) -> Self {
        match burn_dtype(dtype) {
            FloatDType::F16 => Self::F16(bytemuck::cast_slice(bytes)),
            FloatDType::BF16 => Self::BF16(bytemuck::cast_slice(bytes)),
            _ => Self::F32(bytemuck::cast_slice(bytes)),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::F16(numbers) => numbers.len(),
            Self::BF16(numbers) => numbers.len(),
        }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(numbers) => Self::F32(&numbers[range]),
            Self::F16(numbers) => Self::F16(&numbers[range]),
            Self::BF16(numbers) => Self::BF16(&numbers[range]),
        }
    }

    /// Shows the numbers, exactly, to `see`, piece by piece.
    pub(crate) fn each_chunk(self, mut see: impl FnMut(&[f32])) {
        let mut exact = [0.0; CHUNK];
        match self {
            Self::F32(numbers) => numbers.chunks(CHUNK).for_each(see),
            Self::F16(numbers) => numbers.chunks(CHUNK).for_each(|chunk| {
                chunk.convert_to_f32_slice(&mut exact[..chunk.len()]);
                see(&exact[..chunk.len()]);
            }),
            Self::BF16(numbers) => numbers.chunks(CHUNK).for_each(|chunk| {
                chunk.convert_to_f32_slice(&mut exact[..chunk.len()]);
                see(&exact[..chunk.len()]);
            }),
        }
    }

    /// See [`Squares`].
    pub(crate) fn sum_of_squares(self) -> f64 {
        let mut squares = Squares::default();
        squares.add(self);
        squares.sum()
    }

    pub(crate) fn are_finite(self) -> bool {
        let mut finite = true;
        self.each_chunk(|chunk| finite &= all_finite(chunk));
        finite
    }
}

impl<'a> FloatsMut<'a> {
    /// The numbers in `bytes`.
    pub(crate) fn new(dtype: DType, bytes: &'a mut [u8]) -> Self {
        match burn_dtype(dtype) {
            FloatDType::F16 => Self::F16(bytemuck::cast_slice_mut(bytes)),
            FloatDType::BF16 => Self::BF16(bytemuck::cast_slice_mut(bytes)),
            _ => Self::F32(bytemuck::cast_slice_mut(bytes)),
        }
    }

    /// Writes `from`, of the same length, times `factor`; whether all of `from` was finite.
    pub(crate) fn write(self, how: Write, from: Floats<'_>, factor: f32) -> bool {
        let (mut start, mut finite) = (0, true);
        match self {
            Self::F32(to) => from.each_chunk(|chunk| {
                let to = &mut to[start..start + chunk.len()];
                match how {
                    Write::Put => to.iter_mut().zip(chunk).for_each(|(to, from)| *to = from * factor),
                    Write::Add => to.iter_mut().zip(chunk).for_each(|(to, from)| *to += from * factor),
                }
                finite &= all_finite(chunk);
                start += chunk.len();
            }),
            Self::F16(to) => from.each_chunk(|chunk| {
                write_half(&mut to[start..start + chunk.len()], how, chunk, factor);
                finite &= all_finite(chunk);
                start += chunk.len();
            }),
            Self::BF16(to) => from.each_chunk(|chunk| {
                write_half(&mut to[start..start + chunk.len()], how, chunk, factor);
                finite &= all_finite(chunk);
                start += chunk.len();
            }),
        }
        finite
    }

    pub(crate) fn clear(self) {
        match self {
            Self::F32(numbers) => numbers.fill(0.0),
            Self::F16(numbers) => numbers.fill(f16::ZERO),
            Self::BF16(numbers) => numbers.fill(bf16::ZERO),
        }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(numbers) => Self::F32(&mut numbers[range]),
            Self::F16(numbers) => Self::F16(&mut numbers[range]),
            Self::BF16(numbers) => Self::BF16(&mut numbers[range]),
        }
    }
}

fn write_half<H: Copy>(to: &mut [H], how: Write, from: &[f32], factor: f32)
where
    [H]: HalfFloatSliceExt,
{
    let mut wide = [0.0; CHUNK];
    let wide = &mut wide[..from.len()];
    match how {
        Write::Put => wide.iter_mut().zip(from).for_each(|(wide, from)| *wide = from * factor),
        Write::Add => {
            to.convert_to_f32_slice(wide);
            wide.iter_mut().zip(from).for_each(|(wide, from)| *wide += from * factor);
        }
    }
    to.convert_from_f32_slice(wide);
}

/// Without a branch in the loop, so that it costs next to nothing beside what else is done to the numbers.
fn all_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7F80_0000;
    !numbers.iter().fold(false, |found, number| found | (number.to_bits() & EXPONENT == EXPONENT))
}

impl<'a> From<Floats<'a>> for zero_offload::Floats<'a> {
    fn from(floats: Floats<'a>) -> Self {
        match floats {
            Floats::F32(numbers) => Self::F32(numbers),
            Floats::F16(numbers) => Self::F16(numbers),
            Floats::BF16(numbers) => Self::Bf16(numbers),
        }
    }
}

impl<'a> From<FloatsMut<'a>> for zero_offload::FloatsMut<'a> {
    fn from(floats: FloatsMut<'a>) -> Self {
        match floats {
            FloatsMut::F32(numbers) => Self::F32(numbers),
            FloatsMut::F16(numbers) => Self::F16(numbers),
            FloatsMut::BF16(numbers) => Self::Bf16(numbers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|index| (index as f32 - 700.0) / 8.0).collect()
    }

    #[test]
    fn every_type_writes_to_every_type() {
        let types = [DType::F32, DType::F16, DType::BF16];
        for count in [0, 1, 7, 1023, 1024, 1025, 2100] {
            for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
                let (mut source, mut target) = (vec![0_u32; count], vec![0_u32; count]);
                let source = &mut bytemuck::cast_slice_mut(&mut source)[..count * from.size()];
                let target = &mut bytemuck::cast_slice_mut(&mut target)[..count * to.size()];
                let numbers = numbers(count);
                assert!(FloatsMut::new(from, source).write(Write::Put, Floats::F32(&numbers), 1.0));
                let mut exact = Vec::new();
                Floats::new(from, source).each_chunk(|chunk| exact.extend_from_slice(chunk));
                FloatsMut::new(to, target).write(Write::Put, Floats::new(from, source), 1.0);
                FloatsMut::new(to, target).write(Write::Add, Floats::new(from, source), 2.0);
                let round = |number: f32| match to {
                    DType::F16 => f16::from_f32(number).to_f32(),
                    DType::BF16 => bf16::from_f32(number).to_f32(),
                    _ => number,
                };
                let expected: Vec<_> =
                    exact.iter().map(|number| round(round(*number) + number * 2.0)).collect();
                let mut written = Vec::new();
                Floats::new(to, target).each_chunk(|chunk| written.extend_from_slice(chunk));
                assert_eq!(written, expected, "{count} numbers, {from} to {to}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_found_wherever_it_is() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 5, 1023, 1024, 2999] {
                let mut from = numbers(3000);
                assert!(Floats::F32(&from).are_finite());
                from[place] = bad;
                let mut to = vec![bf16::ZERO; 3000];
                assert!(!FloatsMut::BF16(&mut to).write(Write::Put, Floats::F32(&from), 1.0));
                assert!(!Floats::F32(&from).are_finite() && !Floats::F32(&from).sum_of_squares().is_finite());
            }
        }
    }

    #[test]
    fn the_largest_numbers_have_a_finite_sum_of_squares() {
        assert!(Floats::F32(&[f32::MAX; 5000]).sum_of_squares().is_finite());
    }
}
