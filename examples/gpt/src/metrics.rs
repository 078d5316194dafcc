//! One JSON object per step and line.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use tempfile::NamedTempFile;
use zero_burn::{DType, Statistics};

use crate::learner::Progress;

/// What is written of one step. Numbers that differ between ranks are those of the largest, one by one. What Burn alone
/// does not have is null.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Record {
    step: usize,
    /// Nats per byte.
    loss: f64,
    grad_norm: f64,
    lr: f64,
    tokens_per_second: f64,
    /// What layers compute in.
    precision: &'static str,
    /// What losses were multiplied by in backward.
    loss_scale: Option<f64>,
    /// Whether a gradient was not finite, so that nothing was updated.
    skipped: bool,
    parameter_bytes: Option<u64>,
    gradient_bytes: Option<u64>,
    optimizer_bytes: Option<u64>,
    /// The most that gathered parameters took at once.
    gathered_peak_bytes: Option<u64>,
    /// Bytes of parameters that a rank took from others since the last step.
    gathered_bytes: Option<u64>,
    /// How long that took, beside compute or not.
    gather_seconds: Option<f64>,
    /// How long compute waited for it.
    gather_exposed_seconds: Option<f64>,
    /// Bytes of gradients that a rank gave to others.
    reduced_bytes: Option<u64>,
    reduce_seconds: Option<f64>,
    reduce_exposed_seconds: Option<f64>,
    /// Times that a layer found a parameter gathered when it asked for it, and times that it did not.
    lookahead_hits: Option<u64>,
    lookahead_misses: Option<u64>,
    /// Bytes that were read from a disk and written to it.
    offloaded_bytes: Option<u64>,
    /// How long that took, updates in between included.
    offload_seconds: Option<f64>,
    /// The quotient; 0 where nothing is on a disk.
    offload_gb_per_second: Option<f64>,
}

impl Record {
    /// The record of `step`, counted from 1.
    pub fn new(step: usize, progress: &Progress, precision: DType, tokens_per_second: f64) -> Self {
        let engine = progress.engine.as_ref();
        let state = engine.map(|engine| engine.memory.state);
        let statistics = engine.map(|engine| engine.statistics);
        let seconds = |of: fn(Statistics) -> Duration| statistics.map(|all| of(all).as_secs_f64());
        Self {
            step,
            loss: progress.loss,
            grad_norm: progress.grad_norm,
            lr: progress.lr,
            tokens_per_second,
            precision: precision.name(),
            loss_scale: engine.map(|engine| engine.loss_scale),
            skipped: engine.is_some_and(|engine| !engine.applied),
            parameter_bytes: state.map(|state| state.parameters.get()),
            gradient_bytes: state.map(|state| state.gradients.get()),
            optimizer_bytes: state.map(|state| state.optimizer.get()),
            gathered_peak_bytes: engine.map(|engine| engine.memory.gathered_peak.get()),
            gathered_bytes: statistics.map(|all| all.gathered.get()),
            gather_seconds: seconds(|all| all.gather_time),
            gather_exposed_seconds: seconds(|all| all.gather_exposed),
            reduced_bytes: statistics.map(|all| all.reduced.get()),
            reduce_seconds: seconds(|all| all.reduce_time),
            reduce_exposed_seconds: seconds(|all| all.reduce_exposed),
            lookahead_hits: statistics.map(|all| all.lookahead_hits),
            lookahead_misses: statistics.map(|all| all.lookahead_misses),
            offloaded_bytes: statistics.map(|all| all.offloaded.get()),
            offload_seconds: seconds(|all| all.offload_time),
            offload_gb_per_second: statistics.map(|all| match all.offload_time.as_secs_f64() {
                0.0 => 0.0,
                seconds => all.offloaded.get() as f64 / seconds / 1e9,
            }),
        }
    }
}

/// The open file, or nothing where no metrics were asked for.
#[derive(Debug)]
pub struct Metrics(Option<Open>);

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: File,
    /// Whether a run before this one may have written to it.
    resumes: bool,
}

impl Metrics {
    /// Makes the file, or opens the one that a run before this has made if this one `resumes` it.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn open(path: Option<&Path>, resumes: bool) -> Result<Self> {
        let open = |path: &Path| {
            // What is no file has no lines to keep.
            let resumes = resumes && (path.is_file() || !path.exists());
            let mut options = OpenOptions::new();
            options.read(resumes).write(true).create(true).truncate(!resumes);
            let file = options.open(path).with_context(|| write_failed(path))?;
            Ok::<_, anyhow::Error>(Open { path: path.to_owned(), file, resumes })
        };
        Ok(Self(path.map(open).transpose()?))
    }

    /// Keeps the lines of the first `taken` steps, to go on after them; a line that was cut off goes.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written.
    pub fn keep(&mut self, taken: usize) -> Result<()> {
        let Some(Open { path, file, resumes: true }) = &mut self.0 else { return Ok(()) };
        let mut text = String::new();
        file.read_to_string(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
        let is_kept = |line: &&str| {
            let record: Option<serde_json::Value> = serde_json::from_str(line).ok();
            record.and_then(|record| record["step"].as_u64()).is_some_and(|step| step <= taken as u64)
        };
        let kept: String = text.lines().filter(is_kept).flat_map(|line| [line, "\n"]).collect();
        let mut replace = || {
            // Whoever kills the run finds the old file or the new one.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let mut new = NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            new.write_all(kept.as_bytes())?;
            *file = new.persist(&*path)?;
            Ok::<_, std::io::Error>(())
        };
        if kept == text { Ok(()) } else { replace().with_context(|| write_failed(path)) }
    }

    /// Appends one line.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let Some(Open { path, file, .. }) = &mut self.0 else { return Ok(()) };
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        file.write_all(&line).with_context(|| write_failed(path))
    }
}

fn write_failed(path: &Path) -> String {
    format!("cannot write metrics to {}", path.display())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use zero_burn::DType;

    use super::Record;
    use crate::learner::Progress;

    #[test]
    fn the_documentation_has_every_key_and_no_other() {
        let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gpt.md")).unwrap();
        let section = text.split("\n## ").find(|section| section.starts_with("`--metrics FILE`")).unwrap();
        let rows = section.lines().filter(|line| line.starts_with("| `"));
        let names = rows.flat_map(|row| row.split('|').nth(1).unwrap_or("").split('`').skip(1).step_by(2));
        let documented: BTreeSet<String> = names.map(str::to_owned).collect();

        let progress = Progress { loss: 1.0, grad_norm: 1.0, lr: 1.0, engine: None };
        let record = serde_json::to_value(Record::new(1, &progress, DType::F32, 1.0)).unwrap();
        let written: BTreeSet<String> = record.as_object().unwrap().keys().cloned().collect();
        assert_eq!(documented, written);
    }
}
