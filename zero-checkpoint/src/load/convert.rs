//! From one floating-point type to another.

use half::{bf16, f16};
use zero_core::DType;

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
        DType::BF16 => values.for_each(|value| into.extend(bf16::from_f64(value).to_le_bytes())),
        DType::F16 => values.for_each(|value| into.extend(f16::from_f64(value).to_le_bytes())),
        DType::I64 | DType::I32 | DType::U8 => {}
    }
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
