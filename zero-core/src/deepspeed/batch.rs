//! How many samples a step takes, and how they are spread.

use thiserror::Error;

use crate::WorldSize;

/// How many samples a step takes, and how they are spread over ranks and backwards.
///
/// `train_batch_size = micro_batch_size_per_rank * accumulation_steps * world size`; each is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchPlan {
    /// Samples per step, over all ranks.
    pub train_batch_size: usize,
    /// Samples per rank and backward.
    pub micro_batch_size_per_rank: usize,
    /// Backwards per step.
    pub accumulation_steps: usize,
}

impl BatchPlan {
    /// The plan with what is given, and the rest by division as DeepSpeed divides. With one of the two sizes
    /// alone a step is one backward.
    ///
    /// ```
    /// use zero_core::{BatchPlan, WorldSize};
    ///
    /// let world = WorldSize::new(4).unwrap();
    /// let plan = BatchPlan::new(Some(32), Some(2), None, world)?;
    /// assert_eq!(plan.accumulation_steps, 4);
    ///
    /// let error = BatchPlan::new(Some(30), Some(2), None, world).unwrap_err();
    /// assert!(error.to_string().starts_with("train_batch_size is 30, but 2 samples"));
    /// # Ok::<(), zero_core::BatchError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A [`BatchError`] if neither size is given, a number is 0, or the three and the world do not fit.
    pub fn new(
        train_batch_size: Option<usize>,
        micro_batch_size_per_rank: Option<usize>,
        accumulation_steps: Option<usize>,
        world: WorldSize,
    ) -> Result<Self, BatchError> {
        for (key, number) in [
            ("train_batch_size", train_batch_size),
            ("train_micro_batch_size_per_gpu", micro_batch_size_per_rank),
            ("gradient_accumulation_steps", accumulation_steps),
        ] {
            if number == Some(0) {
                return Err(BatchError::Zero { key });
            }
        }
        let ranks = world.get();
        let product = |micro: usize, steps: usize| {
            let train = micro.checked_mul(steps).and_then(|samples| samples.checked_mul(ranks));
            train.ok_or(BatchError::TooLarge { micro, steps, world: ranks })
        };
        let (train, micro, steps) = match (train_batch_size, micro_batch_size_per_rank, accumulation_steps) {
            (None, None, _) => return Err(BatchError::Unknown),
            (None, Some(micro), steps) => {
                let steps = steps.unwrap_or(1);
                (product(micro, steps)?, micro, steps)
            }
            (Some(train), None, steps) => {
                let steps = steps.unwrap_or(1);
                (train, train / ranks / steps, steps)
            }
            (Some(train), Some(micro), steps) => (train, micro, steps.unwrap_or(train / micro / ranks)),
        };
        if micro == 0 || steps == 0 {
            let micro = micro_batch_size_per_rank.unwrap_or(1);
            let steps = accumulation_steps.unwrap_or(1);
            return Err(BatchError::TooSmall { train, least: product(micro, steps)?, world: ranks });
        }
        let samples = product(micro, steps)?;
        if samples != train {
            return Err(BatchError::Mismatch { train, micro, steps, world: ranks, samples });
        }
        Ok(Self { train_batch_size: train, micro_batch_size_per_rank: micro, accumulation_steps: steps })
    }
}

/// Why there is no such [`BatchPlan`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// Neither size is given.
    #[error(
        "neither train_batch_size nor train_micro_batch_size_per_gpu is given; write one of them, or \"auto\" \
         and give its value"
    )]
    Unknown,
    /// A number of samples or backwards is 0.
    #[error("{key} is 0; it must be at least 1")]
    Zero {
        /// The key.
        key: &'static str,
    },
    /// The sizes do not multiply to the one given.
    #[error(
        "train_batch_size is {train}, but {micro} samples per rank and backward, {steps} backwards and \
         {world} ranks make {samples}; change one of them, or leave one out"
    )]
    Mismatch {
        /// `train_batch_size`.
        train: usize,
        /// `train_micro_batch_size_per_gpu`, given or by division.
        micro: usize,
        /// `gradient_accumulation_steps`, given or by division.
        steps: usize,
        /// The number of ranks.
        world: usize,
        /// The product of the three.
        samples: usize,
    },
    /// There are fewer samples than ranks and backwards to take them.
    #[error(
        "train_batch_size is {train}, but {world} ranks take at least {least} samples per step; raise it, or \
         lower train_micro_batch_size_per_gpu or gradient_accumulation_steps"
    )]
    TooSmall {
        /// `train_batch_size`.
        train: usize,
        /// The fewest samples that would do.
        least: usize,
        /// The number of ranks.
        world: usize,
    },
    /// The product is no number this machine can hold.
    #[error(
        "{micro} samples per rank and backward, {steps} backwards and {world} ranks make more samples than \
         can be counted; lower train_micro_batch_size_per_gpu or gradient_accumulation_steps"
    )]
    TooLarge {
        /// `train_micro_batch_size_per_gpu`.
        micro: usize,
        /// `gradient_accumulation_steps`.
        steps: usize,
        /// The number of ranks.
        world: usize,
    },
}
