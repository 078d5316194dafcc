//! Optimizers over host memory: one pass over parameters, gradient and states.

mod adagrad;
mod adam;
mod coefficients;
mod error;
mod kernel;
mod lion;
mod sgd;
mod weight_decay;

use crate::floats::{Floats, FloatsMut};
use crate::workers::Workers;
use error::{FINITE, RATE, in_range};
use kernel::{Pass, Rule, Tile, UpdateTile};
use sgd::Descent;
use zero_core::DType;

pub use adagrad::{Adagrad, AdagradRule};
pub use adam::{Adam, AdamRule};
pub use coefficients::{Coefficients, UpdateRule};
pub use error::{HyperParameterError, UpdateError};
pub use lion::{Lion, LionRule};
pub use sgd::{MomentumRule, Sgd};
pub use weight_decay::WeightDecay;

/// An element-wise optimizer on host memory.
///
/// Made from the hyper-parameters of [`Adam`], [`Adagrad`], [`Lion`] or [`Sgd`], which it checks. It holds no state: whoever
/// calls keeps the slices that [`states`](Self::states) names, and counts steps.
///
/// In one pass over memory, [`update`](Self::update) multiplies the gradient by a factor, applies weight decay, updates
/// states and parameters, and writes a copy of the new parameters in the type that layers compute in.
///
/// # Numbers
///
/// Hyper-parameters are worked with in `f64` and rounded to `f32` once per update; elements are worked on in `f32`, with
/// products fused into sums. The result of an element depends on nothing but that element: not on where slices are cut, how
/// many threads work or which [`InstructionSet`](crate::InstructionSet) they use, to the bit (but for the payload of NaN).
/// What is stored in 16 bits is rounded to the nearest even after the update has used the unrounded value.
///
/// What each rule computes equals PyTorch's optimizer of that name, and for Lion the paper's program. Rounding differs from PyTorch's and Burn's in two
/// places: decoupled decay and step are added up before they are taken from the parameter, which is then rounded once
/// instead of twice (and its decay rate is not rounded to a multiple of 2^-24, as that of `p * (1 - lr * decay)` is); and
/// bias corrections use `f64` powers, where Burn's use `f32`.
///
/// ```
/// use half::bf16;
/// use zero_offload::{Adam, HostOptimizer, Update, Workers};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let optimizer = HostOptimizer::new(Adam { beta2: 0.95, ..Adam::ADAMW })?;
/// let mut parameters = [1.0f32, -2.0, 3.0];
/// let gradient = [bf16::ONE; 3];
/// let (mut exp_avg, mut exp_avg_sq) = ([0f32; 3], [0f32; 3]);
/// let mut copy = [bf16::ZERO; 3];
/// optimizer.update(
///     &Workers::alone(),
///     Update { lr: 0.1, step: 1, gradient_factor: 0.5 },
///     &mut parameters,
///     gradient[..].into(),
///     &mut [(&mut exp_avg[..]).into(), (&mut exp_avg_sq[..]).into()],
///     Some((&mut copy[..]).into()),
/// )?;
/// assert_eq!(copy.map(f32::from), parameters.map(|new| bf16::from_f32(new).to_f32()));
/// assert!((parameters[0] - 0.899).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostOptimizer {
    config: OptimizerConfig,
}

/// The hyper-parameters of any optimizer that there is.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(tag = "optimizer", rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerConfig {
    /// Of Adam and AdamW.
    Adam(Adam),
    /// Of Adagrad.
    Adagrad(Adagrad),
    /// Of Lion.
    Lion(Lion),
    /// Of stochastic gradient descent.
    Sgd(Sgd),
}

macro_rules! configs {
    ($($config:ident),*) => {$(
        impl From<$config> for OptimizerConfig {
            fn from(config: $config) -> Self {
                Self::$config(config)
            }
        }
    )*};
}

configs!(Adam, Adagrad, Lion, Sgd);

/// What differs from update to update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// The learning rate: finite, at least 0.
    pub lr: f64,
    /// Which update of these parameters this is, counted from 1, for bias corrections and whatever else depends on it.
    pub step: u64,
    /// What the gradient is multiplied by first: the inverse of the loss scale times the factor of clipping. Finite.
    pub gradient_factor: f64,
}

/// A state that an optimizer keeps for each parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct StateSpec {
    /// PyTorch's name of it.
    pub name: &'static str,
    /// What every element is before the first update.
    pub initial: f32,
}

impl StateSpec {
    const fn zero(name: &'static str) -> Self {
        Self { name, initial: 0.0 }
    }
}

impl HostOptimizer {
    /// The optimizer with these hyper-parameters.
    ///
    /// # Errors
    ///
    /// [`HyperParameterError`] names the one it cannot work with, and its range.
    pub fn new(config: impl Into<OptimizerConfig>) -> Result<Self, HyperParameterError> {
        let config = config.into();
        match &config {
            OptimizerConfig::Adam(adam) => adam.validate()?,
            OptimizerConfig::Adagrad(adagrad) => adagrad.validate()?,
            OptimizerConfig::Lion(lion) => lion.validate()?,
            OptimizerConfig::Sgd(sgd) => sgd.validate()?,
        }
        Ok(Self { config })
    }

    /// What it was made with.
    pub const fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// The states of a parameter, in the order in which [`update`](Self::update) takes them.
    pub fn states(&self) -> Vec<StateSpec> {
        match &self.config {
            OptimizerConfig::Adam(_) => Adam::STATES.to_vec(),
            OptimizerConfig::Adagrad(adagrad) => adagrad.states().to_vec(),
            OptimizerConfig::Lion(_) => Lion::STATES.to_vec(),
            OptimizerConfig::Sgd(sgd) if sgd.has_momentum() => Sgd::STATES.to_vec(),
            OptimizerConfig::Sgd(_) => Vec::new(),
        }
    }

    /// The numbers that [`update`](Self::update) works with in `update`.
    ///
    /// # Errors
    ///
    /// [`UpdateError`] says which number of `update` is out of its range.
    pub fn coefficients(&self, update: Update) -> Result<Coefficients, UpdateError> {
        in_range("lr", update.lr, RATE)?;
        in_range("gradient_factor", update.gradient_factor, FINITE)?;
        if update.step == 0 {
            return Err(UpdateError::StepZero);
        }
        let (rule, step_size, weight_decay) = match &self.config {
            OptimizerConfig::Adam(adam) => {
                let (rule, step_size) = adam.rule(update);
                (UpdateRule::Adam(rule), step_size, adam.weight_decay)
            }
            OptimizerConfig::Adagrad(adagrad) => {
                let (rule, step_size) = adagrad.rule(update);
                (UpdateRule::Adagrad(rule), step_size, adagrad.weight_decay)
            }
            OptimizerConfig::Lion(lion) => (UpdateRule::Lion(lion.rule()), update.lr, lion.weight_decay),
            OptimizerConfig::Sgd(sgd) => {
                let rule = match sgd.has_momentum() {
                    true => UpdateRule::Momentum(sgd.rule(update)),
                    false => UpdateRule::Descent,
                };
                (rule, update.lr, sgd.weight_decay)
            }
        };
        Ok(Coefficients {
            gradient_factor: update.gradient_factor as f32,
            penalty: weight_decay.penalty(),
            decay: weight_decay.decay(update.lr),
            step_size: step_size as f32,
            rule,
        })
    }

    /// Updates `parameters` and `states` in place by `gradient`, and sets `copy` to the new parameters.
    ///
    /// All slices have one element for each parameter; there may be none. States are f32 or bf16, each of its own type.
    ///
    /// A gradient that is not finite makes parameters and states that are not: look with
    /// [`sum_of_squares`](crate::sum_of_squares) first.
    ///
    /// # Errors
    ///
    /// [`UpdateError`] says which number or slice does not fit; nothing has been changed then.
    pub fn update(
        &self,
        workers: &Workers,
        update: Update,
        parameters: &mut [f32],
        gradient: Floats<'_>,
        states: &mut [FloatsMut<'_>],
        copy: Option<FloatsMut<'_>>,
    ) -> Result<(), UpdateError> {
        let coefficients = self.coefficients(update)?;
        let slices = Slices { parameters, gradient, states, copy };
        slices.check(&self.states())?;
        match coefficients.rule {
            UpdateRule::Adam(rule) => slices.update(workers, coefficients, rule),
            UpdateRule::Adagrad(rule) => slices.update(workers, coefficients, rule),
            UpdateRule::Lion(rule) => slices.update(workers, coefficients, rule),
            UpdateRule::Momentum(rule) => slices.update(workers, coefficients, rule),
            UpdateRule::Descent => slices.update(workers, coefficients, Descent),
        }
    }
}

/// What [`HostOptimizer::update`] works on.
struct Slices<'a, 'b> {
    parameters: &'a mut [f32],
    gradient: Floats<'a>,
    states: &'a mut [FloatsMut<'b>],
    copy: Option<FloatsMut<'a>>,
}

impl Slices<'_, '_> {
    fn check(&self, expected: &[StateSpec]) -> Result<(), UpdateError> {
        let parameters = self.parameters.len();
        let same = |slice, length| match length == parameters {
            true => Ok(()),
            false => Err(UpdateError::Length { slice, length, parameters }),
        };
        same("gradient", self.gradient.len())?;
        same("copy", self.copy.as_ref().map_or(parameters, FloatsMut::len))?;
        if self.states.len() != expected.len() {
            let expected = expected.iter().map(|state| state.name).collect();
            return Err(UpdateError::States { expected, given: self.states.len() });
        }
        for (state, spec) in self.states.iter().zip(expected) {
            same(spec.name, state.len())?;
            if !matches!(state.dtype(), DType::F32 | DType::BF16) {
                return Err(UpdateError::StateType { state: spec.name, dtype: state.dtype() });
            }
        }
        Ok(())
    }

    fn update<R: Rule<STATES>, const STATES: usize>(
        self,
        workers: &Workers,
        coefficients: Coefficients,
        rule: R,
    ) -> Result<(), UpdateError> {
        let given = self.states.len();
        let states: &mut [FloatsMut<'_>; STATES] =
            self.states.try_into().map_err(|_| UpdateError::States { expected: Vec::new(), given })?;
        let Coefficients { gradient_factor, penalty, decay, step_size, .. } = coefficients;
        let pass = Pass { rule, gradient_factor, penalty, decay, step_size };
        let tile = Tile {
            parameters: self.parameters,
            gradient: self.gradient,
            states: states.each_mut().map(FloatsMut::reborrow),
            copy: self.copy,
        };
        workers.run(tile, |tile| workers.compute(UpdateTile { pass, tile }));
        Ok(())
    }
}
