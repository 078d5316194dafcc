//! How much of the training state is sharded.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A ZeRO stage: what each rank holds only its shard of.
///
/// Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
/// section 5 (`P_os`, `P_os+g`, `P_os+g+p`). In files a stage is its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// Nothing is sharded: plain data parallelism.
    Zero,
    /// Optimizer state is sharded.
    One,
    /// Optimizer state and gradients are sharded.
    Two,
    /// Optimizer state, gradients and parameters are sharded.
    Three,
}

impl Stage {
    /// Every stage, in order.
    pub const ALL: [Self; 4] = [Self::Zero, Self::One, Self::Two, Self::Three];

    /// The stage's number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::One => 1,
            Self::Two => 2,
            Self::Three => 3,
        }
    }

    /// Whether a rank holds only its shard of the optimizer state.
    pub const fn shards_optimizer(self) -> bool {
        self.number() >= 1
    }

    /// Whether a rank holds only its shard of the gradients.
    pub const fn shards_gradients(self) -> bool {
        self.number() >= 2
    }

    /// Whether a rank holds only its shard of the parameters.
    pub const fn shards_parameters(self) -> bool {
        self.number() >= 3
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {}", self.number())
    }
}

/// Why a number is no [`Stage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StageError {
    /// There is no stage of this number.
    #[error("there is no stage {number}; choose 0, 1, 2 or 3")]
    Unknown {
        /// The number given.
        number: u8,
    },
}

impl TryFrom<u8> for Stage {
    type Error = StageError;

    fn try_from(number: u8) -> Result<Self, StageError> {
        match number {
            0 => Ok(Self::Zero),
            1 => Ok(Self::One),
            2 => Ok(Self::Two),
            3 => Ok(Self::Three),
            _ => Err(StageError::Unknown { number }),
        }
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        stage.number()
    }
}

#[cfg(test)]
mod tests {
    use super::{Stage, StageError};

    #[test]
    fn each_stage_shards_what_the_one_before_does_and_one_thing_more() {
        let sharded =
            |stage: Stage| [stage.shards_optimizer(), stage.shards_gradients(), stage.shards_parameters()];
        assert_eq!(
            Stage::ALL.map(sharded),
            [[false, false, false], [true, false, false], [true, true, false], [true, true, true]]
        );
    }

    #[test]
    fn a_stage_is_written_as_its_number() {
        for stage in Stage::ALL {
            let text = serde_json::to_string(&stage).unwrap();
            assert_eq!(text, stage.number().to_string());
            assert_eq!(serde_json::from_str::<Stage>(&text).unwrap(), stage);
        }
        assert_eq!(Stage::Three.to_string(), "stage 3");
    }

    #[test]
    fn a_number_above_three_is_no_stage() {
        assert_eq!(Stage::try_from(4), Err(StageError::Unknown { number: 4 }));
        let error = serde_json::from_str::<Stage>("4").unwrap_err();
        assert!(error.to_string().contains("there is no stage 4; choose 0, 1, 2 or 3"), "{error}");
    }
}
