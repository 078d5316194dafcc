//! Kernels rendered as CUDA C++ and compiled to PTX, where there is no GPU and no CUDA toolkit.

mod device;
mod kernels;
mod nvrtc;

use cubecl::client::Client;
use cubecl::prelude::*;
use device::render;

/// Turing, Ampere, Hopper: the oldest that NVIDIA's compilers still know, the one that is rendered for, and one that is
/// compiled for by its own features.
const CAPABILITIES: [&str; 3] = ["75", "80", "90a"];

/// Compiles everything that `work` launches, and returns the kernels' names, each once.
fn compile(
    device: u16,
    memory: device::Memory,
    capabilities: &[&str],
    work: impl FnOnce(&Client),
) -> Vec<&'static str> {
    let rendered = render(device, memory, work);
    for (source, name) in &rendered {
        for capability in capabilities {
            let ptx = nvrtc::ptx(source, capability)
                .unwrap_or_else(|log| panic!("{name} for sm_{capability}:\n{log}\n{source}"));
            assert!(ptx.contains(".visible .entry"), "{name} for sm_{capability} has no entry:\n{ptx}");
        }
    }
    let mut names: Vec<_> = rendered.into_values().collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cube(launch)]
fn add<F: Float>(values: &mut [F], other: &[F]) {
    if ABSOLUTE_POS < values.len() {
        values[ABSOLUTE_POS] += other[ABSOLUTE_POS];
    }
}

fn launch_add<F: Float + CubeElement>(client: &Client) {
    let (values, other) = (client.empty(64), client.empty(64));
    let argument = |handle| {
        // SAFETY: nothing runs.
        unsafe { BufferArg::from_raw_parts(handle, 64 / size_of::<F>()) }
    };
    add::launch::<F>(client, CubeCount::new_single(), CubeDim::new_1d(32), argument(values), argument(other));
}

#[test]
fn a_kernel_of_every_float_compiles() {
    let zeros = |len| vec![0; len];
    let names = compile(0, zeros, &CAPABILITIES, |client| {
        launch_add::<f32>(client);
        launch_add::<half::f16>(client);
        launch_add::<half::bf16>(client);
        launch_add::<f64>(client);
    });
    assert_eq!(names.len(), 4, "{names:?}");
}

#[test]
fn a_wrong_source_is_told_with_the_compilers_words() {
    let error = nvrtc::ptx("__global__ void wrong() { unknown(); }", "80").unwrap_err();
    assert!(error.contains("identifier \"unknown\" is undefined"), "{error}");
}
