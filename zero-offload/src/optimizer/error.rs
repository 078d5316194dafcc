//! Why an optimizer was not made, or did not update.

use zero_core::DType;

/// A hyper-parameter that no optimizer can work with.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HyperParameterError {
    /// A number out of its range.
    #[error("{name} is {value}; it must be {range}")]
    OutOfRange {
        /// Which.
        name: &'static str,
        /// What it is.
        value: f64,
        /// What it may be.
        range: &'static str,
    },

    /// Nesterov's momentum without momentum, or with dampening.
    #[error(
        "nesterov with momentum {momentum} and dampening {dampening}; it needs a momentum above 0 and no dampening"
    )]
    Nesterov {
        /// The momentum.
        momentum: f64,
        /// The dampening.
        dampening: f64,
    },
}

/// Why nothing was updated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// A number of the update out of its range.
    #[error(transparent)]
    Number(#[from] HyperParameterError),

    /// Steps count from 1.
    #[error("step is 0; the first update is step 1")]
    StepZero,

    /// A slice of another length than the parameters.
    #[error("{slice} has {length} elements for {parameters} parameters; give it one for each")]
    Length {
        /// Which slice: `gradient`, `copy` or the name of a state.
        slice: &'static str,
        /// Its elements.
        length: usize,
        /// The number of parameters.
        parameters: usize,
    },

    /// More or fewer states than the optimizer has.
    #[error("{given} states for an optimizer that has {}; HostOptimizer::states names them", expected.len())]
    States {
        /// The names of those there have to be.
        expected: Vec<&'static str>,
        /// How many were given.
        given: usize,
    },

    /// A state of a type that cannot hold it.
    #[error(
        "state {state} is of type {dtype}; use f32 or bf16, for squares of gradients leave the range of others"
    )]
    StateType {
        /// Its name.
        state: &'static str,
        /// Its type.
        dtype: DType,
    },
}

/// A range of numbers, in words, and whether a number is within.
pub(super) type Range = (&'static str, fn(f64) -> bool);

pub(super) const FINITE: Range = ("finite", |value| (value as f32).is_finite());
pub(super) const RATE: Range = ("finite and at least 0", |value| (value as f32).is_finite() && value >= 0.0);
/// Hyper-parameters are used in `f32`.
pub(super) const NOT_NEGATIVE: Range = ("finite and at least 0, in f32 too", |value| {
    let narrow = value as f32;
    narrow.is_finite() && value >= 0.0 && (narrow > 0.0 || value == 0.0)
});
pub(super) const BELOW_ONE: Range =
    ("at least 0 and less than 1, in f32 too", |value| (0.0..1.0).contains(&value) && (value as f32) < 1.0);

pub(super) fn in_range(
    name: &'static str,
    value: f64,
    (range, within): Range,
) -> Result<(), HyperParameterError> {
    if within(value) { Ok(()) } else { Err(HyperParameterError::OutOfRange { name, value, range }) }
}
