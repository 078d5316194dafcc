//! Shards side by side in one buffer of a CubeCL device, so that one launch updates many of them.

use burn::tensor::{Device, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::server::Handle;
use zero_core::DType;
use zero_offload::HostBuffer;

use crate::ZeroError;
use crate::cube;
use crate::host::tensor_dtype;
use crate::kernels::{Buffer, KernelError, MoveRow, Onto, move_rows};

/// A device, and the one way to talk to it.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) client: Client,
    pub(crate) device: CubeDevice,
}

/// Where each of several runs of elements begins, and how many there are in all with what lies between them.
#[derive(Debug)]
pub(crate) struct Places {
    lengths: Vec<usize>,
    pub(crate) starts: Vec<usize>,
    total: usize,
}

/// What goes into an arena.
#[derive(Debug)]
pub(crate) enum Content {
    Device(Box<CubeTensor>),
    Host(HostBuffer),
}

/// One buffer.
#[derive(Debug)]
pub(crate) struct Arena {
    port: Port,
    handle: Handle,
    dtype: DType,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Port {
    /// Of a device of CubeCL. To find it takes a tensor: the engine does so once.
    pub(crate) fn of(device: &Device) -> Option<Self> {
        let tensor = Tensor::empty([1], device);
        let CubeTensor { client, device, .. } = cube::is_cube(&tensor).then(|| cube::buffer(tensor))?;
        Some(Self { client, device })
    }

    /// The number of a CUDA device.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_index(&self) -> Option<u32> {
        match self.device {
            CubeDevice::Cuda(burn_cuda::CudaDevice { index }) => u32::try_from(index).ok(),
            #[allow(unreachable_patterns, reason = "with other runtimes, there are others")]
            _ => None,
        }
    }

    /// Room for elements, whose values are unspecified.
    pub(crate) fn room(&self, len: usize, dtype: DType) -> Result<Buffer, KernelError> {
        // No device has memory of no bytes.
        Buffer::new(self.client.empty(len.max(1) * dtype.size()), dtype, len)
    }

    /// A buffer as a flat tensor.
    pub(crate) fn tensor_of(&self, buffer: &Buffer) -> CubeTensor {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let (client, device, mut handle) =
            (self.client.clone(), self.device.clone(), buffer.handle().clone());
        let spare = handle.size_in_used() - (len * dtype.size()) as u64;
        if len > 0 {
            handle = handle.offset_end(spare);
        }
        CubeTensor::new_contiguous(client, device, [len].into(), handle, tensor_dtype(dtype))
    }

    /// Places for runs of these lengths. Each begins where a binding may, in any type of at least two bytes.
    pub(crate) fn places(&self, lengths: Vec<usize>) -> Places {
        let alignment = (self.client.properties().memory.alignment as usize / 2).max(1);
        let mut total = 0;
        let starts = lengths.iter().map(|length| {
            let start = total;
            total = (start + length).next_multiple_of(alignment);
            start
        });
        let starts = starts.collect();
        Places { lengths, starts, total }
    }
}

impl Arena {
    /// Room for new elements, whose values are unspecified.
    pub(crate) fn empty(port: &Port, places: &Places, dtype: DType) -> Self {
        let handle = port.client.empty(places.total * dtype.size());
        Self { port: port.clone(), handle, dtype }
    }

    /// The pieces at their places: where they lie, if they lie so already and nobody else has the buffer, or copied.
    pub(crate) fn of(
        port: &Port,
        places: &Places,
        dtype: DType,
        pieces: Vec<Content>,
    ) -> Result<Self, ZeroError> {
        let pieces = match in_place(port, places, dtype, pieces) {
            Ok(arena) => return Ok(arena),
            Err(pieces) => pieces,
        };
        let arena = Self::empty(port, places, dtype);
        for (at, piece) in pieces.into_iter().enumerate() {
            let handle = match piece {
                Content::Device(tensor) => tensor.handle,
                Content::Host(bytes) => port.client.create_from_slice(&bytes),
            };
            let len = places.lengths[at];
            let from = Buffer::new(handle, dtype, len)?;
            let row = MoveRow { from: 0, to: places.starts[at], len };
            move_rows(&port.client, &from, &arena.buffer(places)?, &[row], 1.0, Onto::Put)?;
        }
        Ok(arena)
    }

    /// For kernels.
    pub(crate) fn buffer(&self, places: &Places) -> Result<Buffer, KernelError> {
        Buffer::new(self.handle.clone(), self.dtype, places.total)
    }

    /// The runs, each by itself.
    pub(crate) fn views(self, places: &Places) -> Vec<CubeTensor> {
        let Self { port: Port { client, device }, handle, dtype } = self;
        let runs = places.starts.iter().zip(&places.lengths);
        let view = |(&start, &length): (&usize, &usize)| {
            let size = dtype.size() as u64;
            let handle = handle
                .clone()
                .offset_start(start as u64 * size)
                .offset_end((places.total - start - length) as u64 * size);
            let (client, device) = (client.clone(), device.clone());
            CubeTensor::new_contiguous(client, device, [length].into(), handle, tensor_dtype(dtype))
        };
        runs.map(view).collect()
    }

    /// The runs as tensors.
    pub(crate) fn tensors(self, places: &Places) -> Vec<Tensor<1>> {
        self.views(places).into_iter().map(cube::tensor).collect()
    }
}

/// Pieces of a tensor of `numel` elements, with where each begins, copied into one buffer.
pub(crate) fn join(
    port: &Port,
    dtype: DType,
    numel: usize,
    pieces: Vec<(usize, CubeTensor)>,
) -> Result<CubeTensor, KernelError> {
    let places = port.places(vec![numel]);
    let whole = Arena::empty(port, &places, dtype);
    for (to, piece) in pieces {
        let from = cube::elements_of(piece)?;
        let row = MoveRow { from: 0, to, len: from.len() };
        move_rows(&port.client, &from, &whole.buffer(&places)?, &[row], 1.0, Onto::Put)?;
    }
    Ok(whole.views(&places).swap_remove(0))
}

/// The buffer in which all pieces lie at their places, if nobody else has it; the pieces if not.
fn in_place(
    port: &Port,
    places: &Places,
    dtype: DType,
    mut pieces: Vec<Content>,
) -> Result<Arena, Vec<Content>> {
    let size = dtype.size() as u64;
    let mut buffer = None;
    let is_placed = pieces.iter().zip(&places.starts).all(|(piece, &start)| match piece {
        Content::Host(_) => false,
        Content::Device(tensor) => {
            let (handle, found) = (&tensor.handle, &tensor.dtype);
            let id = handle.memory.descriptor().id;
            *buffer.get_or_insert(id) == id
                && *found == tensor_dtype(dtype)
                && handle.size() == places.total as u64 * size
                && handle.offset_start.unwrap_or(0) == start as u64 * size
        }
    });
    let last = if is_placed { pieces.pop() } else { None };
    let Some(Content::Device(last)) = last else { return Err(pieces) };
    let CubeTensor { mut handle, .. } = *last;
    // Handles are what is counted: with one alone, nobody else has another.
    drop(pieces);
    (handle.offset_start, handle.offset_end) = (None, None);
    let arena = Arena { port: port.clone(), handle, dtype };
    if arena.handle.can_mut() {
        Ok(arena)
    } else {
        Err(arena.views(places).into_iter().map(|view| Content::Device(Box::new(view))).collect())
    }
}
