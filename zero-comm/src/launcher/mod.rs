//! Starts the ranks of a job, ends them together, and says which failed first and why (feature `launcher`).
//!
//! What the program `zero-run` does, for programs that start ranks of their own.
//!
//! - `cli`, `placement`: what is asked for, and which rank runs where.
//! - `environment`, `rendezvous`, `coordinator`: what ranks are told, and where they find each other.
//! - `job`: everything that happens from the first rank's start to the last one's end.
//! - `starter`, `rank`, `process`: one rank and its processes; `remote` is how one on another machine is reached.
//! - `guard`: ends the ranks if this program cannot.
//! - `signals`: what users and schedulers send.
//! - `relay`, `lines`, `printer`: the ranks' output on its way to ours.
//! - `ending`, `memory`, `report`: how ranks ended and which of them was the cause.
//! - `error`: why a job could not be started.

mod cli;
mod coordinator;
mod ending;
mod environment;
mod error;
mod guard;
mod job;
mod lines;
mod memory;
mod placement;
mod printer;
mod process;
mod rank;
mod relay;
mod remote;
mod rendezvous;
mod report;
mod signals;
mod starter;

pub use cli::{LaunchOptions, LaunchOptionsError};
use error::LaunchError;

/// Runs a job to its end, with its output and signals passed through, and gives the exit code of the rank that
/// failed first, or 0. If the ranks cannot be placed on the hosts, that is 2.
///
/// It is meant for a process that does nothing else: it takes over the handling of signals, and waits for
/// processes that its ranks leave behind. What could not be started, or failed, is told on standard error.
pub fn run(options: &LaunchOptions) -> u8 {
    let places = placement::places(options.ranks, &options.hosts, &process::machine_name());
    places.map_err(LaunchError::from).and_then(|places| job::run(options, places)).unwrap_or_else(|error| {
        printer::say(&format!("zero-run: {error}\n"));
        error.exit_code()
    })
}
