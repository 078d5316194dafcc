//! Burn's optimizers behind one type.

use std::fmt::Debug;

use anyhow::{Result, ensure};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdaGradConfig, AdamConfig, AdamWConfig, LionConfig, Optimizer, SgdConfig};
use zero_burn::{
    DeepSpeedAdam, DeepSpeedOptimizer, OptimizerCost, StepOutcome, Zero, ZeroError, ZeroOptimizer,
};

use crate::model::Gpt;
use crate::settings::Settings;

/// What updates the model.
pub trait Update: Debug {
    /// As [`ZeroOptimizer::step`].
    ///
    /// # Errors
    ///
    /// As [`ZeroOptimizer::step`].
    fn step(&mut self, lr: f64, model: &mut Gpt) -> Result<StepOutcome, ZeroError>;

    /// Steps that were not skipped.
    fn steps(&self) -> u64;
}

impl<O: Optimizer> Update for ZeroOptimizer<O> {
    fn step(&mut self, lr: f64, model: &mut Gpt) -> Result<StepOutcome, ZeroError> {
        Self::step(self, lr, model)
    }

    fn steps(&self) -> u64 {
        Self::steps(self)
    }
}

/// The optimizer that `settings` ask for.
///
/// # Errors
///
/// For a number that Burn's optimizer cannot hold, and as [`Zero::optimizer`].
pub fn optimizer(zero: &Zero, settings: &Settings) -> Result<Box<dyn Update>> {
    let decay = |weight_decay: f64| -> Result<_> {
        Ok((weight_decay != 0.0)
            .then(|| narrow("weight_decay", weight_decay))
            .transpose()?
            .map(WeightDecayConfig::new))
    };
    Ok(match settings.optimizer {
        DeepSpeedOptimizer::AdamW(numbers) => Box::new(zero.optimizer(adamw(&numbers)?.build())?),
        DeepSpeedOptimizer::Adam(DeepSpeedAdam { lr: _, betas, eps, weight_decay }) => {
            let config = AdamConfig::new()
                .with_beta_1(beta(betas[0])?)
                .with_beta_2(beta(betas[1])?)
                .with_epsilon(narrow("eps", eps)?)
                .with_weight_decay(decay(weight_decay)?);
            Box::new(zero.optimizer(config.build())?)
        }
        DeepSpeedOptimizer::Lion { lr: _, betas, weight_decay } => {
            let config = LionConfig::new()
                .with_beta_1(beta(betas[0])?)
                .with_beta_2(beta(betas[1])?)
                .with_weight_decay(narrow("weight_decay", weight_decay)?);
            Box::new(zero.optimizer(config.build())?)
        }
        DeepSpeedOptimizer::Adagrad { lr: _, lr_decay, eps, weight_decay } => {
            let config = AdaGradConfig::new()
                .with_lr_decay(lr_decay)
                .with_epsilon(narrow("eps", eps)?)
                .with_weight_decay(decay(weight_decay)?);
            Box::new(zero.optimizer(config.build())?)
        }
        DeepSpeedOptimizer::Sgd { lr: _, momentum, dampening, nesterov, weight_decay } => {
            let momentum = (momentum != 0.0).then_some(MomentumConfig { momentum, dampening, nesterov });
            let config = SgdConfig::new().with_momentum(momentum).with_weight_decay(decay(weight_decay)?);
            Box::new(zero.optimizer(config.build())?)
        }
    })
}

/// Burn's AdamW with these numbers.
///
/// # Errors
///
/// For a number that it cannot hold.
pub(crate) fn adamw(numbers: &DeepSpeedAdam) -> Result<AdamWConfig> {
    Ok(AdamWConfig::new()
        .with_beta_1(beta(numbers.betas[0])?)
        .with_beta_2(beta(numbers.betas[1])?)
        .with_epsilon(narrow("eps", numbers.eps)?)
        .with_weight_decay(narrow("weight_decay", numbers.weight_decay)?))
}

/// What the optimizer that `settings` ask for keeps.
pub fn cost(settings: &Settings) -> OptimizerCost {
    match settings.optimizer {
        DeepSpeedOptimizer::Adam(_) | DeepSpeedOptimizer::AdamW(_) => OptimizerCost::ADAMW,
        DeepSpeedOptimizer::Lion { .. } => OptimizerCost::LION,
        DeepSpeedOptimizer::Adagrad { .. } => OptimizerCost { bytes_per_element: 4 },
        DeepSpeedOptimizer::Sgd { momentum: 0.0, .. } => OptimizerCost::SGD,
        DeepSpeedOptimizer::Sgd { .. } => OptimizerCost::MOMENTUM,
    }
}

/// Burn's optimizers hold their numbers in f32.
fn narrow(name: &str, number: f64) -> Result<f32> {
    let narrow = number as f32;
    let is_lost = !narrow.is_finite() || (narrow == 0.0 && number != 0.0);
    ensure!(!is_lost, "`{name}` of the optimizer is {number}, which Burn's optimizers, in f32, cannot hold");
    Ok(narrow)
}

fn beta(beta: f64) -> Result<f32> {
    let narrow = narrow("betas", beta)?;
    ensure!(
        (0.0..1.0).contains(&narrow),
        "`betas` of the optimizer has {beta}; in f32, which Burn's optimizers take, it must be at least 0 and below 1"
    );
    Ok(narrow)
}
