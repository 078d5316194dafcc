//! Which device a rank computes on.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use burn::tensor::{Device, DeviceType};
use zero_comm::Communicator;

use crate::ZeroError;

/// What devices are reached through, by the name of its feature in this crate and in Burn.
///
/// ```
/// use zero_burn::{DeviceKind, LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
///
/// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
/// let kind: DeviceKind = "flex".parse()?; // or cuda, where this crate's feature `cuda` is on
/// let zero = Zero::new(ZeroConfig::default(), &comm, kind.device_of_rank(&comm)?)?;
/// # drop(zero);
/// # Ok(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The CPU, by Burn's Flex backend.
    Flex,
    /// NVIDIA's GPUs.
    Cuda,
    /// AMD's GPUs.
    Rocm,
    /// Any GPU that the system's graphics drivers reach.
    Wgpu,
    /// GPUs, or a program that stands for one, with a Vulkan driver.
    Vulkan,
    /// Apple's GPUs.
    Metal,
    /// WebGPU.
    WebGpu,
}

impl DeviceKind {
    /// All of them, whether they are built in or not.
    pub const ALL: [Self; 7] =
        [Self::Flex, Self::Cuda, Self::Rocm, Self::Wgpu, Self::Vulkan, Self::Metal, Self::WebGpu];

    /// The name, which is that of the feature.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
            Self::WebGpu => "webgpu",
        }
    }

    /// The devices of this kind that this process reaches, in their order; none without a driver.
    ///
    /// # Errors
    ///
    /// [`ZeroError::DeviceNotBuilt`] where the feature is off.
    pub fn devices(self) -> Result<Vec<Device>, ZeroError> {
        let found = match self {
            #[cfg(feature = "flex")]
            Self::Flex => DeviceType::Flex,
            #[cfg(feature = "cuda")]
            Self::Cuda => DeviceType::Cuda,
            #[cfg(feature = "rocm")]
            Self::Rocm => DeviceType::Rocm,
            #[cfg(feature = "wgpu")]
            Self::Wgpu => DeviceType::Wgpu,
            #[cfg(feature = "vulkan")]
            Self::Vulkan => DeviceType::Vulkan,
            #[cfg(feature = "metal")]
            Self::Metal => DeviceType::Metal,
            #[cfg(feature = "webgpu")]
            Self::WebGpu => DeviceType::WebGpu,
            #[allow(unreachable_patterns, reason = "with all features, all are built in")]
            _ => return Err(ZeroError::DeviceNotBuilt { kind: self }),
        };
        Ok(Device::enumerate(found).into_vec())
    }

    /// The device of this kind that this rank of `comm` is to take: ranks of one host are dealt out to its devices in order,
    /// be they threads of one process or processes. A process that sees one device alone, because its launcher says so
    /// (`CUDA_VISIBLE_DEVICES`), takes that. Waits for nobody.
    ///
    /// # Errors
    ///
    /// [`ZeroError::DeviceNotBuilt`], [`ZeroError::NoDevice`].
    pub fn device_of_rank(self, comm: &Arc<dyn Communicator>) -> Result<Device, ZeroError> {
        let mut devices = self.devices()?;
        let own = comm.ranks_of_host().iter().position(|rank| *rank == comm.rank()).unwrap_or(0);
        match devices.len() {
            0 => Err(ZeroError::NoDevice { kind: self }),
            count => Ok(devices.swap_remove(own % count)),
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceKind {
    type Err = ZeroError;

    fn from_str(name: &str) -> Result<Self, ZeroError> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| ZeroError::NoSuchDeviceKind { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_found_by_its_name() {
        for kind in DeviceKind::ALL {
            assert_eq!(kind.to_string().parse::<DeviceKind>().unwrap(), kind);
        }
        let error = "gpu".parse::<DeviceKind>().unwrap_err().to_string();
        assert!(error.contains("`gpu`") && error.contains("flex, cuda, rocm"), "{error}");
    }

    #[test]
    #[cfg(not(feature = "metal"))]
    fn a_kind_that_is_not_built_in_is_refused_with_its_feature() {
        let error = DeviceKind::Metal.devices().unwrap_err().to_string();
        assert!(error.contains("feature `metal`"), "{error}");
    }
}
