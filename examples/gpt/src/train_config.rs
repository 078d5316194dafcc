//! The `[train]` section.

use serde::{Deserialize, Serialize};

/// How to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Ranks: threads of this process, or processes.
    pub ranks: usize,
    /// Optimizer steps.
    pub steps: usize,
    /// Rows per step, over all ranks.
    pub batch: usize,
    /// Backwards per step; each takes an equal part of a rank's rows.
    pub accumulation: usize,
    /// Whether backward computes the activations of each block again, instead of keeping them.
    pub recompute: bool,
    /// The highest learning rate, reached after `warmup` steps and then lowered along a cosine.
    pub lr: f64,
    /// Steps of linear warm-up.
    pub warmup: usize,
    /// AdamW's decoupled weight decay.
    pub weight_decay: f64,
    /// Held-out rows to evaluate on.
    pub held_out_rows: usize,
    /// Bytes of text to generate at the end.
    pub sample: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            ranks: 2,
            steps: 120,
            batch: 8,
            accumulation: 1,
            recompute: false,
            lr: 1e-3,
            warmup: 20,
            weight_decay: 0.1,
            held_out_rows: 32,
            sample: 160,
        }
    }
}
