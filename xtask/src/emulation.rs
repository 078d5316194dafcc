//! The suite that runs code for CUDA devices where there are none, on an emulated driver and NCCL.
//!
//! The emulator launches no kernels, so what is tested moves memory alone. CubeCL wants an LLVM when it is built, which is not
//! fetched for that: the program is linked without, and a library of functions that end it stands for what is missing.

#[path = "../../zero-comm/tests/emulation/mod.rs"]
mod emulator;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::tee;

/// What cargo says of something that it has built.
#[derive(Deserialize)]
struct Built {
    executable: Option<PathBuf>,
}

pub(crate) fn run(sh: &Shell) -> anyhow::Result<()> {
    let program = build(sh)?;
    let scratch = sh.create_temp_dir()?;
    let libraries = emulator::libraries(scratch.path());
    let missing = stand_in(sh, &program, scratch.path())?;
    for (devices, fault) in [("1", ""), ("2", ""), ("3", ""), ("2", "apart")] {
        let mut tests = Command::new(&program);
        tests.args(["cuda::", "--nocapture"]).current_dir(sh.current_dir());
        tests.env("LD_LIBRARY_PATH", &libraries).env("LD_PRELOAD", &missing);
        tests.env(emulator::DEVICES, devices).env(emulator::FAULT, fault);
        tests.env(emulator::MESSAGES, scratch.path());
        println!("    {devices} emulated devices, {fault:?}: {} cuda::", program.display());
        let outcome = tee::stream(tests)?;
        ensure!(outcome.status.success(), "on {devices} devices the tests ended with {}", outcome.status);
        let said = |what| outcome.lines.iter().any(|line| line.contains(what));
        ensure!(!said("skipped: ") && !said(" 0 passed"), "on {devices} devices, no test ran");
    }
    Ok(())
}

/// Builds the tests of the library; gives their program.
fn build(sh: &Shell) -> anyhow::Result<PathBuf> {
    // By `cuda-cpp`, CubeCL compiles kernels with NVRTC, and nothing of LLVM is ever called.
    let features = "cuda,cubecl/cuda-cpp";
    let link = "link-arg=-Wl,--unresolved-symbols=ignore-all";
    let build = cmd!(sh, "cargo rustc -p zero-burn --lib --profile test --features {features}");
    let build = build.args(["--message-format", "json-render-diagnostics", "--", "-C", link]);
    // As for documentation, build scripts do not fetch LLVM.
    let messages = build.env("DOCS_RS", "1").read()?;
    let built = messages.lines().filter_map(|line| serde_json::from_str::<Built>(line).ok());
    built.filter_map(|built| built.executable).next_back().context("cargo built no program")
}

/// A library of what a program lacks.
fn stand_in(sh: &Shell, program: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let symbols = cmd!(sh, "nm -D --undefined-only {program}").read()?;
    let (source, library) = (folder.join("missing.c"), folder.join("libmissing.so"));
    let functions = symbols.lines().filter_map(function);
    sh.write_file(&source, functions.collect::<String>())?;
    cmd!(sh, "cc -shared -fPIC -o {library} {source}").run()?;
    Ok(library)
}

/// A function that ends the program, for one of LLVM's in a line of `nm`.
fn function(line: &str) -> Option<String> {
    let symbol = line.split_whitespace().last()?.split('@').next()?;
    let is_llvm = symbol.starts_with("LLVM") || symbol.starts_with("cubecl_");
    is_llvm.then(|| format!("void {symbol}(void) {{ __builtin_trap(); }}\n"))
}

#[cfg(test)]
mod tests {
    use super::function;

    #[test]
    fn only_what_is_of_llvm_has_a_stand_in() {
        let stand_in = "void LLVMAddCase(void) { __builtin_trap(); }\n";
        assert_eq!(function("                 U LLVMAddCase").as_deref(), Some(stand_in));
        assert_eq!(function("                 U memcpy@GLIBC_2.14"), None);
        assert_eq!(function(""), None);
    }
}
