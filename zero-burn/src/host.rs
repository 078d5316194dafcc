//! Tensors as host memory: read where they lie, made from pooled buffers without a copy.

use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::ops::Range;
#[cfg(feature = "flex")]
use std::sync::Arc;

use burn::tensor::{Bytes as TensorBytes, DType, Device, FloatDType, Tensor, TensorData};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use zero_comm::Region;
use zero_offload::HostBuffer;

/// The elements of an `f32` tensor in host memory.
///
/// A Flex tensor is read in place, whoever else holds it; a tensor of another backend is copied to the host once.
#[derive(Debug)]
pub(crate) struct HostTensor(Memory);

#[derive(Debug)]
enum Memory {
    #[cfg(feature = "flex")]
    Flex(burn_flex::FlexTensor),
    Copy(TensorData),
}

impl HostTensor {
    pub(crate) fn new(tensor: Tensor<1>) -> Self {
        Self::in_place(tensor.clone())
            .unwrap_or_else(|| Self(Memory::Copy(tensor.cast(FloatDType::F32).into_data())))
    }

    /// The elements where they lie; `None` where they are not in host memory, in order and `f32`.
    pub(crate) fn in_place(tensor: Tensor<1>) -> Option<Self> {
        #[cfg(feature = "flex")]
        if let Ok(flex) = tensor.try_into_primitive::<burn_flex::Flex>()
            && flex.is_contiguous()
            && flex.dtype() == DType::F32
        {
            return Some(Self(Memory::Flex(flex)));
        }
        None
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        match &self.0 {
            #[cfg(feature = "flex")]
            Memory::Flex(flex) => {
                let start = flex.layout().start_offset();
                &flex.storage::<f32>()[start..start + flex.layout().num_elements()]
            }
            Memory::Copy(data) => bytemuck::cast_slice(data.as_bytes()),
        }
    }

    /// The whole allocation behind the elements, as addresses: a view shares it with what it views.
    pub(crate) fn allocation(&self) -> Range<usize> {
        let bytes = match &self.0 {
            #[cfg(feature = "flex")]
            Memory::Flex(flex) => flex.bytes(),
            Memory::Copy(data) => data.as_bytes(),
        };
        let start = bytes.as_ptr() as usize;
        start..start + bytes.len()
    }
}

impl Region for HostTensor {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.as_slice())
    }
}

/// Whether two tensors lie in the same storage. Where that cannot be told, `true`.
pub(crate) fn same_storage<const A: usize, const B: usize>(left: Tensor<A>, right: Tensor<B>) -> bool {
    #[cfg(feature = "flex")]
    if let (Ok(left), Ok(right)) =
        (left.try_into_primitive::<burn_flex::Flex>(), right.try_into_primitive::<burn_flex::Flex>())
    {
        return Arc::ptr_eq(&left.data_arc(), &right.data_arc());
    }
    true
}

/// Bytes behind `tensors`: host memory that several of them share counts once; elsewhere every tensor counts.
pub(crate) fn distinct_bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor<1>>) -> u64 {
    let (mut allocations, mut elsewhere) = (HashSet::new(), 0);
    for tensor in tensors {
        match HostTensor::in_place(tensor.clone()) {
            Some(host) => drop(allocations.insert(host.allocation())),
            None => elsewhere += (tensor.shape().num_elements() * tensor.dtype().size()) as u64,
        }
    }
    allocations.iter().map(|range| range.len() as u64).sum::<u64>() + elsewhere
}

/// A flat `f32` tensor whose memory is `buffer`; dropping the last handle gives the buffer back to its pool.
pub(crate) fn tensor_from_buffer(buffer: HostBuffer, device: &Device) -> Tensor<1> {
    let (bytes, numel) = (buffer.len(), buffer.len() / size_of::<f32>());
    // SAFETY: a `HostBuffer` is initialised over its whole length, which is the length given.
    let bytes = unsafe { TensorBytes::from_controller(Box::new(Pooled(buffer)), bytes) };
    Tensor::from_data(TensorData::from_bytes(bytes, [numel], DType::F32), device)
}

/// Lets Burn hold a pooled buffer as a tensor's memory.
struct Pooled(HostBuffer);

impl AllocationController for Pooled {
    fn alloc_align(&self) -> usize {
        HostBuffer::ALIGNMENT
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let (pointer, len) = (self.0.as_mut_ptr(), self.0.len());
        // SAFETY: the buffer is exclusively borrowed for the result's lifetime; the caller writes initialised
        // bytes only, as the trait demands.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: the buffer is borrowed for the result's lifetime, and initialised bytes may be read as
        // possibly uninitialised ones.
        Ok(unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len()) })
    }
}
