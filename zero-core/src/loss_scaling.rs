//! How the loss is to be scaled.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// How the factor is chosen that the loss, and with it every gradient, is multiplied by in backward.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossScaling {
    /// Always the same. A step whose gradients are not finite is skipped.
    Static {
        /// The factor; 1 scales nothing.
        scale: f64,
    },
    /// As large as gradients allow.
    Dynamic(DynamicLossScale),
}

impl LossScaling {
    /// The loss as it is.
    pub const NONE: Self = Self::Static { scale: 1.0 };
    /// The smallest scale: the reciprocals of this and of all larger ones are finite f32 numbers.
    pub const MIN: f64 = f32::MIN_POSITIVE as f64;
    /// The largest scale: its reciprocal is the smallest normal f32 number. A dynamic one stops growing here.
    pub const MAX: f64 = 1.0 / Self::MIN;

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let scale = |key, scale: f64| {
            if (Self::MIN..=Self::MAX).contains(&scale) {
                return Ok(());
            }
            let allowed = "from 2^-126 to 2^126, so that it and its reciprocal are f32 numbers";
            Err(ConfigError::OutOfRange { key, found: scale.to_string(), allowed })
        };
        let dynamic = match self {
            Self::Static { scale: factor } => return scale("loss_scale.scale", *factor),
            Self::Dynamic(dynamic) => dynamic,
        };
        scale("loss_scale.initial_scale", dynamic.initial_scale)?;
        scale("loss_scale.min_scale", dynamic.min_scale)?;
        if dynamic.min_scale > dynamic.initial_scale {
            return Err(ConfigError::InitialScale { initial: dynamic.initial_scale, min: dynamic.min_scale });
        }
        if !(dynamic.factor > 1.0 && dynamic.factor <= Self::MAX) {
            return Err(ConfigError::OutOfRange {
                key: "loss_scale.factor",
                found: dynamic.factor.to_string(),
                allowed: "above 1 and at most 2^126, such as 2",
            });
        }
        Ok(())
    }
}

/// A scale that grows while gradients stay finite, and falls when they overflow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicLossScale {
    /// The first scale.
    pub initial_scale: f64,
    /// The scale is multiplied or divided by this; above 1.
    pub factor: f64,
    /// Steps without overflow until the scale grows.
    pub window: NonZeroU32,
    /// The scale falls with this many overflows; with fewer, their steps are skipped alone.
    pub hysteresis: NonZeroU32,
    /// Whether one step without overflow forgives earlier overflows, or only growth does.
    pub consecutive_hysteresis: bool,
    /// The scale does not fall below this.
    pub min_scale: f64,
    /// What an overflow at the minimum is.
    pub at_min: AtMinScale,
}

impl Default for DynamicLossScale {
    /// What DeepSpeed takes by default.
    fn default() -> Self {
        Self {
            initial_scale: 65536.0,
            factor: 2.0,
            window: NonZeroU32::MIN.saturating_add(999),
            hysteresis: NonZeroU32::MIN.saturating_add(1),
            consecutive_hysteresis: false,
            min_scale: 1.0,
            at_min: AtMinScale::Error,
        }
    }
}

/// What an overflow is when the scale should fall but is at its minimum already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtMinScale {
    /// An error: gradients overflow for another reason than the scale.
    #[default]
    Error,
    /// One more skipped step.
    Skip,
}
