//! Lists the devices that this build can train on besides the CPU, one JSON object a line; `cargo xtask test --device`
//! reads it.

use burn::tensor::{Device, DeviceType};
use serde_json::json;

fn main() {
    let kinds: &[(&str, DeviceType)] = &[
        #[cfg(feature = "cuda")]
        ("cuda", DeviceType::Cuda),
        #[cfg(feature = "rocm")]
        ("rocm", DeviceType::Rocm),
        #[cfg(feature = "wgpu")]
        ("wgpu", DeviceType::Wgpu),
        #[cfg(feature = "vulkan")]
        ("vulkan", DeviceType::Vulkan),
        #[cfg(feature = "metal")]
        ("metal", DeviceType::Metal),
    ];
    for (kind, filter) in kinds {
        for device in Device::enumerate(filter.clone()) {
            let name = device.identity().map_or_else(|| format!("{device:?}"), |identity| identity.name);
            println!("{}", json!({"kind": kind, "name": name}));
        }
    }
}
