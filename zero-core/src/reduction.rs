//! When gradients are reduced.

use serde::{Deserialize, Serialize};

use crate::Stage;

/// When ranks sum up their gradients, if a step takes several backwards.
///
/// [`memory`](crate::memory) says what each choice takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReduceGradients {
    /// In every backward: from stage 1 on a rank holds its shard of the sums alone, and the ranks exchange as many
    /// bytes per backward as otherwise per step.
    EveryBackward,
    /// Once, at the step: a rank holds whole gradients until then, at every stage.
    AtStep,
}

impl ReduceGradients {
    /// What a stage does by default: what holds the least where gradients are sharded, and what moves the least
    /// where they are not.
    pub const fn of_stage(stage: Stage) -> Self {
        if stage.shards_gradients() { Self::EveryBackward } else { Self::AtStep }
    }

    /// The name used in configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::EveryBackward => "every-backward",
            Self::AtStep => "at-step",
        }
    }
}
