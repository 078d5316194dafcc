//! Adam and AdamW.

use super::error::{BELOW_ONE, HyperParameterError, NOT_NEGATIVE, in_range};
use super::kernel::Rule;
use super::{StateSpec, Update, WeightDecay};
use crate::simd::Lanes;

/// Adam, and AdamW by its [`WeightDecay`].
///
/// Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, algorithm 1. `epsilon` is added to the root of the
/// second moment after its bias correction, as PyTorch and Burn do. There is no AMSGrad.
///
/// With states in bf16, choose a `beta2` of at most 0.996: the second moment shrinks by `1 - beta2` of itself per step, which
/// with 0.999 is less than half a unit in the last place of bf16 and is rounded away.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Adam {
    /// How much of the first moment stays in a step: at least 0, less than 1.
    pub beta1: f64,
    /// How much of the second moment stays in a step: at least 0, less than 1.
    pub beta2: f64,
    /// Added to the divisor: finite, at least 0.
    pub epsilon: f64,
    /// How parameters are drawn towards zero.
    pub weight_decay: WeightDecay,
}

impl Adam {
    /// PyTorch's defaults for `Adam`.
    pub const ADAM: Self = Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: WeightDecay::None };

    /// PyTorch's defaults for `AdamW`.
    pub const ADAMW: Self = Self { weight_decay: WeightDecay::Decoupled(0.01), ..Self::ADAM };

    pub(super) const STATES: [StateSpec; 2] = [StateSpec::zero("exp_avg"), StateSpec::zero("exp_avg_sq")];

    pub(super) fn validate(&self) -> Result<(), HyperParameterError> {
        in_range("beta1", self.beta1, BELOW_ONE)?;
        in_range("beta2", self.beta2, BELOW_ONE)?;
        in_range("epsilon", self.epsilon, NOT_NEGATIVE)?;
        self.weight_decay.validate()
    }

    /// The rule of one update, and the size of its step.
    pub(super) fn rule(&self, update: Update) -> (AdamRule, f64) {
        let correction = |beta| 1.0 - power(beta, update.step);
        let rule = AdamRule {
            gain1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            gain2: (1.0 - self.beta2) as f32,
            root: correction(self.beta2).sqrt().recip() as f32,
            epsilon: self.epsilon as f32,
        };
        (rule, update.lr / correction(self.beta1))
    }
}

/// The numbers of one of Adam's updates:
///
/// ```text
/// first = mul_add(gradient - first, gain1, first)
/// second = mul_add(gradient * gain2, gradient, second * beta2)
/// direction = first / mul_add(sqrt(second), root, epsilon)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamRule {
    /// How much of the gradient goes into the first moment.
    pub gain1: f32,
    /// How much of the second moment stays.
    pub beta2: f32,
    /// How much of the gradient's square goes into the second moment.
    pub gain2: f32,
    /// The bias correction of the second moment's root.
    pub root: f32,
    /// Added to the divisor.
    pub epsilon: f32,
}

impl Rule<2> for AdamRule {
    #[inline(always)]
    fn direction<L: Lanes>(
        &self,
        lanes: L,
        gradient: L::Floats,
        [first, second]: [L::Floats; 2],
    ) -> (L::Floats, [L::Floats; 2]) {
        // The same as beta1 * first + (1 - beta1) * gradient, but exact where both are equal.
        let first = lanes.mul_add(lanes.sub(gradient, first), lanes.splat(self.gain1), first);
        let kept = lanes.mul(second, lanes.splat(self.beta2));
        let second = lanes.mul_add(lanes.mul(gradient, lanes.splat(self.gain2)), gradient, kept);
        let divisor = lanes.mul_add(lanes.sqrt(second), lanes.splat(self.root), lanes.splat(self.epsilon));
        (lanes.div(first, divisor), [first, second])
    }
}

/// `base` to the power of `exponent`, the same on every machine, which libraries' powers are not.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent % 2 == 1 {
            result *= base;
        }
        base *= base;
        exponent /= 2;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    fn a_power_is_as_exact_as_bias_corrections_need() {
        for beta in [0.0, 0.5, 0.9, 0.999, 0.999_999] {
            for step in [1, 2, 3, 10, 1000, 12_345, 1_000_000] {
                let (found, expected) = (power(beta, step), beta.powf(step as f64));
                assert!((found - expected).abs() <= 1e-10 * expected, "{beta}^{step}: {found}, {expected}");
            }
        }
        assert_eq!((power(0.9, u64::MAX), power(0.0, 0)), (0.0, 1.0));
    }
}
