//! The scale of the loss, and how it changes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{AtMinScale, ConfigError, LossScaling};

/// What the loss is multiplied by before backward, so that small gradients survive 16 bits; gradients are
/// divided by the scale that they were computed with.
///
/// A dynamic scale falls on overflow and grows after a window of steps without. It is a pure function of its
/// policy and of the updates, so that ranks that agree on every overflow agree on the scale.
///
/// Source: `DynamicLossScaler` of `deepspeed/runtime/fp16/loss_scaler.py`, version 0.19.6, which this follows
/// step by step; only, here a scale never exceeds [`LossScaling::MAX`].
///
/// ```
/// use zero_core::{DynamicLossScale, LossScale, LossScaling};
///
/// let mut scale = LossScale::new(LossScaling::Dynamic(DynamicLossScale::default()));
/// assert_eq!(scale.scale(), 65536.0);
/// scale.update(true)?; // hysteresis
/// assert_eq!(scale.scale(), 65536.0);
/// scale.update(true)?;
/// assert_eq!(scale.scale(), 32768.0);
/// # Ok::<(), zero_core::MinScaleReached>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct LossScale {
    scaling: LossScaling,
    scale: f64,
    /// Steps since the last overflow, or since the beginning.
    clean_steps: u64,
    /// The scale falls with this many further overflows; at least 1.
    tolerance: u32,
}

impl LossScale {
    /// The first scale of a policy that a [valid](crate::ZeroConfig::validate) configuration holds.
    pub const fn new(scaling: LossScaling) -> Self {
        let (scale, tolerance) = match scaling {
            LossScaling::Static { scale } => (scale, 1),
            LossScaling::Dynamic(dynamic) => (dynamic.initial_scale, dynamic.hysteresis.get()),
        };
        Self { scaling, scale, clean_steps: 0, tolerance }
    }

    /// This scale and its history under another policy, for a run that goes on with a changed configuration. If
    /// either policy is static, a new one begins.
    pub fn with_scaling(self, scaling: LossScaling) -> Self {
        match (self.scaling, scaling) {
            (LossScaling::Dynamic(_), LossScaling::Dynamic(dynamic)) => Self {
                scaling,
                scale: self.scale.max(dynamic.min_scale),
                clean_steps: self.clean_steps,
                tolerance: self.tolerance.min(dynamic.hysteresis.get()),
            },
            _ => Self::new(scaling),
        }
    }

    /// The policy.
    pub const fn scaling(&self) -> LossScaling {
        self.scaling
    }

    /// What the loss of the next step is multiplied by.
    pub const fn scale(&self) -> f64 {
        self.scale
    }

    /// Takes note of a step: whether any gradient of any rank was not finite. If so, the step has to be
    /// skipped.
    ///
    /// # Errors
    ///
    /// [`MinScaleReached`] if a dynamic scale should fall but is at its minimum, and the policy calls that an
    /// error. The scale stays as it was.
    pub fn update(&mut self, overflow: bool) -> Result<(), MinScaleReached> {
        let LossScaling::Dynamic(dynamic) = self.scaling else {
            return Ok(());
        };
        if overflow {
            if self.tolerance > 1 {
                self.tolerance -= 1;
            } else if self.scale > dynamic.min_scale {
                // The tolerance stays used up: the next overflow lowers the scale at once.
                self.scale = (self.scale / dynamic.factor).max(dynamic.min_scale);
            } else if dynamic.at_min == AtMinScale::Error {
                return Err(MinScaleReached { scale: self.scale });
            }
            self.clean_steps = 0;
            return Ok(());
        }
        // The step that completes a window of clean steps does not count: growth comes with the one after it.
        let grows = self.clean_steps > 0 && self.clean_steps % u64::from(dynamic.window.get()) == 0;
        if grows || dynamic.consecutive_hysteresis {
            self.tolerance = dynamic.hysteresis.get();
        }
        if grows && self.scale * dynamic.factor <= LossScaling::MAX {
            self.scale *= dynamic.factor;
        }
        self.clean_steps = self.clean_steps.saturating_add(1);
        Ok(())
    }
}

/// Gradients overflowed although the loss scale was at its minimum.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error(
    "gradients overflow at the smallest loss scale, {scale}: either the model or its data yields values that \
     are not finite, or loss_scale.min_scale is too large; loss_scale.at_min = \"skip\" skips such steps"
)]
pub struct MinScaleReached {
    /// The scale.
    pub scale: f64,
}

/// A [`LossScale`] as stored, before it is known whether updates could have made it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    scaling: LossScaling,
    scale: f64,
    clean_steps: u64,
    tolerance: u32,
}

#[derive(Debug, Error)]
enum SavedError {
    #[error(transparent)]
    Scaling(#[from] ConfigError),
    #[error("a loss scale of {scale} with a tolerance of {tolerance} is none that its policy leads to")]
    State { scale: f64, tolerance: u32 },
}

impl TryFrom<Saved> for LossScale {
    type Error = SavedError;

    fn try_from(saved: Saved) -> Result<Self, SavedError> {
        let Saved { scaling, scale, clean_steps, tolerance } = saved;
        scaling.validate()?;
        let (scales, most) = match scaling {
            LossScaling::Static { scale } => (scale..=scale, 1),
            LossScaling::Dynamic(dynamic) => (dynamic.min_scale..=LossScaling::MAX, dynamic.hysteresis.get()),
        };
        if !(scales.contains(&scale) && (1..=most).contains(&tolerance)) {
            return Err(SavedError::State { scale, tolerance });
        }
        Ok(Self { scaling, scale, clean_steps, tolerance })
    }
}
