//! The suites of `cargo xtask test`.

use crate::suite::{Action, Requirement, Suite};
use crate::{lint, main_job};

const NEXTEST: Requirement =
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

/// All features but `mpi`, which needs a library of the machine.
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
    Suite::new("tests", Action::cargo(&["nextest", "run", "--workspace", "--features", FEATURES]))
        .needs(NEXTEST)
        .or_else(Action::cargo(&[
            "test",
            "--workspace",
            "--features",
            FEATURES,
            "--lib",
            "--bins",
            "--tests",
            "--no-fail-fast",
        ])),
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

    use super::{MPI_PROBE, SUITES};

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
    fn every_suite_has_a_name_of_its_own() {
        let names: BTreeSet<_> = SUITES.iter().map(|suite| suite.name).collect();
        assert_eq!(names.len(), SUITES.len());
    }
}
