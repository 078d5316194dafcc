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

/// The build needs the headers, the tests start jobs.
const MPI: Requirement = Requirement {
    what: "MPI (mpirun and mpicc)",
    probe: &["sh", "-c", "mpirun --version && mpicc --version"],
    installable: true,
};

/// PyTorch is larger than all the rest together.
const TORCHRUN: Requirement =
    Requirement { what: "torchrun (PyTorch)", probe: &["torchrun", "--help"], installable: false };

/// All features but `mpi`, which needs a library of the machine.
const FEATURES: &str =
    "zero-comm/conformance,zero-comm/fuzzing,zero-comm/launcher,zero-comm/nccl,zero-burn/launcher";

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

    use super::SUITES;

    #[test]
    fn every_suite_has_a_name_of_its_own() {
        let names: BTreeSet<_> = SUITES.iter().map(|suite| suite.name).collect();
        assert_eq!(names.len(), SUITES.len());
    }
}
