//! Lion.

use super::error::{BELOW_ONE, HyperParameterError, in_range};
use super::kernel::Rule;
use super::{StateSpec, WeightDecay};
use crate::simd::Lanes;

/// Lion: Chen and others, Symbolic Discovery of Optimization Algorithms, 2023, program 1.
///
/// A parameter whose direction is 0 only decays.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Lion {
    /// How much of the momentum is in the direction: at least 0, less than 1.
    pub beta1: f64,
    /// How much of the momentum stays in a step: at least 0, less than 1.
    pub beta2: f64,
    /// How parameters are drawn towards zero.
    pub weight_decay: WeightDecay,
}

impl Default for Lion {
    /// The paper's betas, no decay.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, weight_decay: WeightDecay::None }
    }
}

impl Lion {
    pub(super) const STATES: [StateSpec; 1] = [StateSpec::zero("exp_avg")];

    pub(super) fn validate(&self) -> Result<(), HyperParameterError> {
        in_range("beta1", self.beta1, BELOW_ONE)?;
        in_range("beta2", self.beta2, BELOW_ONE)?;
        self.weight_decay.validate()
    }

    /// The rule of every update; the size of its step is the learning rate.
    pub(super) fn rule(&self) -> LionRule {
        LionRule { gain1: (1.0 - self.beta1) as f32, gain2: (1.0 - self.beta2) as f32 }
    }
}

/// The numbers of Lion's updates:
///
/// ```text
/// direction = sign(mul_add(gradient - momentum, gain1, momentum))
/// momentum = mul_add(gradient - momentum, gain2, momentum)
/// ```
///
/// The sign of zeros and NaN is what they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionRule {
    /// How much of the gradient is in the direction.
    pub gain1: f32,
    /// How much of the gradient goes into the momentum.
    pub gain2: f32,
}

impl Rule<1> for LionRule {
    #[inline(always)]
    fn direction<L: Lanes>(
        &self,
        lanes: L,
        gradient: L::Floats,
        [momentum]: [L::Floats; 1],
    ) -> (L::Floats, [L::Floats; 1]) {
        let difference = lanes.sub(gradient, momentum);
        let mixed = lanes.mul_add(difference, lanes.splat(self.gain1), momentum);
        let momentum = lanes.mul_add(difference, lanes.splat(self.gain2), momentum);
        (lanes.sign(mixed), [momentum])
    }
}
