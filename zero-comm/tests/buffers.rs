//! Slices without their type.

use half::{bf16, f16};
use zero_comm::{Buffer, BufferMut, Element};
use zero_core::DType;

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(elements: &mut [T], dtype: DType) {
    let copy = elements.to_vec();
    let buffer = Buffer::from(copy.as_slice());
    assert_eq!((buffer.dtype(), buffer.len(), buffer.is_empty()), (dtype, copy.len(), copy.is_empty()));
    assert_eq!(buffer.bytes().len(), copy.len() * dtype.size());
    assert_eq!(buffer.as_slice::<T>(), Some(copy.as_slice()));

    let mut buffer = BufferMut::from(&mut *elements);
    assert_eq!((buffer.dtype(), buffer.len(), buffer.is_empty()), (dtype, copy.len(), copy.is_empty()));
    assert_eq!(buffer.as_buffer().as_slice::<T>(), Some(copy.as_slice()));
    assert_eq!(buffer.as_slice::<T>(), Some(copy.as_slice()));
    buffer.bytes_mut().fill(0);
    assert!(buffer.as_mut_slice::<T>().is_some());
    assert!(buffer.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn every_type_keeps_its_elements() {
    round_trip(&mut [1.0_f32, -2.0], DType::F32);
    round_trip(&mut [1.0_f64, -2.0], DType::F64);
    round_trip(&mut [bf16::ONE, bf16::NEG_ONE], DType::BF16);
    round_trip(&mut [f16::ONE, f16::NEG_ONE], DType::F16);
    round_trip(&mut [1_i32, -2], DType::I32);
    round_trip(&mut [1_i64, -2], DType::I64);
    round_trip(&mut [1_u8, 2], DType::U8);
}

#[test]
fn a_buffer_may_be_empty() {
    round_trip::<f64>(&mut [], DType::F64);
    round_trip::<f16>(&mut Vec::new(), DType::F16);
}

#[test]
fn a_buffer_is_of_no_other_type() {
    let mut elements = [1.0_f32; 4];
    assert_eq!(Buffer::from(elements.as_slice()).as_slice::<i32>(), None);
    assert_eq!(Buffer::from(elements.as_slice()).as_slice::<u8>(), None);
    assert!(BufferMut::from(elements.as_mut_slice()).as_mut_slice::<f64>().is_none());
}
