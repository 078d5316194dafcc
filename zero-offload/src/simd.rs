//! Arithmetic on sixteen numbers at once, written once for all instruction sets.
//!
//! An [`Operation`] is generic over the [`Lanes`] it runs on; [`Simd::run`] compiles it for each instruction set. Every
//! implementation does the same roundings in the same order: operations are IEEE 754's, products are fused with sums
//! only where `mul_add` says so, square roots and quotients are correctly rounded, conversions round to the nearest even.
//! Results are therefore the same to the bit, but for the payload of NaN.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use std::fmt;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use neon::Neon;
use scalar::Scalar;

/// Numbers that are worked on together, whatever the width of a register is.
pub(crate) const LANES: usize = 16;

/// A value of this type proves that the machine has the instructions.
pub(crate) trait Lanes: Copy {
    /// Sixteen `f32`.
    type Floats: Copy;
    /// Sixteen `f64`.
    type Sums: Copy;

    fn splat(self, value: f32) -> Self::Floats;

    fn load_f32(self, from: &[f32; LANES]) -> Self::Floats;
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::Floats;
    fn load_f16(self, from: &[f16; LANES]) -> Self::Floats;

    fn store_f32(self, values: Self::Floats, to: &mut [f32; LANES]);
    fn store_bf16(self, values: Self::Floats, to: &mut [bf16; LANES]);
    fn store_f16(self, values: Self::Floats, to: &mut [f16; LANES]);

    /// Has the machine begin to fetch the memory at `at`, which need not be anybody's.
    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        let _ = at;
    }

    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn div(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn sqrt(self, a: Self::Floats) -> Self::Floats;

    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// 1 or -1 by the sign of each number; zeros and NaN stay what they are.
    fn sign(self, a: Self::Floats) -> Self::Floats;

    fn zero_sums(self) -> Self::Sums;

    /// Adds each number's square, which is exact in `f64`, to its sum.
    fn add_squares(self, sums: Self::Sums, values: Self::Floats) -> Self::Sums;
    fn store_sums(self, sums: Self::Sums, to: &mut [f64; LANES]);
}

/// Work on whichever lanes there are. `run` and all it calls must be `#[inline(always)]`: what is not inlined is compiled
/// without the instruction set.
pub(crate) trait Operation {
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// A family of machine instructions that optimizers are compiled for.
///
/// All give the same results to the bit; which one runs is a matter of speed alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InstructionSet {
    /// What every machine has.
    Scalar,
    /// 64-bit ARM's vectors.
    Neon,
    /// AVX2, FMA and F16C of x86-64.
    Avx2,
    /// AVX-512F of x86-64.
    Avx512,
}

impl InstructionSet {
    pub(crate) const ALL: [Self; 4] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// What this machine has, the fastest last; never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| Simd::new(*set).is_some()).collect()
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Neon => "NEON",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        })
    }
}

/// An instruction set that this machine has.
#[derive(Clone, Copy)]
pub(crate) enum Simd {
    Scalar(Scalar),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Simd {
    /// `None` where the machine has no such instructions.
    pub(crate) fn new(set: InstructionSet) -> Option<Self> {
        match set {
            InstructionSet::Scalar => Some(Self::Scalar(Scalar)),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => Neon::detect().map(Self::Neon),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => Avx512::detect().map(Self::Avx512),
            _ => None,
        }
    }

    /// The fastest this machine has.
    pub(crate) fn best() -> Self {
        let fastest_first = InstructionSet::ALL.into_iter().rev();
        fastest_first.filter_map(Self::new).next().unwrap_or(Self::Scalar(Scalar))
    }

    pub(crate) const fn set(self) -> InstructionSet {
        match self {
            Self::Scalar(_) => InstructionSet::Scalar,
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => InstructionSet::Neon,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => InstructionSet::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => InstructionSet::Avx512,
        }
    }

    pub(crate) fn run<O: Operation>(self, operation: O) -> O::Output {
        match self {
            Self::Scalar(lanes) => operation.run(lanes),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(lanes) => lanes.run(operation),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => lanes.run(operation),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => lanes.run(operation),
        }
    }
}
