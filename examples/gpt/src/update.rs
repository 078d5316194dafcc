//! The optimizer of the settings.

use anyhow::{Result, ensure};
use burn::optim::AdamWConfig;
use zero_burn::{
    Adagrad, Adam, DeepSpeedAdam, DeepSpeedOptimizer, Fused, Lion, OptimizerConfig, OptimizerCost, Sgd,
    WeightDecay, ZeroError,
};

use crate::settings::Settings;

/// The optimizer that `settings` ask for.
///
/// # Errors
///
/// For a hyper-parameter that it cannot work with.
pub fn fused(optimizer: &DeepSpeedOptimizer) -> Result<Fused, ZeroError> {
    let l2 = |rate: f64| if rate == 0.0 { WeightDecay::None } else { WeightDecay::L2(rate) };
    let config: OptimizerConfig = match *optimizer {
        DeepSpeedOptimizer::AdamW(numbers) => {
            adam(&numbers, WeightDecay::Decoupled(numbers.weight_decay)).into()
        }
        DeepSpeedOptimizer::Adam(numbers) => adam(&numbers, l2(numbers.weight_decay)).into(),
        DeepSpeedOptimizer::Lion { lr: _, betas, weight_decay } => {
            let weight_decay = WeightDecay::Decoupled(weight_decay);
            Lion { beta1: betas[0], beta2: betas[1], weight_decay }.into()
        }
        DeepSpeedOptimizer::Adagrad { lr: _, lr_decay, eps, weight_decay } => {
            let weight_decay = l2(weight_decay);
            Adagrad { lr_decay, initial_accumulator: 0.0, epsilon: eps, weight_decay }.into()
        }
        DeepSpeedOptimizer::Sgd { lr: _, momentum, dampening, nesterov, weight_decay } => {
            Sgd { momentum, dampening, nesterov, weight_decay: l2(weight_decay) }.into()
        }
    };
    Fused::new(config)
}

const fn adam(numbers: &DeepSpeedAdam, weight_decay: WeightDecay) -> Adam {
    Adam { beta1: numbers.betas[0], beta2: numbers.betas[1], epsilon: numbers.eps, weight_decay }
}

/// Burn's AdamW with these numbers, to train with Burn alone.
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

/// Optimizers hold their numbers in f32.
fn narrow(name: &str, number: f64) -> Result<f32> {
    let narrow = number as f32;
    let is_lost = !narrow.is_finite() || (narrow == 0.0 && number != 0.0);
    ensure!(!is_lost, "`{name}` of the optimizer is {number}, which optimizers, in f32, cannot hold");
    Ok(narrow)
}

fn beta(beta: f64) -> Result<f32> {
    let narrow = narrow("betas", beta)?;
    ensure!(
        (0.0..1.0).contains(&narrow),
        "`betas` of the optimizer has {beta}; in f32, which optimizers take, it must be at least 0 and below 1"
    );
    Ok(narrow)
}
