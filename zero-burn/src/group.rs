//! Parameters that are updated alike.

use crate::ZeroError;

/// What the learning rate of a parameter group is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupRate {
    /// That of the step, times a factor.
    Times(f64),
    /// Its own, whatever that of the step is; [`ZeroOptimizer::set_rate`](crate::ZeroOptimizer::set_rate) changes it.
    Own(f64),
}

impl GroupRate {
    pub(crate) fn at(self, lr: f64) -> f64 {
        match self {
            Self::Times(factor) => lr * factor,
            Self::Own(own) => own,
        }
    }

    pub(crate) fn check(self) -> Result<(), ZeroError> {
        let (Self::Times(number) | Self::Own(number)) = self;
        if number.is_finite() { Ok(()) } else { Err(ZeroError::InvalidLearningRate { lr: number }) }
    }
}

/// An optimizer, and whose it is.
pub(crate) struct Group<O> {
    /// Module paths, with `*` for any characters and `?` for one.
    pub(crate) pattern: String,
    pub(crate) optimizer: O,
    pub(crate) rate: GroupRate,
}
