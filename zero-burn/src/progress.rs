//! What a checkpoint has of an optimizer and its engine besides tensors.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use zero_core::LossScale;

use crate::ZeroError;
use crate::engine::Engine;

/// What an optimizer and an engine have to tell besides tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Progress {
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
    /// Scalars of states, by parameter.
    pub(crate) scalars: BTreeMap<String, Map<String, Value>>,
}

impl Progress {
    pub(crate) fn to_json(&self) -> Value {
        let Self { steps, skipped, scalars } = self;
        json!({ "steps": steps, "skipped": skipped, "scalars": scalars })
    }

    pub(crate) fn from_json(value: &Value) -> Result<Self, ZeroError> {
        let odd = || ZeroError::OddCheckpoint {
            reason: format!("its `training.optimizer` is {value}, not what an engine writes"),
        };
        let number = |key: &str| value.get(key).and_then(Value::as_u64).ok_or_else(odd);
        let scalars = value.get("scalars").cloned().unwrap_or_default();
        Ok(Self {
            steps: number("steps")?,
            skipped: number("skipped")?,
            scalars: serde_json::from_value(scalars).map_err(|_| odd())?,
        })
    }
}

/// The loss scale that a checkpoint was saved with, under the policy of `engine`; `None` if it has none.
pub(crate) fn loss_scale(engine: &Engine, value: &Value) -> Result<Option<LossScale>, ZeroError> {
    if value.is_null() {
        return Ok(None);
    }
    let saved: LossScale = serde_json::from_value(value.clone()).map_err(|error| {
        ZeroError::OddCheckpoint { reason: format!("its `training.loss_scale` cannot be read: {error}") }
    })?;
    Ok(Some(saved.with_scaling(engine.config.loss_scaling())))
}
