//! Stochastic gradient descent.

use super::error::{FINITE, HyperParameterError, NOT_NEGATIVE, in_range};
use super::kernel::Rule;
use super::{StateSpec, Update, WeightDecay};
use crate::simd::Lanes;

/// Stochastic gradient descent, with momentum as PyTorch defines it: the buffer begins as the first gradient, and the
/// learning rate is not in it.
///
/// Without momentum there is no state.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Sgd {
    /// How much of the buffer stays in a step: finite, at least 0.
    pub momentum: f64,
    /// How much less of a gradient than all goes into the buffer, but for the first: finite.
    pub dampening: f64,
    /// Whether the step looks ahead along the buffer; needs momentum, and no dampening.
    ///
    /// Sutskever and others, On the importance of initialization and momentum in deep learning, 2013.
    pub nesterov: bool,
    /// How parameters are drawn towards zero.
    pub weight_decay: WeightDecay,
}

impl Sgd {
    pub(super) const STATES: [StateSpec; 1] = [StateSpec::zero("momentum_buffer")];

    pub(super) const fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }

    pub(super) fn validate(&self) -> Result<(), HyperParameterError> {
        let Self { momentum, dampening, nesterov, weight_decay } = *self;
        in_range("momentum", momentum, NOT_NEGATIVE)?;
        in_range("dampening", dampening, FINITE)?;
        weight_decay.validate()?;
        if nesterov && (momentum == 0.0 || dampening != 0.0) {
            return Err(HyperParameterError::Nesterov { momentum, dampening });
        }
        Ok(())
    }

    /// The rule of one update with momentum; the size of its step is the learning rate.
    pub(super) fn rule(&self, update: Update) -> MomentumRule {
        let momentum = self.momentum as f32;
        let ahead = self.nesterov.then_some(momentum);
        match update.step {
            1 => MomentumRule { kept: 0.0, gain: 1.0, ahead },
            _ => MomentumRule { kept: momentum, gain: (1.0 - self.dampening) as f32, ahead },
        }
    }
}

/// The gradient itself.
#[derive(Clone, Copy)]
pub(super) struct Descent;

impl Rule<0> for Descent {
    #[inline(always)]
    fn direction<L: Lanes>(
        &self,
        _: L,
        gradient: L::Floats,
        states: [L::Floats; 0],
    ) -> (L::Floats, [L::Floats; 0]) {
        (gradient, states)
    }
}

/// The numbers of one update with momentum:
///
/// ```text
/// buffer = mul_add(buffer, kept, gradient * gain)
/// direction = if ahead: mul_add(buffer, ahead, gradient) else: buffer
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentumRule {
    /// How much of the buffer stays.
    pub kept: f32,
    /// How much of the gradient goes into the buffer.
    pub gain: f32,
    /// Nesterov's: how much of the buffer is added to the gradient.
    pub ahead: Option<f32>,
}

impl Rule<1> for MomentumRule {
    #[inline(always)]
    fn direction<L: Lanes>(
        &self,
        lanes: L,
        gradient: L::Floats,
        [buffer]: [L::Floats; 1],
    ) -> (L::Floats, [L::Floats; 1]) {
        let gained = lanes.mul(gradient, lanes.splat(self.gain));
        let buffer = lanes.mul_add(buffer, lanes.splat(self.kept), gained);
        let direction = match self.ahead {
            Some(ahead) => lanes.mul_add(buffer, lanes.splat(ahead), gradient),
            None => buffer,
        };
        (direction, [buffer])
    }
}
