//! Starts the ranks of a job: see `zero-run --help`.

use std::process::ExitCode;

use clap::Parser;
use zero_comm::launcher::{LaunchOptions, run};

fn main() -> ExitCode {
    ExitCode::from(run(&LaunchOptions::parse()))
}
