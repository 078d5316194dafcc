//! The suites of `cargo xtask test`.

use crate::suite::{Action, Requirement, Suite};
use crate::{emulation, lint, main_job};

pub(crate) const NEXTEST: Requirement =
    Requirement { what: "cargo-nextest", probe: &["cargo", "nextest", "--version"], installable: false };

/// `setup` and not `--version`: it also needs the standard library's source.
const MIRI: Requirement = Requirement {
    what: "Miri on a nightly",
    probe: &["cargo", "+nightly", "miri", "setup"],
    installable: false,
};

const DENY: Requirement =
    Requirement { what: "cargo-deny", probe: &["cargo", "deny", "--version"], installable: false };

/// The build needs the headers, and libclang to read them; the tests start jobs.
const MPI: Requirement = Requirement {
    what: "MPI (mpirun, mpicc and libclang)",
    probe: &["sh", "-c", MPI_PROBE],
    installable: true,
};

/// libclang is looked for where the crate that reads the headers looks first: where LIBCLANG_PATH says, where LLVM is,
/// where libraries are.
const MPI_PROBE: &str = "mpirun --version && mpicc --version && {
    test -e \"$LIBCLANG_PATH\" ||
    ls \"$(llvm-config --libdir)\" | grep -E '^libclang(-[0-9.]+)?\\.(so|dylib)' ||
    PATH=\"$PATH:/sbin\" ldconfig -p | grep -E '\\blibclang(-[0-9.]+)?\\.so'
}";

/// PyTorch is larger than all the rest together.
const TORCHRUN: Requirement =
    Requirement { what: "torchrun (PyTorch)", probe: &["torchrun", "--help"], installable: false };

/// A cross compiler for its linker and libraries, and an emulator. On 64-bit ARM itself, `tests` does the same.
const AARCH64: Requirement = Requirement {
    what: "64-bit ARM (qemu-aarch64, aarch64-linux-gnu-gcc and the Rust target)",
    probe: &["sh", "-c", AARCH64_PROBE],
    installable: true,
};

const AARCH64_PROBE: &str = "qemu-aarch64 --version && aarch64-linux-gnu-gcc --version &&
    test -d /usr/aarch64-linux-gnu/lib &&
    test -d \"$(rustc --print target-libdir --target aarch64-unknown-linux-gnu)\"";

/// The Python that `PYTHON` names, or `python3`: as the tests ask.
const SAFETENSORS: Requirement = Requirement {
    what: "Python with numpy and safetensors",
    probe: &["sh", "-c", "${PYTHON:-python3} -c 'import numpy, safetensors'"],
    installable: false,
};

/// As [`SAFETENSORS`].
const PYTORCH: Requirement = Requirement {
    what: "Python with PyTorch and safetensors",
    probe: &["sh", "-c", "${PYTHON:-python3} -c 'import torch, safetensors'"],
    installable: false,
};

/// A loader, and a driver that it finds: one in software is enough.
const VULKAN: Requirement = Requirement {
    what: "a Vulkan driver and its loader",
    probe: &["sh", "-c", VULKAN_PROBE],
    installable: true,
};

const VULKAN_PROBE: &str = "PATH=\"$PATH:/sbin\" ldconfig -p | grep -F 'libvulkan.so.1' && {
    test -n \"$VK_DRIVER_FILES$VK_ICD_FILENAMES\" ||
    ls /usr/share/vulkan/icd.d /etc/vulkan/icd.d | grep -E '\\.json$'
}";

/// NVIDIA's compiler and headers, as `zero-burn/tests/cuda_source/nvrtc.rs` looks for them.
const NVRTC: Requirement = Requirement {
    what: "NVRTC with CUDA's headers (ZERO_NVRTC, as .ci/run sets it)",
    probe: &["sh", "-c", NVRTC_PROBE],
    installable: true,
};

const NVRTC_PROBE: &str = "test -e \"$ZERO_NVRTC/cuda_nvrtc/lib/libnvrtc.so.12\" &&
    test -e \"$ZERO_NVRTC/cuda_runtime/include/cuda_fp16.h\"";

const LINKER: Requirement = Requirement {
    what: "a C compiler and nm",
    probe: &["sh", "-c", "cc --version && nm --version"],
    installable: true,
};

/// For devices; not by SPIR-V, on which Mesa 22's driver in software crashes. `cuda-source` adds to the features of what lies
/// below Burn, so that with it everywhere that is built once.
const DEVICE: &str = "gpt/wgpu,zero-burn/cuda-source";
const DEVICE_FUSION: &str = "wgpu,cuda-source,fusion,autotune";

const DEVICE_NEXTEST: &[&str] = &device_tests(["nextest", "run", "--no-fail-fast"], DEVICE);
const DEVICE_TEST: &[&str] = &device_tests(["test", "--quiet", "--no-fail-fast"], DEVICE);

/// Two packages have tests on devices, and tests of what is there with devices alone.
const fn device_tests(runner: [&'static str; 3], features: &'static str) -> [&'static str; 16] {
    let [a, b, c] = runner;
    [
        a,
        b,
        c,
        "-p",
        "zero-burn",
        "-p",
        "gpt",
        "--features",
        features,
        "--lib",
        "--test",
        "devices",
        "--test",
        "device_processes",
        "--test",
        "kernels",
    ]
}

const FUSION_NEXTEST: &[&str] = &fusion_tests(["nextest", "run", "--no-fail-fast"]);
const FUSION_TEST: &[&str] = &fusion_tests(["test", "--quiet", "--no-fail-fast"]);

/// With states on the device and on the host, and with blocks that are run again; more of them take long in software, where
/// `autotune` measures every kernel.
const fn fusion_tests(runner: [&'static str; 3]) -> [&'static str; 13] {
    let [a, b, c] = runner;
    let (first, second, third) = ("a_run_saved", "a_delayed", "blocks_that");
    [a, b, c, "-p", "zero-burn", "--features", DEVICE_FUSION, "--test", "devices", "--", first, second, third]
}

/// Where backtraces are on, CubeCL captures them though nothing has failed: a sixth of the time of tests on devices.
pub(crate) const NO_BACKTRACES: (&str, &str) = ("RUST_LIB_BACKTRACE", "0");

/// What runs on devices, on those that Vulkan has.
const fn on_vulkan(
    name: &'static str,
    env: &'static [(&'static str, &'static str)],
    nextest: &'static [&'static str],
    test: &'static [&'static str],
) -> Suite {
    Suite::new(name, Action::cargo(nextest).with_env(env))
        .needs(VULKAN)
        .without(NEXTEST, Action::cargo(test).with_env(env))
}

/// What no other suite checks.
const TOOLKITS: &str =
    "zero-burn/cuda,zero-burn/rocm,zero-burn/cuda-source,zero-comm/nccl,zero-comm/conformance";

/// All features but those of devices, which build much, and `mpi`, which needs a library of the machine.
const FEATURES: &str = "zero-comm/conformance,zero-comm/fuzzing,zero-comm/launcher,zero-comm/nccl,\
    zero-checkpoint/cli,zero-checkpoint/fuzzing,zero-checkpoint/object_store,zero-burn/launcher";

/// All suites, cheapest first, those that need a tool of their own last. One more is one entry more.
pub(crate) const SUITES: &[Suite] = &[
    Suite::new("format", Action::cargo(&["fmt", "--all", "--check"])),
    Suite::new("lint", Action::Call("the project's own rules", lint::run)),
    Suite::new(
        "clippy",
        Action::cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--features",
            FEATURES,
            "--",
            "-D",
            "warnings",
        ]),
    ),
    Suite::new(
        "docs",
        Action::cargo(&["doc", "--workspace", "--no-deps", "--features", FEATURES])
            .with_env(&[("RUSTDOCFLAGS", "-D warnings")]),
    ),
    Suite::new("tests", Action::cargo(&["nextest", "run", "--workspace", "--features", FEATURES])).without(
        NEXTEST,
        Action::cargo(&[
            "test",
            "--workspace",
            "--features",
            FEATURES,
            "--lib",
            "--bins",
            "--tests",
            "--no-fail-fast",
        ]),
    ),
    Suite::new(
        "doctests",
        Action::cargo(&["test", "--workspace", "--features", FEATURES, "--doc", "--no-fail-fast"]),
    ),
    // One after the other: each test starts jobs of several processes.
    Suite::new(
        "mpi",
        Action::cargo(&[
            "test",
            "-p",
            "zero-comm",
            "--features",
            "mpi,conformance",
            "--lib",
            "--test",
            "mpi",
            "--no-fail-fast",
            "--",
            "mpi::",
            "ranks_that",
            "--test-threads=1",
        ]),
    )
    .needs(MPI),
    Suite::new(
        "mpi-clippy",
        Action::cargo(&[
            "clippy",
            "-p",
            "zero-comm",
            "--all-targets",
            "--features",
            "mpi,conformance",
            "--",
            "-D",
            "warnings",
        ]),
    )
    .needs(MPI),
    // The test runs in any case, but passes where the launcher is missing.
    Suite::new("torchrun", Action::cargo(&["test", "-p", "zero-comm", "--test", "launchers", "torchrun"]))
        .needs(TORCHRUN),
    Suite::new(
        "neon",
        Action::cargo(&[
            "test",
            "-p",
            "zero-offload",
            "--target",
            "aarch64-unknown-linux-gnu",
            "--test",
            "instruction_sets",
            "--test",
            "optimizer",
            "--test",
            "squares",
            "--no-fail-fast",
        ])
        .with_env(&[
            ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"),
            ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", "qemu-aarch64 -L /usr/aarch64-linux-gnu"),
        ]),
    )
    .needs(AARCH64),
    Suite::new(
        "safetensors",
        Action::cargo(&["test", "-p", "zero-checkpoint", "--test", "python", "--", "--include-ignored"]),
    )
    .needs(SAFETENSORS),
    Suite::new(
        "pytorch",
        Action::cargo(&["test", "-p", "gpt", "--test", "pytorch", "--", "--include-ignored"]),
    )
    .needs(PYTORCH),
    on_vulkan("devices", &[("ZERO_DEVICE", "wgpu"), NO_BACKTRACES], DEVICE_NEXTEST, DEVICE_TEST),
    on_vulkan(
        "devices-fusion",
        &[("ZERO_DEVICE", "wgpu"), ("ZERO_RANKS", "2"), NO_BACKTRACES],
        FUSION_NEXTEST,
        FUSION_TEST,
    ),
    Suite::new(
        "cuda-source",
        Action::cargo(&[
            "test",
            "-p",
            "zero-burn",
            "-p",
            "gpt",
            "--features",
            DEVICE,
            "--test",
            "cuda_source",
        ]),
    )
    .needs(NVRTC),
    // As for documentation, build scripts leave out what needs the toolkits of NVIDIA and AMD, and LLVM.
    Suite::new(
        "cuda-check",
        Action::cargo(&[
            "clippy",
            "-p",
            "zero-burn",
            "-p",
            "zero-comm",
            "-p",
            "gpt",
            "--all-targets",
            "--features",
            TOOLKITS,
            "--",
            "-D",
            "warnings",
        ])
        .with_env(&[("DOCS_RS", "1")]),
    ),
    Suite::new("cuda-emulated", Action::Call("code for CUDA on an emulated driver", emulation::run))
        .needs(LINKER),
    Suite::new("main-job", Action::Call("a few steps of the GPT example", main_job::run)).slow(),
    Suite::new(
        "miri",
        Action::cargo(&[
            "+nightly",
            "miri",
            "test",
            "-p",
            "zero-offload",
            "-p",
            "zero-comm",
            "--lib",
            // By name: other tests are about more values and more ranks than Miri has time for.
            "--test",
            "pool",
            "--test",
            "memory",
            "--",
            // What these are about, sockets, shared memory and processes, Miri does not have.
            "--skip",
            "control::",
            "--skip",
            "environment::",
            "--skip",
            "network::",
            // Files past the page cache neither.
            "--skip",
            "store::tests::",
            // Of the pool of threads under them, Miri says that it breaks the rules of stacked borrows.
            "--skip",
            "workers::tests::",
            // And these have no unsafe code, but many cases.
            "--skip",
            "flight::",
            "--skip",
            "failure::",
            "--skip",
            "last_words::",
            "--skip",
            "text::",
            "--skip",
            "faulty::",
            "--skip",
            "throttled::",
            "--skip",
            "work::",
            "--skip",
            "process::",
            "--skip",
            "tcp::",
        ])
        // Property tests look for the folder of their past failures, and every case takes its time.
        .with_env(&[("MIRIFLAGS", "-Zmiri-disable-isolation"), ("PROPTEST_CASES", "4")]),
    )
    .needs(MIRI),
    // Without advisories: those change while the project does not, and come over the network.
    Suite::new("deny", Action::cargo(&["deny", "check", "bans", "licenses", "sources"])).needs(DENY),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::Command;

    use xshell::Shell;

    use super::{MPI_PROBE, NVRTC_PROBE, SUITES, VULKAN_PROBE};

    /// Writes a script that prints `text`.
    fn tool(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\necho '{text}'\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn mpi_is_there_only_with_libclang() {
        let folder = Shell::new().unwrap().create_temp_dir().unwrap();
        let folder = folder.path();
        let probe = |libclang: &str| {
            let path = format!("{}:/usr/bin:/bin", folder.display());
            let mut command = Command::new("/bin/sh");
            command.args(["-c", MPI_PROBE]).env_clear().env("PATH", path).env("LIBCLANG_PATH", libclang);
            command.output().unwrap().status.success()
        };
        for name in ["mpirun", "mpicc"] {
            tool(folder, name, "Open MPI");
        }
        let (empty, full) = (folder.join("empty"), folder.join("full"));
        fs::create_dir(&empty).unwrap();
        fs::create_dir(&full).unwrap();
        fs::write(full.join("libclang-18.so.18"), "").unwrap();
        let libraries = |llvm: &Path, cached: &str| {
            tool(folder, "llvm-config", llvm.to_str().unwrap());
            tool(folder, "ldconfig", cached);
        };
        libraries(&empty, "libclang-cpp.so.18 (libc6,x86-64) => /lib/libclang-cpp.so.18");
        assert!(!probe(""));
        assert!(probe(full.to_str().unwrap()));
        libraries(&full, "");
        assert!(probe(""));
        for cached in [
            "libclang-18.so.18 (libc6,x86-64) => /lib/libclang-18.so.18",
            "\tlibclang.so.1 => /lib/libclang.so.1",
        ] {
            libraries(&empty, cached);
            assert!(probe(""), "{cached}");
        }
    }

    #[test]
    fn nvrtc_is_there_only_with_its_headers() {
        let folder = Shell::new().unwrap().create_temp_dir().unwrap();
        let probe = |folder: &Path| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", NVRTC_PROBE]).env("ZERO_NVRTC", folder).output().unwrap().status.success()
        };
        let folder = folder.path();
        for file in ["cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include/cuda_fp16.h"] {
            assert!(!probe(folder), "without {file}");
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert!(probe(folder));
        assert!(!probe(Path::new("")));
    }

    #[test]
    fn vulkan_is_there_only_with_its_loader_and_a_driver() {
        let folder = Shell::new().unwrap().create_temp_dir().unwrap();
        let folder = folder.path();
        let probe = |driver: &str| {
            let path = format!("{}:/usr/bin:/bin", folder.display());
            let mut command = Command::new("/bin/sh");
            command.args(["-c", VULKAN_PROBE]).env_clear().env("PATH", path).env("VK_DRIVER_FILES", driver);
            command.output().unwrap().status.success()
        };
        tool(folder, "ls", "");
        tool(folder, "ldconfig", "libvulkan_lvp.so (libc6,x86-64) => /lib/libvulkan_lvp.so");
        assert!(!probe("driver.json"));
        tool(folder, "ldconfig", "libvulkan.so.1 (libc6,x86-64) => /lib/libvulkan.so.1");
        assert!(probe("driver.json"));
        assert!(!probe(""));
        tool(folder, "ls", "lvp_icd.x86_64.json");
        assert!(probe(""));
    }

    #[test]
    fn every_suite_has_a_name_of_its_own() {
        let names: BTreeSet<_> = SUITES.iter().map(|suite| suite.name).collect();
        assert_eq!(names.len(), SUITES.len());
    }
}
