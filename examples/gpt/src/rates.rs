//! The learning rate of each step.

use std::f64::consts::PI;

use zero_burn::DeepSpeedScheduler;

use crate::train_config::TrainConfig;

/// How the learning rate goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rates {
    /// Up to `train.lr` in a line, then down to a tenth of it along a cosine.
    Cosine,
    /// Always this one.
    Constant(f64),
    /// As a `ds_config.json` says.
    DeepSpeed(DeepSpeedScheduler),
}

impl Rates {
    /// The rate of a step, counted from 0; steps that were skipped do not count.
    pub fn at(&self, step: u64, train: &TrainConfig) -> f64 {
        match self {
            Self::Constant(lr) => *lr,
            Self::DeepSpeed(scheduler) => scheduler.lr(step),
            Self::Cosine => {
                let (step, warmup) = (step as f64, train.warmup as f64);
                if step < warmup {
                    return train.lr * (step + 1.0) / warmup;
                }
                let done = (step - warmup) / (train.steps as f64 - warmup).max(1.0);
                train.lr * (0.1 + 0.45 * (1.0 + (PI * done.min(1.0)).cos()))
            }
        }
    }
}
