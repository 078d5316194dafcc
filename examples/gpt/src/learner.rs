//! What the two ways to train have in common.

use anyhow::Result;
use burn::tensor::{Device, Tensor};
use zero_burn::{MemoryReport, NotFinite, Statistics};

use crate::corpus::Corpus;
use crate::model::Gpt;
use crate::rows::Rows;

/// What one step gave; the same on every rank.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Mean cross-entropy of the global batch, in nats per byte.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub lr: f64,
    /// What the engine tells; `None` with Burn alone.
    pub engine: Option<EngineProgress>,
}

/// What the engine tells of one step. Numbers that differ between ranks are the largest.
#[derive(Clone, Debug)]
pub struct EngineProgress {
    /// Memory.
    pub memory: MemoryReport,
    /// Communication since the last step.
    pub statistics: Statistics,
    /// What losses were multiplied by in backward.
    pub loss_scale: f64,
    /// Whether parameters were updated.
    pub applied: bool,
    /// Why they were not.
    pub not_finite: Option<NotFinite>,
}

/// Trains a model on global batches.
pub trait Learner {
    /// One optimizer step; `step` counts from 0.
    ///
    /// # Errors
    ///
    /// When another rank fails.
    fn step(&mut self, step: usize, corpus: &Corpus) -> Result<Progress>;

    /// Takes note that so many steps have been taken.
    ///
    /// # Errors
    ///
    /// When a checkpoint cannot be written, or another rank fails.
    fn after_step(&mut self, _steps: usize) -> Result<()> {
        Ok(())
    }

    /// Takes note that these were all steps.
    ///
    /// # Errors
    ///
    /// As [`after_step`](Self::after_step).
    fn finish(&mut self, _steps: usize) -> Result<()> {
        Ok(())
    }

    /// Mean cross-entropy of `rows`, in nats per byte, after what goes on beside the steps has ended.
    ///
    /// # Errors
    ///
    /// When another rank, or a disk, fails.
    fn evaluate(&mut self, rows: &Rows) -> Result<f64>;

    /// The model for inference.
    fn model(&self) -> Gpt;
}

/// Decay rates of the moments of AdamW, as usual for language models; PyTorch's default is 0.999 for the second.
pub(crate) const BETAS: [f64; 2] = [0.9, 0.95];
/// What AdamW adds to its denominator.
pub(crate) const EPSILON: f64 = 1e-8;

/// Rows that one forward pass of an evaluation takes.
const EVALUATION_ROWS: usize = 8;

/// The summed cross-entropy of `rows`, in nats per byte times rows.
pub(crate) fn evaluate(model: &Gpt, rows: &Rows, device: &Device) -> f64 {
    let device = device.clone().inner();
    let starts = (0..rows.len()).step_by(EVALUATION_ROWS);
    starts
        .map(|start| {
            let part = rows.slice(start..(start + EVALUATION_ROWS).min(rows.len()));
            let (tokens, targets) = part.tensors(&device);
            scalar(model.loss(tokens, targets)) * part.len() as f64
        })
        .sum()
}

pub(crate) fn scalar(tensor: Tensor<1>) -> f64 {
    f64::from(tensor.into_scalar::<f32>())
}
