//! The numbers of one update.

use super::adagrad::AdagradRule;
use super::adam::AdamRule;
use super::lion::LionRule;
use super::sgd::MomentumRule;

/// The `f32` numbers that one update works with, for programs that update elsewhere than in host memory.
///
/// With all products in `mul_add` rounded together with their sums, an element is updated so:
///
/// ```text
/// gradient = gradient * gradient_factor
/// if penalty: gradient = mul_add(parameter, penalty, gradient)
/// direction, states = rule(gradient, states)
/// if decay: parameter = parameter - mul_add(direction, step_size, parameter * decay)
/// else:     parameter = mul_add(direction, -step_size, parameter)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// What the gradient is multiplied by first.
    pub gradient_factor: f32,
    /// What is added to the gradient, times the parameter.
    pub penalty: Option<f32>,
    /// What is taken from the parameter, times itself.
    pub decay: Option<f32>,
    /// What is taken from the parameter, times the direction.
    pub step_size: f32,
    /// Where the gradient leads.
    pub rule: UpdateRule,
}

/// How an optimizer makes a direction of a gradient and its states.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum UpdateRule {
    /// Of Adam and AdamW.
    Adam(AdamRule),
    /// Of Adagrad.
    Adagrad(AdagradRule),
    /// Of Lion.
    Lion(LionRule),
    /// Of stochastic gradient descent with momentum.
    Momentum(MomentumRule),
    /// The gradient itself: stochastic gradient descent without momentum.
    Descent,
}
