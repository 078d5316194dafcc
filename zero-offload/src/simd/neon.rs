//! Sixteen numbers in four registers of 64-bit ARM.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::{LANES, Lanes, Operation};

/// Made by [`detect`](Self::detect) alone, which proves that the machine has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    pub(super) fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "neon")]
        fn compiled<O: Operation>(lanes: Neon, operation: O) -> O::Output {
            operation.run(lanes)
        }
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { compiled(self, operation) }
    }
}

/// Rounded to the nearest even; NaN stays NaN.
///
/// # Safety
///
/// The machine must have NEON.
#[inline(always)]
unsafe fn to_bf16(values: float32x4_t) -> uint16x4_t {
    // SAFETY: by the contract above.
    unsafe {
        let bits = vreinterpretq_u32_f32(values);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(values, values), rounded, quiet))
    }
}

/// # Safety
///
/// The machine must have NEON.
#[inline(always)]
unsafe fn from_bf16(values: uint16x4_t) -> float32x4_t {
    // SAFETY: by the contract above.
    unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(values))) }
}

/// Rounded to the nearest even, which is the mode that Rust's programs run in. The intrinsic for this instruction of every
/// 64-bit ARM is not stable yet.
///
/// # Safety
///
/// The machine must have NEON.
#[inline(always)]
unsafe fn to_f16(values: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: by the contract above; the instruction touches no memory and no flags.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) halves, in(vreg) values, options(pure, nomem, nostack));
    }
    halves
}

/// # Safety
///
/// The machine must have NEON.
#[inline(always)]
unsafe fn from_f16(values: uint16x4_t) -> float32x4_t {
    let singles;
    // SAFETY: by the contract above; the instruction touches no memory and no flags.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) singles, in(vreg) values, options(pure, nomem, nostack));
    }
    singles
}

/// # Safety
///
/// The machine must have NEON.
#[inline(always)]
unsafe fn sign(a: float32x4_t) -> float32x4_t {
    // SAFETY: by the contract above.
    unsafe {
        let bits = vreinterpretq_u32_f32(a);
        let sign = vandq_u32(bits, vdupq_n_u32(1 << 31));
        let one = vorrq_u32(sign, vreinterpretq_u32_f32(vdupq_n_f32(1.0)));
        let zero = vdupq_n_f32(0.0);
        // Neither of zero and NaN.
        let signed = vorrq_u32(vcgtq_f32(a, zero), vcltq_f32(a, zero));
        vreinterpretq_f32_u32(vbslq_u32(signed, one, bits))
    }
}

/// Applies `$operation` to the four registers of each argument.
macro_rules! each {
    ($operation:ident, $($values:expr),+) => {
        [
            $operation($($values[0]),+),
            $operation($($values[1]),+),
            $operation($($values[2]),+),
            $operation($($values[3]),+),
        ]
    };
}

// SAFETY of every block below: `self` proves that the machine has NEON, and pointers come from references to arrays of 16
// elements, of which 4 are read or written at 0, 4, 8 and 12.
impl Lanes for Neon {
    type Floats = [float32x4_t; 4];
    type Sums = [float64x2_t; 8];

    #[inline(always)]
    fn splat(self, value: f32) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { [vdupq_n_f32(value); 4] }
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> [float32x4_t; 4] {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe { each!(vld1q_f32, [from, from.add(4), from.add(8), from.add(12)]) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> [float32x4_t; 4] {
        let from = from.as_ptr().cast::<u16>();
        // SAFETY: see above.
        unsafe {
            let halves = each!(vld1_u16, [from, from.add(4), from.add(8), from.add(12)]);
            each!(from_bf16, halves)
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> [float32x4_t; 4] {
        let from = from.as_ptr().cast::<u16>();
        // SAFETY: see above.
        unsafe {
            let halves = each!(vld1_u16, [from, from.add(4), from.add(8), from.add(12)]);
            each!(from_f16, halves)
        }
    }

    #[inline(always)]
    fn store_f32(self, values: [float32x4_t; 4], to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            each!(vst1q_f32, [to, to.add(4), to.add(8), to.add(12)], values);
        }
    }

    #[inline(always)]
    fn store_bf16(self, values: [float32x4_t; 4], to: &mut [bf16; LANES]) {
        let to = to.as_mut_ptr().cast::<u16>();
        // SAFETY: see above.
        unsafe {
            let halves = each!(to_bf16, values);
            each!(vst1_u16, [to, to.add(4), to.add(8), to.add(12)], halves);
        }
    }

    #[inline(always)]
    fn store_f16(self, values: [float32x4_t; 4], to: &mut [f16; LANES]) {
        let to = to.as_mut_ptr().cast::<u16>();
        // SAFETY: see above.
        unsafe {
            let halves = each!(to_f16, values);
            each!(vst1_u16, [to, to.add(4), to.add(8), to.add(12)], halves);
        }
    }

    #[inline(always)]
    fn add(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(vaddq_f32, a, b) }
    }

    #[inline(always)]
    fn sub(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(vsubq_f32, a, b) }
    }

    #[inline(always)]
    fn mul(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(vmulq_f32, a, b) }
    }

    #[inline(always)]
    fn div(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(vdivq_f32, a, b) }
    }

    #[inline(always)]
    fn sqrt(self, a: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(vsqrtq_f32, a) }
    }

    #[inline(always)]
    fn mul_add(self, a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above. The intrinsic adds to its first argument.
        unsafe { each!(vfmaq_f32, c, a, b) }
    }

    #[inline(always)]
    fn sign(self, a: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: see above.
        unsafe { each!(sign, a) }
    }

    #[inline(always)]
    fn zero_sums(self) -> [float64x2_t; 8] {
        // SAFETY: see above.
        unsafe { [vdupq_n_f64(0.0); 8] }
    }

    #[inline(always)]
    fn add_squares(self, mut sums: [float64x2_t; 8], values: [float32x4_t; 4]) -> [float64x2_t; 8] {
        for (values, sums) in values.into_iter().zip(sums.as_chunks_mut::<2>().0) {
            // SAFETY: see above.
            unsafe {
                let (low, high) = (vcvt_f64_f32(vget_low_f32(values)), vcvt_high_f64_f32(values));
                sums[0] = vfmaq_f64(sums[0], low, low);
                sums[1] = vfmaq_f64(sums[1], high, high);
            }
        }
        sums
    }

    #[inline(always)]
    fn store_sums(self, sums: [float64x2_t; 8], to: &mut [f64; LANES]) {
        for (sum, to) in sums.into_iter().zip(to.as_chunks_mut::<2>().0) {
            // SAFETY: see above; a chunk has 2 numbers.
            unsafe { vst1q_f64(to.as_mut_ptr(), sum) }
        }
    }
}
