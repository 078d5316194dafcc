//! What is other on a device that has memory of its own.

#[cfg(feature = "cube")]
use std::sync::Arc;

use zero_comm::CommError;
use zero_core::Bytes;
#[cfg(feature = "cube")]
use zero_core::ParameterIndex;

use crate::ZeroError;
#[cfg(feature = "cube")]
use crate::arena::Port;
#[cfg(feature = "cube")]
use crate::base::updates_on_host;
use crate::engine::Engine;
#[cfg(feature = "cube")]
use crate::engine::lock;
#[cfg(feature = "cube")]
use crate::kernels::KernelError;

impl Engine {
    /// The way to the device where fused optimizers run on it: one of CubeCL, with nothing that has states anywhere else.
    #[cfg(feature = "cube")]
    pub(crate) fn updating_port(&self) -> Option<&Port> {
        self.port.as_ref().filter(|_| !updates_on_host(self.offload()))
    }

    /// Whether tensors are on a device that works by itself, and may fail by itself.
    pub(crate) fn has_device(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.port.is_some();
        #[cfg(not(feature = "cube"))]
        false
    }

    /// What went wrong on the device without a word.
    pub(crate) fn check_device(&self) -> Result<(), ZeroError> {
        if self.has_device() { self.check() } else { Ok(()) }
    }

    /// Waits until this thread, which steps, and the look-ahead have read what they asked devices for: once the ranks agree on a
    /// step, shards change. Other threads have waited already.
    pub(crate) fn settle_reads(&self) -> Result<(), CommError> {
        #[cfg(feature = "cube")]
        if let Some(shown) = &self.transports.shards {
            self.gathers.settle();
            shown.device().settle(&[], "parameters that were read")?;
        }
        Ok(())
    }

    /// Bytes of buckets on the device that fill or are on their way.
    pub(crate) fn buckets_on_device(&self) -> Bytes {
        #[cfg(feature = "cube")]
        return lock(&self.gradients).buckets_on_device(self);
        #[cfg(not(feature = "cube"))]
        Bytes::ZERO
    }

    /// Whether a shard is no part of a replica.
    #[cfg(feature = "cube")]
    pub(crate) fn is_by_itself(&self, parameter: ParameterIndex) -> bool {
        let is_replica = self.held(parameter).whole.is_some() && self.has_windows();
        !is_replica || self.is_mixed()
    }
}

#[cfg(feature = "cube")]
impl From<KernelError> for ZeroError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(Arc::new(error))
    }
}
