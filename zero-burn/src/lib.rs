//! ZeRO for Burn: trains a model whose parameters, gradients and optimizer state are sharded over ranks.
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! use burn::tensor::{Device, Tensor};
//! use zero_burn::{LocalWorld, WorldSize, Zero, ZeroConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let world = LocalWorld::new(WorldSize::new(2).ok_or("a world has ranks")?);
//! let losses = world.run(|comm| -> Result<f64, zero_burn::ZeroError> {
//!     let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?; // stage 3
//!     let mut model: Linear = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
//!     let mut optimizer = zero.optimizer(AdamWConfig::new().build())?;
//!     let mut loss = f64::NAN;
//!     for _ in 0..3 {
//!         let input = Tensor::<2>::ones([16, 8], zero.device()); // this rank's rows
//!         zero.backward((model.forward(input) - 1.0).square().mean())?;
//!         loss = optimizer.step(1e-3, &mut model)?.loss; // the mean over all ranks
//!     }
//!     Ok(loss)
//! })?;
//! assert_eq!(losses[0], losses[1]);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! All of them private but `kernels`; what users need stands at the root.
//!
//! - `zero`, `whole`: [`Zero`], the value that owns everything, and whole models out of it and into it; `error`,
//!   `not_finite`: [`ZeroError`], and [`NotFinite`].
//! - `shard`, `census`, `materialize`: from a module to its shards, and initial values.
//! - `stand_in`, `gather`, `uses`, `ladder`: what a sharded module stores, the custom operation between a shard and its
//!   whole parameter, how often it stands on a tape, and when its backward runs.
//! - `recompute`, `block_input`, `block_operation`, `watch`: blocks that backward runs again, the custom operation that does it, and
//!   what forward tells it.
//! - `slot`, `base`, `phase`, `succession`, `agreement`: the engine in charge, what it has whatever its layout, and how
//!   another one takes over, once the ranks agree.
//! - `engine`, `publication`, `export`: one rank's state of one model, how others see what became of it, and whole masters; `held`, `windows`,
//!   `gathers`: shards and replicas, what ranks show each other of them, and what is gathered on demand and ahead;
//!   `queues`: threads for that.
//! - `gradients`, `sums`, `segments`, `reduction`, `owned`, `scratch`: what lies between backward and step, and memory for it; `rates`:
//!   rates for ranks to compare.
//! - `optimizer`, `group`, `rule`: [`ZeroOptimizer`], parameter groups, and what an optimizer of shards has to do; `stored`,
//!   `elementwise`: Burn's optimizers, their state at rest, and which of them qualify; `fused`, `fused_state`,
//!   `fused_update`, `staged`, `exclusive`: [`Fused`], what it has on a disk, and memory of a shard to write to; `disk`, `masters`, `spill`: optimizer state,
//!   master weights and gradients on a disk; `machine`: what there is room for, and how fast.
//! - `checkpoints`: [`Checkpoints`]; `ranks`: who saves together; `contents`, `restore`, `kept`, `progress`: what goes into
//!   one, what comes out of it, and states and counters as one sees them; `record`: [`write_record`].
//! - `host`, `floats`, `shared`: tensors as host memory, numbers of 16 and 32 bits in it, gathered ones that are still alive.
//! - `devices`: [`DeviceKind`], and which device a rank takes; with a runtime of CubeCL's also `cube`, `arena`: tensors as
//!   buffers of a device, several side by side in one; `transports`, `rank_device`: how ranks' devices reach each other past
//!   host memory, and waiting for one; `board`: for ranks of one process; `process_windows`: for processes; `cuda`:
//!   copies between CUDA devices of either, and NCCL; `live_memory`: what layers have, counted; `device_bucket`,
//!   `device_reduction`, `device_update`, `on_device`: gradients on their way to a bucket there, sums of buckets, a step of
//!   [`Fused`], and what else is other there.
//! - `kernels`, with a runtime of CubeCL's: updates, norms, moves and quantization of many tensors in buffers on a device, for
//!   whoever has such.
//! - `report`, `statistics`: [`MemoryReport`], [`Statistics`] and [`TraceEvent`].
//!
//! # Features
//!
//! - `flex` (default): Burn's CPU backend.
//! - `cuda`, `rocm`, `wgpu`, `vulkan`, `metal`, `webgpu`: devices by CubeCL, as Burn's features of these names. Of the same
//!   meaning as Burn's are `fusion` and `autotune`; whoever turns on Burn's `fusion` has to turn on this one. With `cuda`, ranks
//!   read each other's devices where the hardware connects them; those that are processes reduce gradients by NCCL, where it is
//!   found at run time.
//! - `cube`: what these have in common, and no device. `cuda-source`: for a test that compiles all kernels for CUDA without one.
//! - `launcher`: `launcher`, which starts ranks as processes.

#[cfg(not(any(feature = "flex", feature = "cube")))]
compile_error!(
    "zero-burn needs a backend: enable one of the features `flex`, `cuda`, `rocm`, `wgpu`, `vulkan`, `metal` and `webgpu`"
);

/// For tests of this crate that share code with those outside of it.
#[cfg(test)]
extern crate self as zero_burn;

mod agreement;
#[cfg(feature = "cube")]
mod arena;
mod base;
mod block_input;
mod block_operation;
#[cfg(feature = "cube")]
mod board;
mod census;
mod checkpoints;
mod contents;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cube")]
mod device_bucket;
#[cfg(feature = "cube")]
mod device_reduction;
#[cfg(feature = "cube")]
mod device_update;
mod devices;
mod disk;
mod elementwise;
mod engine;
mod error;
mod exclusive;
mod export;
mod floats;
mod fused;
mod fused_state;
mod fused_update;
mod gather;
mod gathers;
mod gradients;
mod group;
mod held;
mod host;
mod kept;
#[cfg(feature = "cube")]
pub mod kernels;
mod ladder;
#[cfg(feature = "cube")]
mod live_memory;
mod machine;
mod masters;
mod materialize;
mod not_finite;
mod on_device;
mod optimizer;
mod owned;
mod phase;
#[cfg(any(feature = "cuda", all(test, feature = "wgpu")))]
mod process_windows;
mod progress;
mod publication;
mod queues;
#[cfg(feature = "cube")]
mod rank_device;
mod ranks;
mod rates;
mod recompute;
mod record;
mod reduction;
mod report;
mod restore;
mod rule;
mod scratch;
mod segments;
mod shard;
mod shared;
mod slot;
mod spill;
mod staged;
mod stand_in;
mod statistics;
mod stored;
mod succession;
mod sums;
#[cfg(feature = "cube")]
mod transports;
mod uses;
mod watch;
mod whole;
mod windows;
mod zero;

pub use block_input::BlockInput;
pub use checkpoints::{Checkpoints, Loaded, Notes};
pub use devices::DeviceKind;
pub use error::ZeroError;
pub use fused::Fused;
pub use group::GroupRate;
pub use materialize::materialize;
pub use not_finite::NotFinite;
pub use optimizer::{StepOutcome, ZeroOptimizer};
pub use recompute::{recompute, recompute_seeded};
pub use record::write_record;
pub use report::MemoryReport;
pub use rule::ShardOptimizer;
pub use statistics::{Activity, Statistics, TraceEvent};
pub use zero::Zero;
#[cfg(unix)]
pub use zero_checkpoint::LocalStorage;
pub use zero_checkpoint::{
    Allow, Checkpoint, CheckpointError, Difference, Digest, LoadOptions, LoadReport, LoadedParameter,
    MemoryStorage, ModelIdentity, NameMap, OnBusy, Pending, PublishedWeights, Registry, Retention, Saved,
    SaverOptions, Storage,
};
#[cfg(feature = "launcher")]
pub use zero_comm::launcher;
pub use zero_comm::{
    CommError, Communicator, CommunicatorExt, EnvironmentError, LocalWorld, ProcessWorld, ReduceOp, World,
    WorldError,
};
pub use zero_core::{
    AtMinScale, BatchError, BatchPlan, Bytes, ConfigError, DType, DeepSpeedAdam, DeepSpeedEntry,
    DeepSpeedError, DeepSpeedGiven, DeepSpeedImport, DeepSpeedOptimizer, DeepSpeedReport, DeepSpeedScheduler,
    DeepSpeedSource, DeepSpeedVerdict, DeepSpeedWarmup, DynamicLossScale, Layout, LossScaling, MemoryPlan,
    MemorySetup, Offload, OptimizerCost, Partition, Placement, PlacementError, PlacementPlan, Precision,
    Rank, ReduceGradients, Stage, StateBytes, Tier, WorldSize, ZeroConfig, nearest,
};

pub use zero_offload::{
    Adagrad, Adam, HyperParameterError, Lion, OptimizerConfig, Sgd, StoreError, WeightDecay, WorkersError,
};

/// The examples of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
