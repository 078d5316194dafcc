//! Adagrad.

use super::error::{HyperParameterError, NOT_NEGATIVE, in_range};
use super::kernel::Rule;
use super::{StateSpec, Update, WeightDecay};
use crate::simd::Lanes;

/// Adagrad: Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011, with a learning rate that may fall.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Adagrad {
    /// How fast the learning rate falls, by `1 / (1 + (step - 1) * lr_decay)`: finite, at least 0.
    pub lr_decay: f64,
    /// What sums of squares begin with: finite, at least 0.
    pub initial_accumulator: f64,
    /// Added to the divisor: finite, at least 0.
    pub epsilon: f64,
    /// How parameters are drawn towards zero.
    pub weight_decay: WeightDecay,
}

impl Default for Adagrad {
    /// PyTorch's defaults.
    fn default() -> Self {
        Self { lr_decay: 0.0, initial_accumulator: 0.0, epsilon: 1e-10, weight_decay: WeightDecay::None }
    }
}

impl Adagrad {
    pub(super) fn states(&self) -> [StateSpec; 1] {
        [StateSpec { name: "sum", initial: self.initial_accumulator as f32 }]
    }

    pub(super) fn validate(&self) -> Result<(), HyperParameterError> {
        in_range("lr_decay", self.lr_decay, NOT_NEGATIVE)?;
        in_range("initial_accumulator", self.initial_accumulator, NOT_NEGATIVE)?;
        in_range("epsilon", self.epsilon, NOT_NEGATIVE)?;
        self.weight_decay.validate()
    }

    /// The rule of one update, and the size of its step.
    pub(super) fn rule(&self, update: Update) -> (AdagradRule, f64) {
        let slowed = 1.0 + (update.step - 1) as f64 * self.lr_decay;
        (AdagradRule { epsilon: self.epsilon as f32 }, update.lr / slowed)
    }
}

/// The numbers of one of Adagrad's updates:
///
/// ```text
/// sum = mul_add(gradient, gradient, sum)
/// direction = gradient / (sqrt(sum) + epsilon)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradRule {
    /// Added to the divisor.
    pub epsilon: f32,
}

impl Rule<1> for AdagradRule {
    #[inline(always)]
    fn direction<L: Lanes>(
        &self,
        lanes: L,
        gradient: L::Floats,
        [sum]: [L::Floats; 1],
    ) -> (L::Floats, [L::Floats; 1]) {
        let sum = lanes.mul_add(gradient, gradient, sum);
        let divisor = lanes.add(lanes.sqrt(sum), lanes.splat(self.epsilon));
        (lanes.div(gradient, divisor), [sum])
    }
}
