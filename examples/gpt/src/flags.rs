//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Trains a byte-level GPT with its state sharded over ranks.
///
/// Ranks are threads of this process, unless a launcher (zero-run, torchrun, srun, mpirun) starts one process for
/// each, or --processes does.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Flags {
    /// TOML file with [model], [train] and [zero] sections; every key has a default.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How many ranks there are. A launcher says so itself.
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Makes each rank a process of its own.
    #[arg(long, conflicts_with = "plain")]
    pub(crate) processes: bool,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stage: Option<u8>,
    /// Optimizer steps.
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<usize>,
    /// Text to train on, a file or a folder; may be repeated. The text files of this workspace by default.
    #[arg(long, value_name = "PATH")]
    pub(crate) corpus: Vec<PathBuf>,
    /// Seed of the initial values and of the order of the data.
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// File for one JSON object per step and line.
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Trains with Burn alone, without ZeRO, for comparison.
    #[arg(long, conflicts_with_all = ["ranks", "stage"])]
    pub(crate) plain: bool,
}
