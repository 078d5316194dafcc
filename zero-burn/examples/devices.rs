//! Lists the devices that this build can train on besides the CPU, one JSON object a line; `cargo xtask test --device`
//! reads it.

use serde_json::json;
use zero_burn::DeviceKind;

fn main() {
    for kind in DeviceKind::ALL.into_iter().filter(|kind| *kind != DeviceKind::Flex) {
        // An error says that the kind is not built in.
        for device in kind.devices().unwrap_or_default() {
            let name = device.identity().map_or_else(|| format!("{device:?}"), |identity| identity.name);
            println!("{}", json!({"kind": kind.name(), "name": name}));
        }
    }
}
