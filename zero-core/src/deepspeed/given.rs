//! What the program knows and the file leaves to it.

use crate::config::value::Value;
use crate::{DType, WorldSize};

/// What the program knows and the file leaves to it: the world, and the values of keys that are `"auto"`.
///
/// A key that the file sets, or does not mention, takes nothing from here; the learning rate alone also stands
/// in for an optimizer that the file does not describe but its scheduler needs.
///
/// ```
/// use zero_core::{DeepSpeedGiven, WorldSize};
///
/// let world = WorldSize::new(8).unwrap();
/// let given = DeepSpeedGiven { lr: Some(3e-4), ..DeepSpeedGiven::new(world) };
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepSpeedGiven {
    /// The number of ranks that train on different samples.
    pub world_size: WorldSize,
    /// `train_batch_size`; a batch key that is neither written nor given follows from the others.
    pub train_batch_size: Option<usize>,
    /// `train_micro_batch_size_per_gpu`.
    pub micro_batch_size_per_rank: Option<usize>,
    /// `gradient_accumulation_steps`.
    pub accumulation_steps: Option<usize>,
    /// `gradient_clipping`; 0 for none.
    pub clip_norm: Option<f64>,
    /// `fp16.enabled` and `bf16.enabled`: what layers compute in, f32 for neither.
    pub compute: Option<DType>,
    /// `optimizer.params.lr` and `scheduler.params.warmup_max_lr`.
    pub lr: Option<f64>,
    /// `optimizer.params.betas`.
    pub betas: Option<[f64; 2]>,
    /// `optimizer.params.eps`.
    pub eps: Option<f64>,
    /// `optimizer.params.weight_decay`.
    pub weight_decay: Option<f64>,
    /// `scheduler.params.warmup_num_steps`.
    pub warmup_steps: Option<u64>,
    /// `scheduler.params.total_num_steps`.
    pub total_steps: Option<u64>,
    /// The width of the model's layers, which `reduce_bucket_size`, `stage3_prefetch_bucket_size` and
    /// `stage3_param_persistence_threshold` follow as in the integration of Hugging Face Transformers. Not
    /// given: DeepSpeed's defaults.
    pub hidden_size: Option<usize>,
}

impl DeepSpeedGiven {
    /// The world, and nothing for keys that are `"auto"`.
    pub const fn new(world_size: WorldSize) -> Self {
        Self {
            world_size,
            train_batch_size: None,
            micro_batch_size_per_rank: None,
            accumulation_steps: None,
            clip_norm: None,
            compute: None,
            lr: None,
            betas: None,
            eps: None,
            weight_decay: None,
            warmup_steps: None,
            total_steps: None,
            hidden_size: None,
        }
    }

    /// A number of elements that follows from the hidden size, as `multiple * hidden_size ^ power`, rounded down.
    pub(super) fn of_hidden_size(&self, multiple: f64, power: i32) -> Option<Value> {
        self.hidden_size.map(|hidden| Value::Float((multiple * (hidden as f64).powi(power)).floor()))
    }
}
