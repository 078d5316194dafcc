//! Numbers by their bits: how `f32`, `bf16` and `f16` lie in words of 32 bits.
//!
//! Devices differ in the narrow types they know and in how they round to them. Bits are the same everywhere: what is stored
//! in 16 bits is rounded to the nearest even, infinities stay, NaN stays NaN (its payload may change).

use cubecl::prelude::*;
use zero_core::DType;

/// How a number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Format {
    F32,
    Bf16,
    F16,
}

impl Format {
    pub(super) const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// The words that `lanes` numbers take.
    pub(super) const fn words(self, lanes: usize) -> usize {
        match self {
            Self::F32 => lanes,
            Self::Bf16 | Self::F16 => lanes / 2,
        }
    }
}

/// The bits that a compiler must not reason about: `zero` is 0, which only the host knows. Keeps a product from being fused
/// into a sum where the host rounds it.
#[cube]
pub(super) fn opaque<N: Size>(value: Vector<f32, N>, zero: u32) -> Vector<f32, N> {
    Vector::<f32, N>::reinterpret(Vector::<u32, N>::reinterpret(value) ^ Vector::new(zero))
}

/// The number whose 16 bits these are.
#[cube]
pub(super) fn widen(bits: u32, #[comptime] format: Format) -> f32 {
    if comptime!(format == Format::Bf16) {
        f32::reinterpret(bits << 16)
    } else {
        let magnitude = bits & 0x7fff;
        // Exponents are 112 apart; that of infinities and NaN is the highest there is in both.
        let raised = select(magnitude >= 0x7c00, u32::new(224 << 23), u32::new(112 << 23));
        let normal = (magnitude << 13) + raised;
        // What has no hidden bit in f16 has one in f32.
        let small = u32::reinterpret(f32::cast_from(magnitude) * f32::new(5.960_464_5e-8));
        f32::reinterpret(select(magnitude < 0x400, small, normal) | ((bits & 0x8000) << 16))
    }
}

/// The 16 bits of the nearest number, of the even one if two are as near.
#[cube]
pub(super) fn narrow(value: f32, #[comptime] format: Format) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 16) & 0x8000;
    let is_nan = magnitude > 0x7f80_0000;
    if comptime!(format == Format::Bf16) {
        let rounded = (magnitude + 0x7fff + ((magnitude >> 16) & 1)) >> 16;
        sign | select(is_nan, u32::new(0x7fc0), rounded)
    } else {
        let normal = (magnitude - comptime!(112u32 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Below 2^-14: the significand in units of 2^-24. Beyond 25 places nothing is left to round up.
        let exponent = magnitude >> 23;
        let places = (u32::new(126) - exponent.min(u32::new(126))).min(u32::new(25));
        let significand = (magnitude & 0x7f_ffff) | 0x80_0000;
        let kept = significand >> places;
        let rest = significand & ((u32::new(1) << places) - 1);
        let half = (u32::new(1) << places) >> 1;
        let up = rest > half || (rest == half && (kept & 1) == 1);
        let small = kept + select(up, u32::new(1), u32::new(0));
        // 65520 and above are nearer to what would be the next power of two than to the greatest number.
        let finite = select(magnitude < 0x3880_0000, small, normal);
        let limited = select(magnitude >= 0x477f_f000, u32::new(0x7c00), finite);
        sign | select(is_nan, u32::new(0x7e00), limited)
    }
}

/// The numbers in whole words.
#[cube]
pub(super) fn unpack<N: Size, M: Size>(words: Vector<u32, M>, #[comptime] format: Format) -> Vector<f32, N> {
    if comptime!(format == Format::F32) {
        Vector::<f32, N>::reinterpret(words)
    } else {
        let mut numbers = Vector::<f32, N>::empty();
        #[unroll]
        for at in 0..M::value() {
            let word = words.extract(at);
            numbers.insert(comptime!(2 * at), widen(word & 0xffff, format));
            numbers.insert(comptime!(2 * at + 1), widen(word >> 16, format));
        }
        numbers
    }
}

/// The words of numbers that fill them.
#[cube]
pub(super) fn pack<N: Size, M: Size>(numbers: Vector<f32, N>, #[comptime] format: Format) -> Vector<u32, M> {
    if comptime!(format == Format::F32) {
        Vector::<u32, M>::reinterpret(numbers)
    } else {
        let mut words = Vector::<u32, M>::empty();
        #[unroll]
        for at in 0..M::value() {
            let low = narrow(numbers.extract(comptime!(2 * at)), format);
            let high = narrow(numbers.extract(comptime!(2 * at + 1)), format);
            words.insert(at, low | (high << 16));
        }
        words
    }
}

/// The bits at `at` of memory that no kernel writes meanwhile.
#[cube]
pub(super) fn get_bits(words: &[u32], at: u32, #[comptime] format: Format) -> u32 {
    if comptime!(format == Format::F32) {
        words[at as usize]
    } else {
        (words[(at >> 1) as usize] >> ((at & 1) << 4)) & 0xffff
    }
}

/// The number at `at` of memory that no kernel writes meanwhile.
#[cube]
pub(super) fn get(words: &[u32], at: u32, #[comptime] format: Format) -> f32 {
    decode(get_bits(words, at, format), format)
}

/// The number at `at` of memory in which others write other numbers.
#[cube]
pub(super) fn get_shared(words: &[Atomic<u32>], at: u32, #[comptime] format: Format) -> f32 {
    if comptime!(format == Format::F32) {
        f32::reinterpret(words[at as usize].load())
    } else {
        decode((words[(at >> 1) as usize].load() >> ((at & 1) << 4)) & 0xffff, format)
    }
}

/// Sets the bits at `at` of memory in which others write other numbers, of which one may lie in the same word.
#[cube]
pub(super) fn set_bits(words: &[Atomic<u32>], at: u32, bits: u32, #[comptime] format: Format) {
    if comptime!(format == Format::F32) {
        words[at as usize].store(bits);
    } else {
        // Nobody else changes this half, and adding the difference leaves the other one as it is.
        let place = (at & 1) << 4;
        let old = (words[(at >> 1) as usize].load() >> place) & 0xffff;
        words[(at >> 1) as usize].fetch_add((bits - old) << place);
    }
}

/// Sets the number at `at` of memory in which others write other numbers, of which one may lie in the same word.
#[cube]
pub(super) fn set_shared(words: &[Atomic<u32>], at: u32, number: f32, #[comptime] format: Format) {
    if comptime!(format == Format::F32) {
        set_bits(words, at, u32::reinterpret(number), format);
    } else {
        set_bits(words, at, narrow(number, format), format);
    }
}

/// The number that these bits are.
#[cube]
fn decode(bits: u32, #[comptime] format: Format) -> f32 {
    if comptime!(format == Format::F32) { f32::reinterpret(bits) } else { widen(bits, format) }
}
