//! The element types of training.

use crate::{ConfigError, DType};

/// The element types of training: of layers, of gradients on their way and at rest, of optimizer state.
///
/// Master weights are f32 whatever is chosen.
///
/// ```
/// use zero_core::{DType, Precision};
///
/// let precision = Precision { compute: DType::BF16, ..Precision::default() };
/// assert_eq!((precision.reduce(), precision.accumulate), (DType::BF16, DType::F32));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// What layers compute in, gathered parameters and replicas with them: f32, bf16 or f16.
    pub compute: DType,
    /// What gradients travel in between ranks: f32, bf16 or f16; `None` for the compute dtype. Only what travels
    /// is rounded to it, sums are taken in f32.
    pub reduce: Option<DType>,
    /// What the gradients of several backwards are summed up in until the step: f32, bf16 or f16.
    pub accumulate: DType,
    /// What an optimizer keeps its state in: f32 or bf16.
    pub optimizer_state: DType,
}

impl Default for Precision {
    fn default() -> Self {
        Self { compute: DType::F32, reduce: None, accumulate: DType::F32, optimizer_state: DType::F32 }
    }
}

impl Precision {
    /// The dtypes that `compute` can be; `reduce` and `accumulate`, too.
    pub const COMPUTE: &'static [DType] = &[DType::F32, DType::BF16, DType::F16];
    /// The dtypes of `optimizer_state`. f16 is none: second moments are squares, most of them below its range.
    pub(crate) const STATES: &'static [DType] = &[DType::F32, DType::BF16];

    /// What gradients travel in between ranks.
    pub fn reduce(&self) -> DType {
        self.reduce.unwrap_or(self.compute)
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        for (key, dtype, allowed) in [
            ("precision.compute", self.compute, Self::COMPUTE),
            ("precision.reduce", self.reduce(), Self::COMPUTE),
            ("precision.accumulate", self.accumulate, Self::COMPUTE),
            ("precision.optimizer_state", self.optimizer_state, Self::STATES),
        ] {
            if !allowed.contains(&dtype) {
                return Err(ConfigError::Choice {
                    key,
                    found: format!("the dtype {dtype}"),
                    allowed: ConfigError::list(allowed.iter().map(|dtype| dtype.name())),
                });
            }
        }
        Ok(())
    }
}
