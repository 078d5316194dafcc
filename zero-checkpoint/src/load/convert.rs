//! From one floating-point type to another.

use half::{bf16, f16};
use zero_core::DType;

/// Elements that are converted at once.
const BATCH: usize = 16 << 10;

/// Converts by batches, through little memory that it keeps.
#[derive(Debug, Default)]
pub(crate) struct Converter(Vec<u8>);

impl Converter {
    /// The most memory that it takes, in bytes.
    #[cfg(unix)]
    pub(crate) const BYTES: usize = BATCH * size_of::<f64>();

    /// Gives `from`, elements of the type `source`, to `take` as elements of `target`: with the position of the first one, a
    /// batch at a time; what has the type already, as a whole.
    pub(crate) fn convert<E>(
        &mut self,
        from: &[u8],
        source: DType,
        target: DType,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if source == target {
            return take(0, from);
        }
        from.chunks(BATCH * source.size()).enumerate().try_for_each(|(index, batch)| {
            self.0.clear();
            convert(batch, source, target, &mut self.0);
            take(index * BATCH, &self.0)
        })
    }
}

/// Appends `from`, elements of one type, to `into` as elements of another; both floating point. Values go to the nearest,
/// ties to even.
pub(crate) fn convert(from: &[u8], source: DType, target: DType, into: &mut Vec<u8>) {
    // Elements of files need not lie aligned in memory, so they are taken byte by byte.
    match source {
        DType::F64 => each(from, f64::from_le_bytes, target, into),
        DType::F32 => each(from, |bytes| f64::from(f32::from_le_bytes(bytes)), target, into),
        DType::BF16 => each(from, |bytes| f64::from(bf16::from_le_bytes(bytes)), target, into),
        DType::F16 => each(from, |bytes| f64::from(f16::from_le_bytes(bytes)), target, into),
        // Refused when the load was planned.
        DType::I64 | DType::I32 | DType::U8 => {}
    }
}

fn each<const N: usize>(from: &[u8], read: impl Fn([u8; N]) -> f64, target: DType, into: &mut Vec<u8>) {
    let values = from.chunks_exact(N).map(|bytes| read(bytes.try_into().unwrap_or([0; N])));
    match target {
        DType::F64 => values.for_each(|value| into.extend(value.to_le_bytes())),
        DType::F32 => values.for_each(|value| into.extend((value as f32).to_le_bytes())),
        DType::BF16 => values.for_each(|value| into.extend(bf16::from_f32(odd(value)).to_le_bytes())),
        DType::F16 => values.for_each(|value| into.extend(f16::from_f32(odd(value)).to_le_bytes())),
        DType::I64 | DType::I32 | DType::U8 => {}
    }
}

/// The value as an f32, rounded to odd where it is none: to round that again gives what rounding once would have given.
///
/// Source: Boldo and Melquiond, "Emulation of FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd",
/// section 3.
fn odd(value: f64) -> f32 {
    let nearest = value as f32;
    if f64::from(nearest) == value || value.is_nan() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(f64::from(nearest).abs() > value.abs());
    f32::from_bits(toward_zero | 1)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use zero_core::DType;

    use super::convert;

    fn converted(bytes: &[u8], source: DType, target: DType) -> Vec<u8> {
        let mut into = Vec::new();
        convert(bytes, source, target, &mut into);
        into
    }

    #[test]
    fn sixteen_bits_come_back_through_thirty_two() {
        for bits in 0..=u16::MAX {
            for dtype in [DType::BF16, DType::F16] {
                let there = converted(&bits.to_le_bytes(), dtype, DType::F32);
                let back = converted(&there, DType::F32, dtype);
                let is_nan = match dtype {
                    DType::BF16 => bf16::from_bits(bits).is_nan(),
                    _ => f16::from_bits(bits).is_nan(),
                };
                assert!(is_nan || back == bits.to_le_bytes(), "{bits:04x} of {dtype}");
            }
        }
    }

    #[test]
    fn values_just_beyond_the_middle_go_up() {
        // The middle between two neighbours, and one bit of an f32 or f64 more.
        for (middle, dtype) in [(1.003_906_25, DType::BF16), (1.000_488_281_25, DType::F16)] {
            let even = converted(&f64::to_le_bytes(middle), DType::F64, dtype);
            assert_eq!(even, converted(&1f64.to_le_bytes(), DType::F64, dtype));
            let beyond = converted(&f64::to_le_bytes(middle.next_up()), DType::F64, dtype);
            let beyond_f32 = converted(&(middle as f32).next_up().to_le_bytes(), DType::F32, dtype);
            assert_ne!(beyond, even);
            assert_eq!(beyond_f32, beyond);
        }
        let vast = converted(&f64::MAX.to_le_bytes(), DType::F64, DType::BF16);
        assert_eq!(vast, bf16::INFINITY.to_le_bytes());
    }

    #[test]
    fn values_go_to_the_nearest() {
        for value in [1.0f32, 1.003_906_3, 1.01, -65519.0, 3.0e38, 1e-40, f32::INFINITY] {
            let bytes = value.to_le_bytes();
            assert_eq!(converted(&bytes, DType::F32, DType::BF16), bf16::from_f32(value).to_le_bytes());
            assert_eq!(converted(&bytes, DType::F32, DType::F16), f16::from_f32(value).to_le_bytes());
            let widened = converted(&bytes, DType::F32, DType::F64);
            assert_eq!(converted(&widened, DType::F64, DType::F32), bytes);
        }
    }
}
