//! What the two ways to train have in common.

use anyhow::Result;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use zero_burn::MemoryReport;

use crate::corpus::Corpus;
use crate::model::Gpt;
use crate::rows::Rows;
use crate::settings::Settings;

/// What one step gave; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Mean cross-entropy of the global batch, in nats per byte.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Memory of the largest rank; `None` where nothing measures it.
    pub memory: Option<MemoryReport>,
}

/// Trains a model on global batches.
pub trait Learner {
    /// One optimizer step; `step` counts from 0.
    ///
    /// # Errors
    ///
    /// When another rank fails.
    fn step(&mut self, step: usize, corpus: &Corpus) -> Result<Progress>;

    /// Mean cross-entropy of `rows`, in nats per byte.
    ///
    /// # Errors
    ///
    /// When another rank fails.
    fn evaluate(&mut self, rows: &Rows) -> Result<f64>;

    /// The model for inference.
    fn model(&self) -> Gpt;
}

/// Burn's AdamW with PyTorch's usual numbers for language models.
pub fn optimizer(settings: &Settings) -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(settings.train.weight_decay)
}

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
