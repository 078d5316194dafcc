//! Plain arithmetic and plain data of ZeRO training: who owns which elements, what is reduced and gathered
//! together, how much memory that takes, and what a user can choose.
//!
//! No I/O, no threads, no tensors: every function is total and every result the same on every rank.
//!
//! ```
//! use zero_core::{DType, Layout, MemorySetup, OptimizerCost, ParameterSpec, Rank, WorldSize, ZeroConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = ZeroConfig::from_toml("stage = 3\npersistence_threshold = 100\nprecision.compute = \"bf16\"")?;
//! let spec = |name: &str, shape: &[usize]| ParameterSpec {
//!     name: name.into(),
//!     shape: shape.into(),
//!     dtype: DType::F32,
//!     trainable: true,
//!     aliases: vec![],
//! };
//! let specs = vec![spec("blocks.0.fc.weight", &[64, 30]), spec("blocks.0.fc.bias", &[30])];
//! let world = WorldSize::new(4).ok_or("a world has at least one rank")?;
//! let layout = Layout::new(specs, world, config.layout_options())?;
//!
//! let weight = layout.find("blocks.0.fc.weight").ok_or("stated above")?;
//! assert_eq!(weight.partition().range(Rank::new(1)), 480..960);
//! assert!(layout.find("blocks.0.fc.bias").is_some_and(|bias| bias.persistent()));
//!
//! let plan = MemorySetup::new(&config, OptimizerCost::ADAMW).plan_largest(&layout);
//! assert_eq!(plan.gathered.to_string(), "3.8 KiB");
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! Everything is at the crate root.
//!
//! - `rank`, `dtype`, `bytes`: [`Rank`], [`WorldSize`], [`DType`] and [`Bytes`], so that integers do not mix.
//! - `partition`: [`Partition`], the rule that makes shards.
//! - `reshard`: [`reshard()`], from the shards of one partition to those of another, by [`Move`]s.
//! - `parameter`, `layout`: [`ParameterSpec`], [`Parameter`] and the [`Layout`] of a model.
//! - `bucket`: [`Bucket`], gradients reduced together, and the [`Segment`]s of its buffer.
//! - `unit`: [`Unit`], parameters needed together.
//! - `stage`: [`Stage`], what is sharded.
//! - `precision`: [`Precision`], the element types of training.
//! - `loss_scaling`, `loss_scale`: [`LossScaling`], how the loss is to be scaled, and [`LossScale`], the scale and
//!   how it changes.
//! - `reduction`: [`ReduceGradients`], when gradients are reduced.
//! - `offload`, `placement`: [`Offload`], what is kept where, and [`Offload::resolve`], which chooses by bandwidths and
//!   capacities.
//! - [`memory`]: bytes per rank, from the layout.
//! - `estimate`: what DeepSpeed would estimate, [`deepspeed_zero2`] and [`deepspeed_zero3`].
//! - `schedule`: [`LookAhead`], which parameters are gathered before they are needed, and which are kept.
//! - `config`: [`ZeroConfig`], what a user chooses, from TOML or JSON.
//! - `deepspeed`: [`DeepSpeedImport`], what a `ds_config.json` asks for, and [`BatchPlan`].
//! - `nearest`: [`nearest()`], the key somebody meant.
//!
//! # Features
//!
//! None.

mod bucket;
mod bytes;
mod config;
mod deepspeed;
mod dtype;
mod estimate;
mod layout;
mod loss_scale;
mod loss_scaling;
pub mod memory;
mod nearest;
mod offload;
mod parameter;
mod partition;
mod placement;
mod precision;
mod rank;
mod reduction;
mod reshard;
mod schedule;
mod stage;
mod unit;

pub use bucket::{Bucket, Segment};
pub use bytes::Bytes;
pub use config::{ConfigError, ZeroConfig};
pub use deepspeed::{
    BatchError, BatchPlan, DeepSpeedAdam, DeepSpeedEntry, DeepSpeedError, DeepSpeedGiven, DeepSpeedImport,
    DeepSpeedOptimizer, DeepSpeedReport, DeepSpeedScheduler, DeepSpeedSource, DeepSpeedVerdict,
    DeepSpeedWarmup,
};
pub use dtype::DType;
pub use estimate::{DeepSpeedEstimate, DeepSpeedJob, DeepSpeedOffload, deepspeed_zero2, deepspeed_zero3};
pub use layout::{Layout, LayoutError, LayoutOptions};
pub use loss_scale::{LossScale, MinScaleReached};
pub use loss_scaling::{AtMinScale, DynamicLossScale, LossScaling};
pub use memory::{MemoryPlan, MemorySetup, OptimizerCost, StateBytes};
pub use nearest::nearest;
pub use offload::{Offload, Placement, Tier};
pub use parameter::{Parameter, ParameterIndex, ParameterSpec};
pub use partition::Partition;
pub use placement::{Footprints, Machine, Medium, PlacedState, PlacementError, PlacementPlan};
pub use precision::Precision;
pub use rank::{Rank, WorldSize};
pub use reduction::ReduceGradients;
pub use reshard::{Move, ReshardError, reshard};
pub use schedule::{Accessed, LookAhead, LookAheadOptions, LookAheadStatistics};
pub use stage::{Stage, StageError};
pub use unit::Unit;
