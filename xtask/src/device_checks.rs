//! `cargo xtask test --device`: what is tested on devices, with several numbers of ranks.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use xshell::Shell;

use crate::device::{Devices, Kind};
use crate::main_job;
use crate::ranks::Ranks;
use crate::suite::{Verdict, judge};
use crate::suites::{NEXTEST, NO_BACKTRACES};
use crate::table::{Align, Table};
use crate::test::seconds;
use crate::workspace::Workspace;

/// A part of what is tested.
struct Check {
    name: &'static str,
    what: What,
    /// Run once for each number of ranks; the tests of others choose their own.
    by_ranks: bool,
}

enum What {
    /// A test binary; it finds the kind of device in `ZERO_DEVICE` and the ranks in `ZERO_RANKS`.
    Tests { package: &'static str, test: &'static str, features: &'static str },
    /// As [`What::Tests`], between CUDA devices.
    Nccl { package: &'static str, test: &'static str, features: &'static str },
    /// The tests of a library itself, some of which are about devices.
    Library { package: &'static str },
    /// A few steps of the GPT example.
    Job,
}

const CHECKS: &[Check] = &[
    Check {
        name: "conformance",
        what: What::Tests { package: "zero-comm", test: "conformance", features: "conformance" },
        by_ranks: false,
    },
    Check {
        name: "nccl",
        what: What::Nccl { package: "zero-comm", test: "nccl", features: "nccl,conformance" },
        by_ranks: false,
    },
    Check {
        name: "kernels",
        what: What::Tests { package: "zero-burn", test: "kernels", features: "" },
        by_ranks: false,
    },
    Check {
        name: "engine",
        what: What::Tests { package: "zero-burn", test: "devices", features: "" },
        by_ranks: true,
    },
    Check { name: "transports", what: What::Library { package: "zero-burn" }, by_ranks: false },
    Check {
        name: "processes",
        what: What::Tests { package: "zero-burn", test: "device_processes", features: "" },
        by_ranks: true,
    },
    Check { name: "main-job", what: What::Job, by_ranks: true },
];

/// A check with a number of ranks, or why it is not run.
struct Step {
    check: &'static Check,
    ranks: Option<usize>,
    skip: Option<Skip>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Skip {
    /// It has no meaning for this kind of device.
    Foreign(&'static str),
    /// Something is missing that could be there.
    Missing(String),
}

impl Skip {
    fn verdict(&self, require: bool) -> Verdict {
        match self {
            Self::Foreign(why) => Verdict::Skipped((*why).to_owned()),
            Self::Missing(why) if require => Verdict::Failed(why.clone()),
            Self::Missing(why) => Verdict::Skipped(why.clone()),
        }
    }
}

pub(crate) fn run(sh: &Shell, kind: Kind, ranks: Ranks, require: bool) -> anyhow::Result<ExitCode> {
    let devices = Devices::find(sh, kind)?;
    let workspace = Workspace::load(sh)?;
    let has = |package: &str, test: &str| {
        let package = workspace.packages.iter().find(|found| found.name == package);
        package.is_some_and(|package| package.has_test(test))
    };
    let steps = plan(kind, &devices, ranks, has);
    let nextest = NEXTEST.is_met(sh);

    let mut results = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let started = Instant::now();
        let verdict = match &step.skip {
            Some(skip) => skip.verdict(require),
            None => {
                println!("\n==> [{}/{}] {} on {}", index + 1, steps.len(), step.check.name, kind.name());
                step.run(sh, kind, nextest)
            }
        };
        results.push((step, verdict, started.elapsed()));
    }

    println!();
    for (index, name) in devices.names.iter().enumerate() {
        println!("{}:{index} is {name}", kind.name());
    }
    if let Some(absence) = devices.absence(kind) {
        println!("{absence}\n");
    }
    let failed = results.iter().any(|(_, verdict, _)| matches!(verdict, Verdict::Failed(_)));
    println!("{}", table(kind, &results));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What is to be run, and what not and why; `has` tells which test binaries packages have.
fn plan(kind: Kind, devices: &Devices, ranks: Ranks, has: impl Fn(&str, &str) -> bool) -> Vec<Step> {
    let counts: Vec<_> = ranks.counts(devices).into_iter().map(Some).collect();
    let absent = devices.names.is_empty().then(|| Skip::Missing(format!("no {} device", kind.name())));
    let mut steps = Vec::new();
    for check in CHECKS {
        let foreign = check.what.foreign(kind);
        let skip = foreign.or_else(|| absent.clone()).or_else(|| check.what.missing(devices, &has));
        // One line tells as much as many.
        let ranks = if check.by_ranks && skip.is_none() { &counts[..] } else { &[None] };
        steps.extend(ranks.iter().map(|&ranks| Step { check, ranks, skip: skip.clone() }));
    }
    steps
}

impl What {
    fn foreign(&self, kind: Kind) -> Option<Skip> {
        let is_foreign = matches!(self, Self::Nccl { .. }) && kind != Kind::Cuda;
        is_foreign.then_some(Skip::Foreign("NCCL connects CUDA devices alone"))
    }

    /// What is missing even where there is a device.
    fn missing(&self, devices: &Devices, has: impl Fn(&str, &str) -> bool) -> Option<Skip> {
        let missing = match *self {
            Self::Nccl { package, test, .. } | Self::Tests { package, test, .. } if !has(package, test) => {
                Some(format!("{package} has no test '{test}'"))
            }
            Self::Nccl { .. } => devices.missing("nccl").map(str::to_owned),
            _ => None,
        };
        missing.map(Skip::Missing)
    }
}

impl Step {
    fn test(&self, sh: &Shell, kind: Kind, cargo: Vec<&str>) -> Verdict {
        let mut command = sh.cmd("cargo").args(cargo).env("ZERO_DEVICE", kind.name()).envs([NO_BACKTRACES]);
        if let Some(ranks) = self.ranks {
            command = command.env("ZERO_RANKS", ranks.to_string());
        }
        println!("    {command}");
        ran_something(judge(Command::from(command)))
    }

    fn run(&self, sh: &Shell, kind: Kind, nextest: bool) -> Verdict {
        match self.check.what {
            What::Tests { package, test, features } | What::Nccl { package, test, features } => {
                // What knows Burn knows the kinds of devices; the rest runs on the host, or on CUDA's devices.
                let features = if features.is_empty() { kind.name() } else { features };
                self.test(sh, kind, tests(nextest, package, &["--test", test], features))
            }
            What::Library { package } => {
                self.test(sh, kind, tests(nextest, package, &["--lib"], kind.name()))
            }
            What::Job => {
                let ranks = self.ranks.unwrap_or(1).to_string();
                let example = ["--device", kind.name(), "--ranks", &ranks];
                match main_job::train(sh, &["--features", kind.name()], &example) {
                    Ok(()) => Verdict::Passed,
                    Err(error) => Verdict::Failed(format!("{error:#}")),
                }
            }
        }
    }
}

/// Cargo's arguments for a test binary. One test at a time: what others hold on a device is not theirs to measure.
fn tests<'a>(nextest: bool, package: &'a str, target: &[&'a str], features: &'a str) -> Vec<&'a str> {
    let what = [&["-p", package, "--features", features], target].concat();
    if nextest {
        [&["nextest", "run", "--test-threads", "1"], &what[..]].concat()
    } else {
        [&["test", "--no-fail-fast"], &what[..], &["--", "--test-threads=1"]].concat()
    }
}

/// A test binary in which no test ran has shown nothing.
fn ran_something((verdict, summaries): (Verdict, Vec<String>)) -> Verdict {
    if verdict == Verdict::Passed && summaries.is_empty() {
        Verdict::Failed("no test ran".to_owned())
    } else {
        verdict
    }
}

fn table(kind: Kind, results: &[(&Step, Verdict, Duration)]) -> Table<6> {
    let mut table = Table::new([
        ("check", Align::Left),
        ("device", Align::Left),
        ("ranks", Align::Right),
        ("result", Align::Left),
        ("seconds", Align::Right),
        ("why", Align::Left),
    ]);
    for (step, verdict, took) in results {
        table.push([
            step.check.name.to_owned(),
            kind.name().to_owned(),
            step.ranks.map_or_else(|| "-".to_owned(), |ranks| ranks.to_string()),
            verdict.word().to_owned(),
            seconds(*took),
            verdict.why().to_owned(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Devices, Kind, Ranks, Skip, Step, Verdict, plan, ran_something, table, tests};

    fn devices(names: &[&str], missing: &[(&str, &str)]) -> Devices {
        let missing = missing.iter().map(|&(what, why)| (what.to_owned(), why.to_owned()));
        Devices { names: names.iter().map(|&name| name.to_owned()).collect(), missing: missing.collect() }
    }

    fn shown(kind: Kind, steps: &[Step], require: bool) -> String {
        let verdict = |step: &Step| step.skip.as_ref().map_or(Verdict::Passed, |skip| skip.verdict(require));
        let results: Vec<_> =
            steps.iter().map(|step| (step, verdict(step), Duration::from_millis(250))).collect();
        table(kind, &results).to_string()
    }

    #[test]
    fn without_a_device_all_is_skipped_and_the_table_says_why() {
        let devices = devices(&[], &[("cuda", "no driver")]);
        let steps = plan(Kind::Cuda, &devices, Ranks::All, |_, _| false);
        let expected = "\
check        device  ranks  result   seconds  why
-----------  ------  -----  -------  -------  --------------
conformance  cuda        -  skipped      0.2  no cuda device
nccl         cuda        -  skipped      0.2  no cuda device
kernels      cuda        -  skipped      0.2  no cuda device
engine       cuda        -  skipped      0.2  no cuda device
transports   cuda        -  skipped      0.2  no cuda device
processes    cuda        -  skipped      0.2  no cuda device
main-job     cuda        -  skipped      0.2  no cuda device
";
        assert_eq!(shown(Kind::Cuda, &steps, false), expected);
        let required = shown(Kind::Cuda, &steps, true);
        assert_eq!(required.matches("FAILED").count(), steps.len(), "{required}");
    }

    #[test]
    fn ranks_grow_to_one_for_each_device() {
        let devices = devices(&["A GPU", "A GPU"], &[("nccl", "no libnccl.so.2")]);
        let steps = plan(Kind::Cuda, &devices, Ranks::All, |_, _| true);
        let expected = "\
check        device  ranks  result   seconds  why
-----------  ------  -----  -------  -------  ---------------
conformance  cuda        -  passed       0.2
nccl         cuda        -  skipped      0.2  no libnccl.so.2
kernels      cuda        -  passed       0.2
engine       cuda        1  passed       0.2
engine       cuda        2  passed       0.2
transports   cuda        -  passed       0.2
processes    cuda        1  passed       0.2
processes    cuda        2  passed       0.2
main-job     cuda        1  passed       0.2
main-job     cuda        2  passed       0.2
";
        assert_eq!(shown(Kind::Cuda, &steps, false), expected);
    }

    #[test]
    fn what_is_foreign_to_a_device_is_never_required() {
        let devices = devices(&["llvmpipe"], &[]);
        let steps = plan(Kind::Vulkan, &devices, "2".parse().unwrap(), |_, test| test != "kernels");
        let skips: Vec<_> =
            steps.iter().filter_map(|step| Some((step.check.name, step.skip.clone()?))).collect();
        assert_eq!(
            skips,
            [
                ("nccl", Skip::Foreign("NCCL connects CUDA devices alone")),
                ("kernels", Skip::Missing("zero-burn has no test 'kernels'".to_owned())),
            ]
        );
        assert!(matches!(skips[0].1.verdict(true), Verdict::Skipped(_)));
        assert!(matches!(skips[1].1.verdict(true), Verdict::Failed(_)));
        assert!(matches!(skips[1].1.verdict(false), Verdict::Skipped(_)));
    }

    #[test]
    fn tests_on_a_device_run_one_after_the_other() {
        let typed = |nextest| tests(nextest, "zero-burn", &["--test", "devices"], "cuda").join(" ");
        assert_eq!(typed(true), "nextest run --test-threads 1 -p zero-burn --features cuda --test devices");
        assert_eq!(
            typed(false),
            "test --no-fail-fast -p zero-burn --features cuda --test devices -- --test-threads=1"
        );
    }

    #[test]
    fn no_test_is_no_pass() {
        let ran = ["test result: ok. 1 passed; 0 failed".to_owned()].to_vec();
        assert_eq!(ran_something((Verdict::Passed, ran)), Verdict::Passed);
        assert_eq!(ran_something((Verdict::Passed, vec![])), Verdict::Failed("no test ran".to_owned()));
    }
}
