//! How parameters are drawn towards zero.

use super::error::{HyperParameterError, NOT_NEGATIVE, in_range};

/// How parameters are drawn towards zero, at a rate that is finite and at least 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub enum WeightDecay {
    /// They are not.
    #[default]
    None,
    /// The rate times the parameter is added to the gradient, as by PyTorch's `Adam`, `Adagrad` and `SGD`.
    L2(f64),
    /// Learning rate times rate times the parameter is taken from it beside the update, as by PyTorch's `AdamW` and in Lion.
    ///
    /// Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    Decoupled(f64),
}

impl WeightDecay {
    pub(super) fn validate(self) -> Result<(), HyperParameterError> {
        match self {
            Self::None => Ok(()),
            Self::L2(rate) | Self::Decoupled(rate) => in_range("weight_decay", rate, NOT_NEGATIVE),
        }
    }

    /// What is added to the gradient, times the parameter; `None` for nothing at all.
    pub(super) fn penalty(self) -> Option<f32> {
        match self {
            Self::L2(rate) if rate != 0.0 => Some(rate as f32),
            _ => None,
        }
    }

    /// What is taken from the parameter, times itself; `None` for nothing at all.
    pub(super) fn decay(self, lr: f64) -> Option<f32> {
        match self {
            Self::Decoupled(rate) if rate != 0.0 => Some((lr * rate) as f32),
            _ => None,
        }
    }
}
