//! One JSON object per step and line.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::learner::Progress;

/// What is written of one step. Bytes are those of the largest rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Record {
    step: usize,
    /// Nats per byte.
    loss: f64,
    grad_norm: f64,
    lr: f64,
    tokens_per_second: f64,
    parameter_bytes: Option<u64>,
    gradient_bytes: Option<u64>,
    optimizer_bytes: Option<u64>,
    gathered_peak_bytes: Option<u64>,
}

impl Record {
    /// The record of `step`, counted from 1.
    pub fn new(step: usize, progress: &Progress, lr: f64, tokens_per_second: f64) -> Self {
        let memory = progress.memory;
        Self {
            step,
            loss: progress.loss,
            grad_norm: progress.grad_norm,
            lr,
            tokens_per_second,
            parameter_bytes: memory.map(|memory| memory.state.parameters.get()),
            gradient_bytes: memory.map(|memory| memory.state.gradients.get()),
            optimizer_bytes: memory.map(|memory| memory.state.optimizer.get()),
            gathered_peak_bytes: memory.map(|memory| memory.gathered_peak.get()),
        }
    }
}

/// The open file, or nothing where no metrics were asked for.
#[derive(Debug)]
pub struct Metrics(Option<(PathBuf, File)>);

impl Metrics {
    /// Creates the file.
    ///
    /// # Errors
    ///
    /// When it cannot be created.
    pub fn create(path: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| {
            let file =
                File::create(path).with_context(|| format!("cannot write metrics to {}", path.display()))?;
            Ok::<_, anyhow::Error>((path.to_owned(), file))
        };
        Ok(Self(path.map(open).transpose()?))
    }

    /// Appends one line.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let Some((path, file)) = &mut self.0 else { return Ok(()) };
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        file.write_all(&line).with_context(|| format!("cannot write metrics to {}", path.display()))
    }
}
