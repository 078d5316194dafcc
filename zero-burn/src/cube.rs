//! Tensors of CubeCL devices as the buffers that they lie in.

use std::collections::HashMap;
use std::ops::Range;

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{Cube, kernel};
use zero_core::DType;

use crate::floats::burn_dtype;
use crate::host::host_dtype;
use crate::kernels::{Buffer, KernelError};

/// Where a tensor lies: the buffer, by number, and its bytes in there.
pub(crate) type Extent = (usize, Range<u64>);

/// The flat tensor's buffer, in order.
///
/// # Panics
///
/// If it is of another kind of device: the engine keeps all that it computes with on its own.
pub(crate) fn buffer(tensor: Tensor<1>) -> CubeTensor {
    let primitive = tensor.try_into_primitive::<Cube>();
    kernel::into_contiguous(resolve(primitive.expect("a tensor of an engine on a CubeCL device is there")))
}

/// A buffer as a tensor.
pub(crate) fn tensor(buffer: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(register(buffer))
}

/// Whether the tensor is on a CubeCL device.
pub(crate) fn is_cube(tensor: &Tensor<1>) -> bool {
    tensor.clone().try_into_primitive::<Cube>().is_ok()
}

/// Where the tensor lies, if it is on a CubeCL device.
pub(crate) fn extent<const D: usize>(tensor: Tensor<D>) -> Option<Extent> {
    let handle = resolve(tensor.try_into_primitive::<Cube>().ok()?).handle;
    let start = handle.offset_start.unwrap_or(0);
    Some((handle.memory.descriptor().id.value, start..start + handle.size_in_used()))
}

/// The elements of a flat tensor of floats, for kernels.
///
/// # Panics
///
/// As [`buffer`].
pub(crate) fn elements(tensor: Tensor<1>) -> Result<Buffer, KernelError> {
    let dtype = host_dtype(tensor.dtype()).unwrap_or(DType::F32);
    elements_of(buffer(tensor.cast(burn_dtype(dtype))))
}

/// As [`elements`], of a buffer whose elements are of a type that kernels know.
pub(crate) fn elements_of(buffer: CubeTensor) -> Result<Buffer, KernelError> {
    let dtype = host_dtype(buffer.dtype).unwrap_or(DType::F32);
    Buffer::new(buffer.handle, dtype, buffer.meta.num_elements())
}

/// Some elements of a flat buffer, which it shares.
///
/// # Panics
///
/// If there are not so many.
pub(crate) fn part(buffer: CubeTensor, elements: Range<usize>) -> CubeTensor {
    let CubeTensor { client, device, handle, dtype, meta, .. } = buffer;
    let (rest, size) = (meta.num_elements() - elements.end, dtype.size() as u64);
    let handle = handle.offset_start(elements.start as u64 * size).offset_end(rest as u64 * size);
    CubeTensor::new_contiguous(client, device, [elements.len()].into(), handle, dtype)
}

/// Its type.
///
/// # Panics
///
/// If it is none of those that ranks exchange.
pub(crate) fn dtype_of(buffer: &CubeTensor) -> DType {
    host_dtype(buffer.dtype).expect("ranks exchange this type")
}

/// Bytes of its elements.
pub(crate) fn bytes(buffer: &CubeTensor) -> u64 {
    (buffer.meta.num_elements() * buffer.dtype.size()) as u64
}

/// Copies bytes of a buffer, from `offset` on, to the host; `during` is for errors.
///
/// # Panics
///
/// If there are not so many.
pub(crate) fn read(
    buffer: &CubeTensor,
    offset: u64,
    during: &'static str,
    into: &mut [u8],
) -> Result<(), KernelError> {
    let all = bytes(buffer);
    // Devices copy whole words.
    let start = offset - offset % WORD;
    let end = (offset + into.len() as u64).next_multiple_of(WORD).min(all);
    let handle = buffer.handle.clone().offset_start(start).offset_end(all - end);
    let words = buffer.client.read_one(handle).map_err(|error| KernelError::Device {
        device: format!("{:?}", buffer.device),
        during,
        reason: error.to_string(),
    })?;
    into.copy_from_slice(&words[(offset - start) as usize..][..into.len()]);
    Ok(())
}

const WORD: u64 = 4;

/// Whether both tensors are the same memory.
pub(crate) fn same_extent(left: Tensor<1>, right: Tensor<1>) -> bool {
    extent(left).is_some_and(|left| extent(right) == Some(left))
}

/// Bytes of the device that are in any of the extents.
pub(crate) fn covered_bytes(extents: impl IntoIterator<Item = Extent>) -> u64 {
    let mut buffers: HashMap<usize, Vec<Range<u64>>> = HashMap::new();
    for (buffer, range) in extents {
        buffers.entry(buffer).or_default().push(range);
    }
    let covered = |mut ranges: Vec<Range<u64>>| {
        ranges.sort_unstable_by_key(|range| range.start);
        let add = |(bytes, end): (u64, u64), range: Range<u64>| {
            (bytes + range.end.saturating_sub(range.start.max(end)), end.max(range.end))
        };
        ranges.into_iter().fold((0, 0), add).0
    };
    buffers.into_values().map(covered).sum()
}

#[cfg(not(feature = "fusion"))]
fn resolve(primitive: CubeTensor) -> CubeTensor {
    primitive
}

#[cfg(not(feature = "fusion"))]
fn register(tensor: CubeTensor) -> CubeTensor {
    tensor
}

/// What fusion has put off until now is done first.
#[cfg(feature = "fusion")]
fn resolve(primitive: burn::backend::tensor::FloatTensor<Cube>) -> CubeTensor {
    let client = primitive.client.clone();
    client.resolve_tensor_float::<burn_cubecl::CubeBackend>(primitive)
}

#[cfg(feature = "fusion")]
fn register(tensor: CubeTensor) -> burn::backend::tensor::FloatTensor<Cube> {
    use burn::backend::fusion::custom::{OperationIr, OperationOutput, StreamId};
    use burn::backend::fusion::{NoOp, get_client};

    let client = get_client::<burn_cubecl::CubeBackend>(&tensor.device);
    let (shape, dtype) = (tensor.meta.shape().clone(), tensor.dtype);
    let operation = burn::backend::ir::InitOperationIr::create(shape, dtype, || {
        client.register_tensor_handle(tensor.into())
    });
    let no_op = NoOp::<burn_cubecl::CubeBackend>::new();
    client.register(StreamId::current(), OperationIr::Init(operation), no_op).output()
}

#[cfg(test)]
mod tests {
    use super::covered_bytes;

    #[test]
    fn what_overlaps_counts_once() {
        assert_eq!(covered_bytes([]), 0);
        assert_eq!(covered_bytes([(1, 0..8), (1, 4..12), (1, 20..24), (2, 0..8), (1, 0..2), (3, 5..5)]), 24);
    }
}
