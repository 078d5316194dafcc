//! Project tasks: `cargo xtask test` is everything that must hold for a change to land, `cargo xtask bench`
//! runs one benchmark and judges its rows, `cargo xtask lint` checks the project's own rules, `cargo xtask run`
//! starts the ranks of a job.
//!
//! - `test`: runs suites, all of them, and reports; `suite` is what a suite is, `suites` which there are.
//! - `device_checks`: what `test` runs on devices; `device` is which there are, `ranks` how many ranks share them.
//! - `main_job`: the suite that trains the example for a few steps.
//! - `bench`: finds and runs a benchmark; `row` is what it measures.
//! - `lint`: the project's rules.
//! - `run`: builds the launcher and becomes it.
//! - `workspace`, `tee`, `table`, `nearest`: what the above share.

mod bench;
mod device;
mod device_checks;
mod emulation;
mod lint;
mod main_job;
mod nearest;
mod ranks;
mod row;
mod run;
mod suite;
mod suites;
mod table;
mod tee;
mod test;
mod workspace;

use std::env;
#[cfg(unix)]
use std::os::unix::process::CommandExt;
use std::path::Path;
#[cfg(unix)]
use std::process::Command;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use xshell::{Shell, cmd};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Project tasks")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs every suite, cheapest first, and reports on all of them; fails if any failed.
    ///
    /// A suite whose tool is missing is skipped. With CI=true, that is a failure if the project could have
    /// installed the tool. With --device, what runs on devices is run instead, with several numbers of ranks.
    Test(test::Options),
    /// Runs a benchmark, prints what it measured and fails if a row missed its bar.
    Bench(bench::Options),
    /// Checks the project's own rules.
    Lint,
    /// Starts the ranks of a job with this workspace's launcher: -n 4 -- COMMAND; see --help.
    #[command(disable_help_flag = true)]
    Run(run::Options),
}

/// A variable that cargo sets for the programs that it runs. Builds that these start would have it, others would not, and each
/// would build anew what depends on it.
#[cfg(unix)]
const OF_CARGO: &str = "CARGO_MANIFEST_DIR";

fn main() -> ExitCode {
    #[cfg(unix)]
    if env::var_os(OF_CARGO).is_some() {
        let mut again = Command::new(env::args_os().next().unwrap_or_default());
        let error = again.args(env::args_os().skip(1)).env_remove(OF_CARGO).exec();
        eprintln!("error: this program cannot start itself: {error}");
        return ExitCode::FAILURE;
    }
    // Not by returning it from here: what is wrong with a project's file is no place in this program.
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let sh = Shell::new()?;
    let manifest = cmd!(sh, "cargo locate-project --workspace --message-format plain").quiet().read()?;
    sh.change_dir(Path::new(&manifest).parent().context("the workspace's manifest is in no folder")?);
    match cli.task {
        Task::Test(options) => test::run(&sh, &options),
        Task::Bench(options) => bench::run(&sh, &options),
        Task::Lint => lint::run(&sh).map(|()| ExitCode::SUCCESS),
        Task::Run(options) => run::run(&sh, &options),
    }
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;
    use clap::{CommandFactory, Parser};

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_suite_asked_for_by_name_is_not_left_out() {
        let parse = |arguments: &[&str]| Cli::try_parse_from([&["xtask", "test"], arguments].concat());
        for arguments in [&["--fast"][..], &["--only", "main-job"]] {
            assert!(parse(arguments).is_ok(), "{arguments:?}");
        }
        let error = parse(&["--fast", "--only", "main-job"]).err().map(|error| error.kind());
        assert_eq!(error, Some(ErrorKind::ArgumentConflict));
    }

    #[test]
    fn what_is_about_devices_needs_one_named() {
        let parse = |arguments: &[&str]| Cli::try_parse_from([&["xtask"], arguments].concat());
        for arguments in [
            &["test", "--device", "cuda", "--ranks", "all", "--require"][..],
            &["test", "--device", "vulkan", "--ranks", "2"],
            &["bench", "engine", "--device", "cuda", "--json", "rows.json", "--require"],
        ] {
            assert!(parse(arguments).is_ok(), "{arguments:?}");
        }
        for arguments in [
            &["test", "--ranks", "2"][..],
            &["test", "--require"],
            &["test", "--device", "cuda", "--fast"],
            &["test", "--device", "cpu"],
            &["test", "--device", "cuda", "--ranks", "0"],
            &["bench", "engine", "--require"],
        ] {
            assert!(parse(arguments).is_err(), "{arguments:?}");
        }
    }
}
