//! The emulated driver and NCCL, compiled.
#![allow(dead_code, unreachable_pub, reason = "each user has its own part")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// The variable for what goes wrong with the driver.
pub const FAULT: &str = "EMULATED_CUDA_FAULT";
/// The variable for how many devices there are.
pub const DEVICES: &str = "EMULATED_CUDA_DEVICES";
/// The variable for where ranks send each other files: in a folder of memory, best.
pub const MESSAGES: &str = "EMULATED_NCCL_FOLDER";

/// A folder with the emulated libraries, for `LD_LIBRARY_PATH`, in `scratch`.
pub fn libraries(scratch: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../zero-comm/tests/emulation");
    let folder = scratch.join("emulation");
    let library = folder.join("libcuda.so.1");
    let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let newest = ["emulator.rs", "nccl.rs"].iter().map(|name| changed(&sources.join(name))).max();
    if changed(&library) > newest.flatten() {
        return folder;
    }
    fs::create_dir_all(&folder).unwrap();
    // Others may do the same at the same time.
    let new = folder.join(format!("new-{}", process::id()));
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut compiler = Command::new(rustc);
    compiler.args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-D", "warnings", "-o"]);
    let compiled = compiler.arg(&new).arg(sources.join("emulator.rs")).status().unwrap();
    assert!(compiled.success(), "the emulator does not compile");
    drop(symlink("libcuda.so.1", folder.join("libnccl.so.2")));
    fs::rename(new, library).unwrap();
    folder
}
