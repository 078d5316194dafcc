//! Sixteen numbers in one register of AVX-512.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Lanes, Operation};

/// Made by [`detect`](Self::detect) alone, which proves that the machine has AVX-512F and what that implies: AVX2, FMA and
/// F16C. The intrinsics of this file ask for no more.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }

    pub(super) fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx512f")]
        fn compiled<O: Operation>(lanes: Avx512, operation: O) -> O::Output {
            operation.run(lanes)
        }
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { compiled(self, operation) }
    }
}

/// The bits of bf16, rounded to the nearest even, in the upper halves; NaN stays NaN.
///
/// # Safety
///
/// The machine must have AVX-512F.
#[inline(always)]
unsafe fn round_to_bf16(values: __m512) -> __m512i {
    // SAFETY: by the contract above.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(values, values);
        _mm512_mask_add_epi32(quiet, number, bits, bias)
    }
}

/// # Safety
///
/// The machine must have AVX-512F.
#[inline(always)]
unsafe fn to_bf16(values: __m512) -> __m256i {
    // SAFETY: by the contract above.
    unsafe { _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(round_to_bf16(values))) }
}

/// # Safety
///
/// The machine must have AVX-512F.
#[inline(always)]
unsafe fn to_f16(values: __m512) -> __m256i {
    // SAFETY: by the contract above.
    unsafe { _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values) }
}

// SAFETY of every block below: `self` proves that the machine has AVX-512F, and pointers come from references to arrays
// of the size that is read or written.
impl Lanes for Avx512 {
    type Floats = __m512;
    type Sums = [__m512d; 2];

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_f32(self, values: __m512, to: &mut [f32; LANES]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
    }

    #[inline(always)]
    fn store_bf16(self, values: __m512, to: &mut [bf16; LANES]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), to_bf16(values)) }
    }

    #[inline(always)]
    fn store_f16(self, values: __m512, to: &mut [f16; LANES]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), to_f16(values)) }
    }

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: every x86-64 has this instruction, which is a hint and reads nothing that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sqrt_ps(a) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn sign(self, a: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let bits = _mm512_castps_si512(a);
            let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
            let one = _mm512_or_si512(sign, _mm512_castps_si512(_mm512_set1_ps(1.0)));
            let signed = _mm512_cmp_ps_mask::<_CMP_NEQ_OQ>(a, _mm512_setzero_ps());
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(signed, bits, one))
        }
    }

    #[inline(always)]
    fn zero_sums(self) -> [__m512d; 2] {
        // SAFETY: see above.
        unsafe { [_mm512_setzero_pd(), _mm512_setzero_pd()] }
    }

    #[inline(always)]
    fn add_squares(self, sums: [__m512d; 2], values: __m512) -> [__m512d; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
            let upper = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(values));
            let high = _mm512_cvtps_pd(_mm256_castpd_ps(upper));
            [_mm512_fmadd_pd(low, low, sums[0]), _mm512_fmadd_pd(high, high, sums[1])]
        }
    }

    #[inline(always)]
    fn store_sums(self, sums: [__m512d; 2], to: &mut [f64; LANES]) {
        let (low, high) = to.split_at_mut(LANES / 2);
        // SAFETY: see above; each half has 8 numbers.
        unsafe {
            _mm512_storeu_pd(low.as_mut_ptr(), sums[0]);
            _mm512_storeu_pd(high.as_mut_ptr(), sums[1]);
        }
    }
}
