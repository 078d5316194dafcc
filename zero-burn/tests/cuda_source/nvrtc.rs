//! NVIDIA's compiler from CUDA C++ to PTX, which needs no GPU.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};
use libloading::Library;

/// Where the headers are, once the library has been loaded: in `ZERO_NVRTC`, the folder `nvidia` of NVIDIA's Python
/// packages `nvidia-cuda-nvrtc-cu12` and `nvidia-cuda-runtime-cu12`.
fn include() -> &'static Path {
    static INCLUDE: OnceLock<PathBuf> = OnceLock::new();
    INCLUDE.get_or_init(|| {
        let folder = PathBuf::from(env::var_os("ZERO_NVRTC").expect("ZERO_NVRTC names no folder"));
        let path = folder.join("cuda_nvrtc/lib/libnvrtc.so.12");
        // SAFETY: NVRTC's initializers ask nothing of their callers.
        let library = unsafe { Library::new(&path) };
        // Kept, so that the same is found by its name.
        std::mem::forget(library.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        folder.join("cuda_runtime/include")
    })
}

/// The PTX of `source` for a compute capability such as `80` or `90a`, with the options that `cubecl-cuda` gives.
pub(crate) fn ptx(source: &str, capability: &str) -> Result<String, String> {
    let options = CompileOptions {
        include_paths: vec![include().to_string_lossy().into_owned()],
        options: vec![format!("--gpu-architecture=sm_{capability}"), "-lineinfo".to_owned()],
        ..Default::default()
    };
    match compile_ptx_with_opts(source, options) {
        Ok(ptx) => Ok(ptx.to_src()),
        Err(CompileError::CompileError { log, .. }) => Err(log.to_string_lossy().into_owned()),
        Err(error) => Err(format!("{error:?}")),
    }
}
