//! Lists the CUDA devices of this process, one JSON object a line, and what is missing to use them. Asks the driver
//! alone, so that it builds quickly; `cargo xtask test --device cuda` reads it.

use serde_json::json;
use zero_comm::NcclCommunicator;
use zero_comm::cudarc::driver::CudaContext;

fn main() {
    let name = |device| CudaContext::new(device).and_then(|context| context.name());
    match NcclCommunicator::device_count() {
        Ok(0) => println!("{}", json!({"missing": "cuda", "why": "the driver knows no device"})),
        Ok(count) => (0..count).for_each(|device| {
            let name = name(device).unwrap_or_else(|error| format!("a device that does not work: {error}"));
            println!("{}", json!({"kind": "cuda", "name": name}));
        }),
        Err(error) => println!("{}", json!({"missing": "cuda", "why": error.to_string()})),
    }
    if let Err(error) = NcclCommunicator::library_version() {
        println!("{}", json!({"missing": "nccl", "why": error.to_string()}));
    }
}
