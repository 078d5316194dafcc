//! `zero-ckpt`: looks at checkpoints, verifies, compares, prunes them, and makes plain weights of them.

use std::io::{self, Write as _, stdout};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use zero_checkpoint::{
    Checkpoint, CheckpointError, ConsolidateOptions, FileLayout, LocalStorage, NameMap, Retention, Summary,
    TiedWeights, consolidate, diff, prune, superfluous, verify,
};
use zero_core::{Bytes, DType};

type Failure = Box<dyn std::error::Error>;

#[derive(Parser)]
#[command(
    name = "zero-ckpt",
    version,
    about = "Looks at checkpoints, verifies, compares, prunes and consolidates them"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Prints what is in a checkpoint.
    Inspect {
        #[command(flatten)]
        which: Which,
        /// Prints its manifest.
        #[arg(long)]
        json: bool,
    },
    /// Reads all of a checkpoint and names all that is wrong with it.
    Verify {
        #[command(flatten)]
        which: Which,
    },
    /// Writes the weights of a checkpoint as plain safetensors.
    ///
    /// Files and their index are as loaders of Hugging Face's expect them. A record of Burn is written by
    /// `write_record` of the crate zero-burn.
    Consolidate {
        #[command(flatten)]
        which: Which,
        /// The folder to make.
        to: PathBuf,
        /// The type of elements; without it, that of the master weights.
        #[arg(long, value_name = "TYPE")]
        dtype: Option<FloatType>,
        /// How linear weights are laid out.
        #[arg(long, value_name = "LAYOUT", default_value = "pytorch")]
        layout: Layout,
        /// A table of names, as JSON: {"published.*.name": "model.*.name", ...}.
        #[arg(long, value_name = "FILE")]
        names: Option<PathBuf>,
        /// Writes tied parameters under each of their names.
        #[arg(long)]
        copy_tied: bool,
        /// The most bytes of tensors in a file: 5GB, 500MB, ...
        #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
        max_file: Bytes,
        /// What may be buffered.
        #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
        buffer: Bytes,
    },
    /// Prints what two checkpoints differ in; fails if they differ.
    Diff {
        /// A checkpoint's folder, or a folder of checkpoints, of which the newest is taken.
        first: PathBuf,
        /// Another one.
        second: PathBuf,
        /// Prints a list of differences as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Removes old checkpoints, but none that is being read.
    ///
    /// Nothing is removed unless one of those to keep is good: its manifest is valid, and its files are there, as long as
    /// they should be. Their content is not read: `verify` does that.
    Prune {
        /// The folder of checkpoints.
        folder: PathBuf,
        /// How many of the newest are kept.
        #[arg(long, value_name = "COUNT")]
        keep: NonZeroUsize,
        /// Besides, those whose step is a multiple of this are kept.
        #[arg(long, value_name = "STEPS")]
        every: Option<NonZeroU64>,
        /// Only prints what would be removed.
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Args)]
struct Which {
    /// A checkpoint's folder, or a folder of checkpoints, of which the newest is taken.
    path: PathBuf,
    /// Of a folder of checkpoints, the one of this step.
    #[arg(long)]
    step: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum FloatType {
    F32,
    Bf16,
    F16,
}

#[derive(Clone, Copy, ValueEnum)]
enum Layout {
    /// As [out, in].
    Pytorch,
    /// As [in, out].
    Burn,
}

fn main() -> ExitCode {
    run(Cli::parse().command).unwrap_or_else(|error| {
        let io: Option<&io::Error> = error.downcast_ref();
        if io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            // Whoever reads has enough: the status that a shell gives to one that is ended by it.
            return ExitCode::from(141);
        }
        eprintln!("error: {error}");
        ExitCode::from(2)
    })
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Inspect { which, json } => inspect(&which.open()?, json),
        Command::Verify { which } => verify_all(&which.open()?),
        Command::Consolidate { which, to, dtype, layout, names, copy_tied, max_file, buffer } => {
            let names = names.map(|path| read_names(&path)).transpose()?.unwrap_or_default();
            let options = ConsolidateOptions {
                dtype: dtype.map(DType::from),
                layout: layout.into(),
                names,
                tied: if copy_tied { TiedWeights::Copied } else { TiedWeights::Noted },
                max_file,
                buffer,
            };
            write_weights(&which.open()?, &to, &options)
        }
        Command::Diff { first, second, json } => compare(&open(&first, None)?, &open(&second, None)?, json),
        Command::Prune { folder, keep, every, dry_run } => {
            if !folder.is_dir() {
                return Err(format!("there is no folder {}; check the path", folder.display()).into());
            }
            let (storage, retention) = (LocalStorage::new(&folder), Retention { last: Some(keep), every });
            let steps = if dry_run { superfluous(&storage, retention) } else { prune(&storage, retention) }?;
            let what = if dry_run { "would be removed" } else { "removed" };
            steps.iter().try_for_each(|step| writeln!(stdout(), "step {step} {what}"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn inspect(checkpoint: &Checkpoint, json: bool) -> Result<ExitCode, Failure> {
    if json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(checkpoint.manifest())?)?;
    } else {
        write!(stdout(), "{}", Summary::of(checkpoint))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn verify_all(checkpoint: &Checkpoint) -> Result<ExitCode, Failure> {
    let bar = bar(checkpoint.manifest().bytes());
    let problems = verify(checkpoint, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    if problems.is_empty() {
        let manifest = checkpoint.manifest();
        let size = Bytes::new(manifest.bytes());
        let (place, files) = (checkpoint.place(), manifest.files.len());
        writeln!(stdout(), "{place} is what was saved: {size} in {files} files")?;
        return Ok(ExitCode::SUCCESS);
    }
    problems.iter().try_for_each(|problem| writeln!(stdout(), "{problem}"))?;
    Ok(ExitCode::FAILURE)
}

fn write_weights(
    checkpoint: &Checkpoint,
    to: &Path,
    options: &ConsolidateOptions,
) -> Result<ExitCode, Failure> {
    // What is read, with each matrix that goes through the buffer several times counted as often.
    let bar = bar(checkpoint
        .manifest()
        .parameters
        .iter()
        .map(|parameter| Bytes::of(parameter.numel(), parameter.values.dtype).get())
        .sum());
    let written = consolidate(checkpoint, to, options, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let size = Bytes::new(written.bytes);
    writeln!(stdout(), "{} tensors, {size}:", written.tensors)?;
    written.files.iter().try_for_each(|file| writeln!(stdout(), "  {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn compare(first: &Checkpoint, second: &Checkpoint, json: bool) -> Result<ExitCode, Failure> {
    let bar = bar(first.manifest().bytes() + second.manifest().bytes());
    let changes = diff(first, second, &mut |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    if json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&changes)?)?;
    } else {
        changes.iter().try_for_each(|change| writeln!(stdout(), "{change}"))?;
    }
    Ok(if changes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Which {
    fn open(&self) -> Result<Checkpoint, Failure> {
        open(&self.path, self.step)
    }
}

fn open(path: &Path, step: Option<u64>) -> Result<Checkpoint, Failure> {
    if let Some(step) = step {
        return Ok(Checkpoint::open(Arc::new(LocalStorage::new(path)), step)?);
    }
    if !path.join("manifest.json").exists() {
        return Ok(Checkpoint::open_latest(Arc::new(LocalStorage::new(path)))?);
    }
    // By its real name: `.` has no name within its parent.
    let path = path.canonicalize()?;
    let name = path.file_name().and_then(|name| name.to_str());
    let (Some(parent), Some(name)) = (path.parent(), name) else {
        return Err(CheckpointError::NoCheckpoint { place: path.display().to_string() }.into());
    };
    Ok(Checkpoint::open_folder(Arc::new(LocalStorage::new(parent)), name)?)
}

fn read_names(path: &Path) -> Result<NameMap, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read the table of names {}: {error}", path.display()))?;
    text.parse().map_err(|error| format!("{}: {error}", path.display()).into())
}

fn bar(bytes: u64) -> ProgressBar {
    let template = "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
    let bar = ProgressBar::new(bytes);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// A number of bytes with a unit, decimal or binary.
fn size(text: &str) -> Result<Bytes, String> {
    let refused = || format!("`{text}` is no size; write 500MB, 2GiB, ...");
    let digits = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(refused()),
    };
    let number: u64 = number.parse().map_err(|_| refused())?;
    number.checked_mul(factor).map(Bytes::new).ok_or_else(refused)
}

impl From<FloatType> for DType {
    fn from(dtype: FloatType) -> Self {
        match dtype {
            FloatType::F32 => Self::F32,
            FloatType::Bf16 => Self::BF16,
            FloatType::F16 => Self::F16,
        }
    }
}

impl From<Layout> for FileLayout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Pytorch => Self::PyTorch,
            Layout::Burn => Self::Burn,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use zero_core::Bytes;

    use super::{Cli, size};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("17", 17), ("2 KiB", 2048), ("5GB", 5_000_000_000), ("256MiB", 256 << 20)] {
            assert_eq!(size(text), Ok(Bytes::new(bytes)), "{text}");
        }
        for text in ["", "GB", "1.5GB", "-1", "5XB", "99999999999GB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
