//! Where tensors lie on a CUDA device, and copies of them there.

use std::any::Any;
use std::fmt;

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;
use cubecl_server::runtime::Runtime;
use zero_comm::{CommError, DeviceCopier, DeviceCopy, NcclError};

use crate::rank_device::RankDevice;

/// A tensor's memory. For as long as this is held, the tensor lies there and nothing else does.
pub(super) struct HeldTensor {
    pub(super) address: u64,
    memory: Box<dyn Any + Send>,
}

impl HeldTensor {
    /// Holds a tensor of the device. What this thread gives the device from now on, a wait included, comes after the tensor's
    /// allocation by any thread; what other threads wrote to it since has to be waited for by who gives the tensor.
    pub(super) fn of(tensor: &CubeTensor, device: &RankDevice, label: &str) -> Result<Self, CommError> {
        let resource = tensor.client.get_resource::<<CudaRuntime as Runtime>::Server>(tensor.handle.clone());
        let resource = resource.map_err(|error| device.fail(label, error))?;
        Ok(Self { address: resource.resource().ptr, memory: Box::new(resource) })
    }

    /// Never gives the memory back: something may still use it.
    pub(super) fn forget(self) {
        std::mem::forget(self.memory);
    }
}

/// Copies to or from tensors that are held, when the device has done what this thread gave it.
pub(super) fn copy(
    copier: &DeviceCopier,
    device: &RankDevice,
    held: Vec<HeldTensor>,
    copies: &[DeviceCopy],
    label: &str,
) -> Result<(), CommError> {
    device.settle(&[], label)?;
    // SAFETY: callers made sure of the lengths; all that was to be done with tensors before is done, and they are held
    // until the copies are done, or for good. Windows are never freed, and who reads one finds out whether it was written
    // meanwhile.
    let copied = unsafe { copier.copy(copies, &*device.comm, label) };
    copied.map_err(|error| {
        held.into_iter().for_each(HeldTensor::forget);
        match error {
            NcclError::Comm(error) => error,
            error => device.fail(label, error),
        }
    })
}

impl fmt::Debug for HeldTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldTensor").field("address", &self.address).finish_non_exhaustive()
    }
}
