//! Sixteen numbers in two registers of AVX2.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Lanes, Operation};

const HALF: usize = LANES / 2;

/// Made by [`detect`](Self::detect) alone, which proves that the machine has AVX2, FMA and F16C. That is what the
/// intrinsics of this file ask for.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }

    pub(super) fn run<O: Operation>(self, operation: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<O: Operation>(lanes: Avx2, operation: O) -> O::Output {
            operation.run(lanes)
        }
        // SAFETY: `self` proves that the machine has the instructions.
        unsafe { compiled(self, operation) }
    }
}

/// The bits of bf16, rounded to the nearest even, in the lower halves; NaN stays NaN.
///
/// # Safety
///
/// The machine must have AVX2.
#[inline(always)]
unsafe fn round_to_bf16(values: __m256) -> __m256i {
    // SAFETY: by the contract above.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

/// # Safety
///
/// The machine must have AVX2.
#[inline(always)]
unsafe fn to_bf16(values: [__m256; 2]) -> __m256i {
    // SAFETY: by the contract above.
    unsafe {
        // Packing interleaves the halves of both registers.
        let packed = _mm256_packus_epi32(round_to_bf16(values[0]), round_to_bf16(values[1]));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

/// # Safety
///
/// The machine must have F16C.
#[inline(always)]
unsafe fn to_f16(values: [__m256; 2]) -> [__m128i; 2] {
    // SAFETY: by the contract above.
    unsafe {
        [
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[0]),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values[1]),
        ]
    }
}

/// # Safety
///
/// The machine must have AVX2.
#[inline(always)]
unsafe fn sign(a: __m256) -> __m256 {
    // SAFETY: by the contract above.
    unsafe {
        let one = _mm256_or_ps(_mm256_and_ps(a, _mm256_set1_ps(-0.0)), _mm256_set1_ps(1.0));
        let signed = _mm256_cmp_ps::<_CMP_NEQ_OQ>(a, _mm256_setzero_ps());
        _mm256_blendv_ps(a, one, signed)
    }
}

// SAFETY of every block below: `self` proves that the machine has AVX2, FMA and F16C, and pointers come from references
// to arrays of the size that is read or written; the second half begins at 8 of 16 elements.
impl Lanes for Avx2 {
    type Floats = [__m256; 2];
    type Sums = [__m256d; 4];

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(HALF))] }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(HALF).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(HALF).cast())),
            ]
        }
    }

    #[inline(always)]
    fn store_f32(self, values: [__m256; 2], to: &mut [f32; LANES]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), values[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(HALF), values[1]);
        }
    }

    #[inline(always)]
    fn store_bf16(self, values: [__m256; 2], to: &mut [bf16; LANES]) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), to_bf16(values)) }
    }

    #[inline(always)]
    fn store_f16(self, values: [__m256; 2], to: &mut [f16; LANES]) {
        // SAFETY: see above.
        unsafe {
            let [low, high] = to_f16(values);
            _mm_storeu_si128(to.as_mut_ptr().cast(), low);
            _mm_storeu_si128(to.as_mut_ptr().add(HALF).cast(), high);
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, at: *const T) {
        // SAFETY: every x86-64 has this instruction, which is a hint and reads nothing that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sqrt(self, a: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_sqrt_ps(a[0]), _mm256_sqrt_ps(a[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn sign(self, a: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see above.
        unsafe { [sign(a[0]), sign(a[1])] }
    }

    #[inline(always)]
    fn zero_sums(self) -> [__m256d; 4] {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_pd(); 4] }
    }

    #[inline(always)]
    fn add_squares(self, sums: [__m256d; 4], values: [__m256; 2]) -> [__m256d; 4] {
        // SAFETY: see above.
        unsafe {
            let a = _mm256_cvtps_pd(_mm256_castps256_ps128(values[0]));
            let b = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(values[0]));
            let c = _mm256_cvtps_pd(_mm256_castps256_ps128(values[1]));
            let d = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(values[1]));
            [
                _mm256_fmadd_pd(a, a, sums[0]),
                _mm256_fmadd_pd(b, b, sums[1]),
                _mm256_fmadd_pd(c, c, sums[2]),
                _mm256_fmadd_pd(d, d, sums[3]),
            ]
        }
    }

    #[inline(always)]
    fn store_sums(self, sums: [__m256d; 4], to: &mut [f64; LANES]) {
        for (sum, to) in sums.into_iter().zip(to.as_chunks_mut::<4>().0) {
            // SAFETY: see above; a chunk has 4 numbers.
            unsafe { _mm256_storeu_pd(to.as_mut_ptr(), sum) }
        }
    }
}
