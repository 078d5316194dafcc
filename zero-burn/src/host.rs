//! Tensors as host memory: read where they lie, made from pooled buffers without a copy.

use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::ops::Range;
#[cfg(feature = "flex")]
use std::sync::Arc;

use burn::tensor::{Bytes as TensorBytes, DType as TensorDType, Device, Tensor, TensorData, Transaction};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use zero_comm::Region;
use zero_core::DType;
use zero_offload::HostBuffer;

#[cfg(feature = "cube")]
use crate::cube;
use crate::floats::{Floats, burn_dtype};

/// The elements of a tensor of floats in host memory.
///
/// A Flex tensor is read in place, whoever else holds it; a tensor of another backend is copied to the host once.
#[derive(Debug)]
pub(crate) struct HostTensor {
    memory: Memory,
    dtype: DType,
}

#[derive(Debug)]
enum Memory {
    #[cfg(feature = "flex")]
    Flex(burn_flex::FlexTensor),
    Copy(TensorData),
}

impl HostTensor {
    /// `f32`, `f16` and `bf16` as they are, anything else as `f32`.
    pub(crate) fn new(tensor: Tensor<1>) -> Self {
        if let Some(in_place) = Self::in_place(tensor.clone()) {
            return in_place;
        }
        let dtype = host_dtype(tensor.dtype()).unwrap_or(DType::F32);
        Self { memory: Memory::Copy(tensor.cast(burn_dtype(dtype)).into_data()), dtype }
    }

    /// As [`new`](Self::new) of several: those of a device are read at once.
    pub(crate) fn several(tensors: Vec<Tensor<1>>) -> Vec<Self> {
        let mut elsewhere = Transaction::default();
        let here: Vec<_> = tensors
            .into_iter()
            .map(|tensor| {
                let in_place = Self::in_place(tensor.clone());
                let dtype = host_dtype(tensor.dtype()).unwrap_or(DType::F32);
                if in_place.is_none() {
                    elsewhere = std::mem::take(&mut elsewhere).register(tensor.cast(burn_dtype(dtype)));
                }
                in_place.ok_or(dtype)
            })
            .collect();
        let mut copies =
            if here.iter().all(Result::is_ok) { Vec::new() } else { elsewhere.execute() }.into_iter();
        let mut copy = |dtype| {
            let data = copies.next().expect("a transaction gives as many as were registered");
            Self { memory: Memory::Copy(data), dtype }
        };
        here.into_iter().map(|tensor| tensor.unwrap_or_else(&mut copy)).collect()
    }

    /// The elements where they lie; `None` where they are not in host memory, in order and of a type that is known.
    pub(crate) fn in_place(tensor: Tensor<1>) -> Option<Self> {
        #[cfg(feature = "flex")]
        if let Ok(flex) = tensor.try_into_primitive::<burn_flex::Flex>()
            && flex.is_contiguous()
            && let Some(dtype) = host_dtype(flex.dtype())
        {
            return Some(Self { memory: Memory::Flex(flex), dtype });
        }
        None
    }

    pub(crate) fn floats(&self) -> Floats<'_> {
        Floats::new(self.dtype, self.bytes())
    }

    /// The elements of an `f32` tensor.
    ///
    /// # Panics
    ///
    /// If it is of another type.
    pub(crate) fn as_slice(&self) -> &[f32] {
        match self.floats() {
            Floats::F32(numbers) => numbers,
            Floats::F16(_) | Floats::BF16(_) => unreachable!("masters and initial values are f32"),
        }
    }

    /// The whole allocation behind the elements, as addresses: a view shares it with what it views.
    pub(crate) fn allocation(&self) -> Range<usize> {
        let bytes = match &self.memory {
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
        match &self.memory {
            #[cfg(feature = "flex")]
            Memory::Flex(flex) => {
                let (start, size) = (flex.layout().start_offset(), self.dtype.size());
                &flex.bytes()[start * size..(start + flex.layout().num_elements()) * size]
            }
            Memory::Copy(data) => data.as_bytes(),
        }
    }
}

/// Whether gathers work on the device of a tensor.
pub(crate) fn is_supported(tensor: &Tensor<1>) -> bool {
    #[cfg(feature = "flex")]
    if tensor.clone().try_into_primitive::<burn_flex::Flex>().is_ok() {
        return true;
    }
    #[cfg(feature = "cube")]
    if cube::is_cube(tensor) {
        return true;
    }
    false
}

/// The tensor on `device`: itself, if it is there.
pub(crate) fn on(device: &Device, tensor: Tensor<1>) -> Tensor<1> {
    if tensor.device() == *device { tensor } else { tensor.to_device(device) }
}

/// The type of a tensor's elements, if memory of it is read as it is.
pub(crate) fn host_dtype(dtype: TensorDType) -> Option<DType> {
    match dtype {
        TensorDType::F32 => Some(DType::F32),
        TensorDType::F16 => Some(DType::F16),
        TensorDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// Burn's name for the type of a parameter's elements.
pub(crate) fn tensor_dtype(dtype: DType) -> TensorDType {
    burn_dtype(dtype).into()
}

/// Whether two tensors lie in the same storage. Where that cannot be told, `true`.
pub(crate) fn same_storage<const A: usize, const B: usize>(left: Tensor<A>, right: Tensor<B>) -> bool {
    #[cfg(feature = "flex")]
    if let (Ok(left), Ok(right)) = (
        left.clone().try_into_primitive::<burn_flex::Flex>(),
        right.clone().try_into_primitive::<burn_flex::Flex>(),
    ) {
        return Arc::ptr_eq(&left.data_arc(), &right.data_arc());
    }
    #[cfg(feature = "cube")]
    if let (Some(left), Some(right)) = (cube::extent(left), cube::extent(right)) {
        return left.0 == right.0;
    }
    true
}

/// Bytes behind `tensors`: what several of them share counts once.
pub(crate) fn distinct_bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor<1>>) -> u64 {
    let mut allocations = HashSet::new();
    #[cfg(feature = "cube")]
    let mut extents = Vec::new();
    for tensor in tensors {
        if let Some(host) = HostTensor::in_place(tensor.clone()) {
            allocations.insert(host.allocation());
            continue;
        }
        #[cfg(feature = "cube")]
        extents.extend(cube::extent(tensor.clone()));
    }
    let bytes = allocations.iter().map(|range| range.len() as u64).sum::<u64>();
    #[cfg(feature = "cube")]
    let bytes = bytes + cube::covered_bytes(extents);
    bytes
}

/// A flat tensor of `dtype` whose memory is `buffer`; dropping the last handle gives the buffer back to its pool.
pub(crate) fn tensor_from_buffer(buffer: HostBuffer, dtype: DType, device: &Device) -> Tensor<1> {
    tensor_from_memory(Pooled { buffer: Some(buffer), is_written: false, after: None }, dtype, device)
}

/// As [`tensor_from_buffer`]; when the last handle is dropped, `after` gets the buffer, unless Burn has written to it:
/// an operation that is the last to need a tensor may put its result there. Burn drops under its own global lock, so
/// `after` must not wait.
pub(crate) fn lent_tensor(
    buffer: HostBuffer,
    dtype: DType,
    device: &Device,
    after: impl FnOnce(Option<HostBuffer>) + Send + Sync + 'static,
) -> Tensor<1> {
    tensor_from_memory(
        Pooled { buffer: Some(buffer), is_written: false, after: Some(Box::new(after)) },
        dtype,
        device,
    )
}

fn tensor_from_memory(memory: Pooled, dtype: DType, device: &Device) -> Tensor<1> {
    let bytes = memory.buffer().len();
    // SAFETY: a `HostBuffer` is initialised over its whole length, which is the length given.
    let bytes_of_tensor = unsafe { TensorBytes::from_controller(Box::new(memory), bytes) };
    let data = TensorData::from_bytes(bytes_of_tensor, [bytes / dtype.size()], tensor_dtype(dtype));
    Tensor::from_data(data, (device, tensor_dtype(dtype)))
}

/// Lets Burn hold a pooled buffer as a tensor's memory.
struct Pooled {
    /// There until the drop.
    buffer: Option<HostBuffer>,
    /// Whether somebody was given the memory to write to.
    is_written: bool,
    after: Option<Box<dyn FnOnce(Option<HostBuffer>) + Send + Sync>>,
}

impl Pooled {
    fn buffer(&self) -> &HostBuffer {
        self.buffer.as_ref().expect("there until the drop")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(after) = self.after.take() {
            after(self.buffer.take().filter(|_| !self.is_written));
        }
    }
}

impl AllocationController for Pooled {
    fn alloc_align(&self) -> usize {
        HostBuffer::ALIGNMENT
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        self.is_written = true;
        let buffer = self.buffer.as_mut().expect("there until the drop");
        let (pointer, len) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the buffer is exclusively borrowed for the result's lifetime; the caller writes initialised
        // bytes only, as the trait demands.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: the buffer is borrowed for the result's lifetime, and initialised bytes may be read as
        // possibly uninitialised ones.
        Ok(unsafe { std::slice::from_raw_parts(self.buffer().as_ptr().cast(), self.buffer().len()) })
    }
}
