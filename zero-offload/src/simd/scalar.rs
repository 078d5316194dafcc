//! One number after another, on any machine.

use std::array::from_fn;

use half::{bf16, f16};

use super::{LANES, Lanes};

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Lanes for Scalar {
    type Floats = [f32; LANES];
    type Sums = [f64; LANES];

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> [f32; LANES] {
        *from
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> [f32; LANES] {
        from.map(bf16::to_f32)
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> [f32; LANES] {
        from.map(f16::to_f32)
    }

    #[inline(always)]
    fn store_f32(self, values: [f32; LANES], to: &mut [f32; LANES]) {
        *to = values;
    }

    #[inline(always)]
    fn store_bf16(self, values: [f32; LANES], to: &mut [bf16; LANES]) {
        *to = values.map(bf16::from_f32);
    }

    #[inline(always)]
    fn store_f16(self, values: [f32; LANES], to: &mut [f16; LANES]) {
        *to = values.map(f16::from_f32);
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|at| a[at] + b[at])
    }

    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|at| a[at] - b[at])
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|at| a[at] * b[at])
    }

    #[inline(always)]
    fn div(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|at| a[at] / b[at])
    }

    #[inline(always)]
    fn sqrt(self, a: [f32; LANES]) -> [f32; LANES] {
        a.map(f32::sqrt)
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        from_fn(|at| a[at].mul_add(b[at], c[at]))
    }

    #[inline(always)]
    fn sign(self, a: [f32; LANES]) -> [f32; LANES] {
        a.map(|a| if a == 0.0 || a.is_nan() { a } else { 1f32.copysign(a) })
    }

    #[inline(always)]
    fn zero_sums(self) -> [f64; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    fn add_squares(self, sums: [f64; LANES], values: [f32; LANES]) -> [f64; LANES] {
        from_fn(|at| {
            let value = f64::from(values[at]);
            sums[at] + value * value
        })
    }

    #[inline(always)]
    fn store_sums(self, sums: [f64; LANES], to: &mut [f64; LANES]) {
        *to = sums;
    }
}
