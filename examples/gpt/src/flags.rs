//! The command line.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Parser;
use zero_burn::{DType, DeviceKind, Placement, Precision, Tier};

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
    /// DeepSpeed's ds_config.json: stage, precision, batch, optimizer and learning rates come from it.
    #[arg(long, value_name = "FILE", conflicts_with = "plain")]
    pub(crate) deepspeed_config: Option<PathBuf>,
    /// How many ranks there are. A launcher says so itself.
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Makes each rank a process of its own.
    #[arg(long, conflicts_with = "plain")]
    pub(crate) processes: bool,
    /// What to compute on; ranks of one host are dealt out to its devices. All but flex, the CPU, need a feature of that name.
    #[arg(long, value_name = "flex|cuda|rocm|wgpu|vulkan|metal|webgpu")]
    pub(crate) device: Option<DeviceKind>,
    /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stage: Option<u8>,
    /// What layers compute in; f16 comes with a dynamic loss scale.
    #[arg(long, value_name = "f32|bf16|f16", value_parser = dtype)]
    pub(crate) precision: Option<DType>,
    /// Keeps state out of memory: optimizer, gradients or parameters, on the host or in a directory of a fast disk, as in
    /// optimizer=nvme:/mnt/disk or gradients=host; may be repeated.
    #[arg(long, value_name = "WHAT=WHERE", value_parser = offload, conflicts_with = "plain")]
    pub(crate) offload: Vec<(Kind, Placement)>,
    /// Updates parameters beside the next step, which does not see it yet.
    #[arg(long, conflicts_with = "plain")]
    pub(crate) delayed_update: bool,
    /// Rows per step, over all ranks.
    #[arg(long, value_name = "N")]
    pub(crate) batch: Option<usize>,
    /// Backwards per step; each takes an equal part of a rank's rows.
    #[arg(long, value_name = "N")]
    pub(crate) accumulation: Option<usize>,
    /// Keeps no activations of blocks from forward to backward, which computes them again: less memory, one more forward.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// The highest learning rate.
    #[arg(long, value_name = "RATE")]
    pub(crate) lr: Option<f64>,
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
    /// File for a trace of what each rank did when, for chrome://tracing or ui.perfetto.dev.
    #[arg(long, value_name = "FILE", conflicts_with = "plain")]
    pub(crate) trace: Option<PathBuf>,
    /// Folder for checkpoints; the last step is saved in any case.
    #[arg(long, value_name = "DIR", conflicts_with = "plain")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Saves every so many steps, beside training.
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = positive)]
    pub(crate) save_every: Option<NonZeroUsize>,
    /// Keeps so many checkpoints, the newest; all by default.
    #[arg(long, value_name = "K", requires = "checkpoint_dir", value_parser = positive)]
    pub(crate) keep: Option<NonZeroUsize>,
    /// Goes on from the newest checkpoint, if there is one, or from that of a step; ranks, stage and offload may differ from
    /// those that saved it.
    #[arg(long, value_name = "STEP", requires = "checkpoint_dir", num_args = 0..=1, require_equals = true)]
    pub(crate) resume: Option<Option<u64>>,
    /// Trains with Burn alone, without ZeRO, for comparison.
    #[arg(long, conflicts_with_all = ["ranks", "stage"])]
    pub(crate) plain: bool,
}

/// What can be kept out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Optimizer,
    Gradients,
    Parameters,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Optimizer, Self::Gradients, Self::Parameters];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Parameters => "parameters",
        })
    }
}

fn offload(text: &str) -> Result<(Kind, Placement), String> {
    let form = "write WHAT=WHERE, as in optimizer=nvme:/mnt/disk or gradients=host";
    let (what, place) = text.split_once('=').ok_or(form)?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.to_string() == what);
    let kind = kind.ok_or_else(|| format!("there are optimizer, gradients and parameters, not `{what}`"))?;
    let (tier, path) = match place.split_once(':') {
        Some((tier, path)) => (tier, Some(PathBuf::from(path))),
        None => (place, None),
    };
    let found = Tier::ALL.into_iter().find(|known| known.name() == tier);
    let names = || Tier::ALL.map(Tier::name).join(", ");
    let tier = found.ok_or_else(|| format!("there are {}, not `{tier}`", names()))?;
    match (tier, &path) {
        (Tier::Nvme, None) => Err(String::from("name the directory, as in optimizer=nvme:/mnt/disk")),
        (Tier::Device | Tier::Host, Some(_)) => Err(format!("a directory is of no use on the {tier}")),
        _ => Ok((kind, Placement { tier, path, ..Placement::default() })),
    }
}

fn positive(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| String::from("a whole number from 1 on is needed"))
}

fn dtype(name: &str) -> Result<DType, String> {
    let found = Precision::COMPUTE.iter().find(|dtype| dtype.name() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = Precision::COMPUTE.iter().map(|dtype| dtype.name()).collect();
        format!("there are {}", names.join(", "))
    })
}
