//! Where tensors lie on a CUDA device.

use std::any::Any;
use std::fmt;

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;
use cubecl_server::runtime::Runtime;
use zero_comm::CommError;

use crate::rank_device::RankDevice;

/// A tensor's memory. For as long as this is held, the tensor lies there and nothing else does.
pub(super) struct HeldTensor {
    pub(super) address: u64,
    memory: Box<dyn Any + Send>,
}

impl HeldTensor {
    /// Holds a tensor of any device; `device` is the rank's, whose world hears of errors. What this thread gives the tensor's
    /// device from now on, a wait included, comes after the tensor's allocation by any thread; what other threads wrote to it
    /// since has to be waited for by who gives the tensor.
    pub(super) fn of(tensor: &CubeTensor, device: &RankDevice, label: &str) -> Result<Self, CommError> {
        let resource = tensor.client.get_resource::<<CudaRuntime as Runtime>::Server>(tensor.handle.clone());
        let resource = resource
            .map_err(|error| device.fail(label, format!("memory of {:?}: {error}", tensor.device)))?;
        Ok(Self { address: resource.resource().ptr, memory: Box::new(resource) })
    }

    /// Never gives the memory back: something may still use it.
    pub(super) fn forget(self) {
        std::mem::forget(self.memory);
    }
}

impl fmt::Debug for HeldTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldTensor").field("address", &self.address).finish_non_exhaustive()
    }
}
