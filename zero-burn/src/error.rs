//! What can go wrong, one variant per cause.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zero_checkpoint::CheckpointError;
use zero_comm::CommError;
use zero_core::{ConfigError, DType, LayoutError, PlacementError, Rank};
use zero_offload::{HyperParameterError, StoreError, UpdateError, WorkersError};

use crate::devices::DeviceKind;
#[cfg(feature = "cube")]
use crate::kernels::KernelError;
use crate::not_finite::{self, NotFinite};

/// Why the engine could not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(Arc<ConfigError>),

    /// The model's parameters cannot be laid out over the ranks.
    #[error(transparent)]
    Layout(Arc<LayoutError>),

    /// An operation between the ranks failed. The engine stays failed: every later call returns this error.
    #[error("{during}: {cause}")]
    Communication {
        /// What the engine was doing.
        during: String,
        /// Why it could not.
        #[source]
        cause: Arc<CommError>,
    },

    /// Another engine of this process was drawing initial values all the time.
    #[error(
        "the random generator was taken for {after:?} by another engine of this process that draws initial values"
    )]
    GeneratorBusy {
        /// How long this engine waited.
        after: Duration,
    },

    /// A device of a backend for which gathers are not built in.
    #[error(
        "{device} is not a device of a backend that zero-burn was built for; its features (`flex`, `cuda`, `rocm`, `wgpu`, ...) are those of Burn"
    )]
    UnsupportedDevice {
        /// The device.
        device: String,
    },

    /// A device that does not compute in the type of layers.
    #[error("{device} does not compute in {dtype}: choose another `precision.compute`")]
    UnsupportedType {
        /// The device.
        device: String,
        /// The type.
        dtype: DType,
    },

    /// A kind of device whose feature is off.
    #[error("devices of {kind} are not built in: build with the feature `{kind}`")]
    DeviceNotBuilt {
        /// The kind.
        kind: DeviceKind,
    },

    /// A kind of device of which this process finds none.
    #[error("there is no device of {kind} here, or no driver for it")]
    NoDevice {
        /// The kind.
        kind: DeviceKind,
    },

    /// No kind of device has this name.
    #[error("there is no kind of device `{name}`; there are {}", DeviceKind::ALL.map(DeviceKind::name).join(", "))]
    NoSuchDeviceKind {
        /// The name.
        name: String,
    },

    /// Tiers to be chosen for a device that does not tell what it has room for.
    #[error("`tier = \"auto\"` needs to know the memory of {device}, which is not told; name the tiers")]
    AutoTier {
        /// The device.
        device: String,
    },

    /// A kernel that the device cannot run, or that failed on it.
    #[cfg(feature = "cube")]
    #[error(transparent)]
    Kernel(Arc<KernelError>),

    /// The system gave no thread for communication beside compute.
    #[error("{0}; `overlap = false` needs none")]
    NoThread(#[source] Arc<std::io::Error>),

    /// The system gave no threads for updates on host memory.
    #[error(transparent)]
    Workers(Arc<WorkersError>),

    /// A hyper-parameter that an optimizer cannot work with.
    #[error(transparent)]
    HyperParameter(Arc<HyperParameterError>),

    /// An update on host memory was given what it cannot work with.
    #[error(transparent)]
    Update(Arc<UpdateError>),

    /// State on a disk could not be read or written, or there is no room for it. Parameters and states are those of the step
    /// before, but where gradients could not be read back while states in memory were being updated: then the engine has
    /// ended. If an update was under way, its gradients are dropped, and with a delayed update those since then, too.
    #[error("{during}: {cause}")]
    Offload {
        /// What the engine was doing.
        during: String,
        /// Why it could not; it names tensor, file and offset.
        #[source]
        cause: Arc<StoreError>,
    },

    /// The configuration wants what only [`Fused`](crate::Fused) can do.
    #[error(
        "{optimizer} keeps its state in memory and updates at once, but `offload.optimizer` is on a disk or \
         `offload.delayed_update` is on; use an optimizer of `Fused`"
    )]
    NotOffloadable {
        /// The optimizer's type.
        optimizer: &'static str,
    },

    /// There is no place for the state.
    #[error(transparent)]
    Placement(Arc<PlacementError>),

    /// Gradients overflowed though the loss is scaled as little as the configuration allows.
    #[error(
        "{}, with the loss scale at its minimum of {scale}: the model diverges, or its values need a type of larger \
         range (`precision.compute = \"bf16\"`); `loss_scale.at_min = \"skip\"` skips such steps",
        not_finite::describe(not_finite)
    )]
    ScaleAtMinimum {
        /// What was not finite.
        not_finite: Option<NotFinite>,
        /// The scale.
        scale: f64,
    },

    /// [`shard`](crate::Zero::shard) was called twice.
    #[error("this engine already holds a model; create one engine per model")]
    AlreadySharded,

    /// Something needs the model before [`shard`](crate::Zero::shard) was called.
    #[error("this engine holds no model yet; call `shard` first")]
    NotSharded,

    /// The ranks built different models or have different configurations.
    #[error(
        "{rank} has `{here}` where rank 0 has `{on_root}`; every rank needs the same model and configuration"
    )]
    RanksDiffer {
        /// The rank that noticed: this one.
        rank: Rank,
        /// The first line that differs, here.
        here: String,
        /// The same line on rank 0.
        on_root: String,
    },

    /// A parameter the engine cannot shard.
    #[error("parameter `{name}` cannot be sharded: {reason}")]
    UnsupportedParameter {
        /// The parameter's module path.
        name: String,
        /// Why, and what to do.
        reason: String,
    },

    /// The loss given to `backward` has more or less than one element.
    #[error(
        "the loss must have exactly one element, but has shape {shape:?}; reduce it with `mean` or `sum`"
    )]
    LossNotScalar {
        /// The loss's shape.
        shape: Vec<usize>,
    },

    /// The loss does not depend on any trainable parameter.
    #[error(
        "the loss is not tracked by autodiff: compute it with the sharded model, not with `model.valid()`"
    )]
    LossUntracked,

    /// A weight that is not a positive number between 1e-20 and 1e20: beyond them, f32 gradients vanish or overflow. (On a
    /// wire of `f16`, a gradient times its weight has to stay below 65,504, and vanishes below 6e-8.) Times the loss
    /// scale, it must be between 1e-35 and 1e35.
    #[error(
        "the weight of a loss must be between 1e-20 and 1e20, and times the loss scale of {scale} between 1e-35 and 1e35; \
         it is {weight}; a rank without rows calls `skip_backward`"
    )]
    InvalidWeight {
        /// The weight given.
        weight: f64,
        /// The loss scale.
        scale: f64,
    },

    /// Backward panicked on a rank, or was refused there. Gradients gathered since the last step are dropped on every rank.
    #[error(
        "backward failed on {rank}: {message}; the gradients since the last step are dropped on every rank, run its \
         micro-batches again"
    )]
    BackwardFailed {
        /// This rank, if it failed here, else the lowest on which it did.
        rank: Rank,
        /// The panic message, where it failed on this rank.
        message: String,
    },

    /// Another rank refuses to do what this one is ready for, or its disk failed in a step: then the gradients since the last
    /// step are dropped here, too.
    #[error("{rank} refuses, see its own error; no parameter has changed on any rank")]
    RefusedElsewhere {
        /// The lowest rank that refused.
        rank: Rank,
    },

    /// Gradients came from elsewhere than this engine's `backward`; they are dropped.
    #[error(
        "a gradient of `{name}` came from elsewhere than this engine's `backward`: call `zero.backward(loss)` in place of \
         `loss.backward()`; in a loss for another engine's model, use this model frozen (`model.clone().no_grad()`)"
    )]
    StrayGradient {
        /// The parameter's module path.
        name: String,
    },

    /// The loss was computed before the last step, with parameters that are gone; its gradients are dropped.
    #[error("the loss used `{name}` as it was before the last step; run the forward pass again after a step")]
    StaleLoss {
        /// The parameter's module path.
        name: String,
    },

    /// A learning rate that is not a finite number, or negative where the optimizer takes no such.
    #[error("the learning rate must be finite, and for `Fused` not negative; it is {lr}")]
    InvalidLearningRate {
        /// The rate given.
        lr: f64,
    },

    /// A frozen parameter got a gradient.
    #[error(
        "parameter `{name}` is frozen, and got a gradient: it was unfrozen in the module alone; `Zero::unfreeze` makes \
         the engine train it"
    )]
    Unfrozen {
        /// The parameter's module path.
        name: String,
    },

    /// Which parameters are trained was to be changed, or parameters were to be added, with gradients waiting for a step.
    #[error("gradients wait for a step; freeze, unfreeze and extend between a step and the next backward")]
    GradientsPending,

    /// A pattern that matches no parameter.
    #[error("no module path matches `{pattern}`; paths look like `{example}`")]
    NoSuchParameter {
        /// The pattern given.
        pattern: String,
        /// A path of the model.
        example: String,
    },

    /// A model was to be extended, and lost parameters.
    #[error(
        "the extended model lacks `{}`; an engine does not forget parameters: keep them, frozen if they are of no use",
        names.join("`, `")
    )]
    ParametersLost {
        /// Their module paths before.
        names: Vec<String>,
    },

    /// A model or a loss from before [`freeze`](crate::Zero::freeze), [`unfreeze`](crate::Zero::unfreeze) or
    /// [`extend`](crate::Zero::extend) was used.
    #[error(
        "this model, or the one behind this loss, is from before `freeze`, `unfreeze` or `extend`; use the one that it \
         returned, and run the forward pass again"
    )]
    Replaced,

    /// A parameter group without parameters.
    #[error(
        "no parameter of the group `{pattern}`: it matches no module path, or earlier groups have them all; paths look \
         like `{example}`"
    )]
    EmptyGroup {
        /// The pattern given.
        pattern: String,
        /// A path of the model.
        example: String,
    },

    /// A parameter group that was not made.
    #[error("there is no group `{pattern}`; there are `{}`", groups.join("`, `"))]
    NoSuchGroup {
        /// The pattern given.
        pattern: String,
        /// The patterns of all groups.
        groups: Vec<String>,
    },

    /// A parameter group that would take parameters, and their state, from another one.
    #[error("the group `{pattern}` comes after the first step; make groups before it")]
    GroupTooLate {
        /// The pattern given.
        pattern: String,
    },

    /// An update is computed beside the next step, and would be lost or overlooked.
    #[error("an update is under way beside compute; call the optimizer's `flush` first")]
    UpdatePending,

    /// Something needs the master weights of all ranks, and those are on disks, which their own ranks alone can read.
    #[error(
        "other ranks have their master weights on a disk; call `unshard_to` on all ranks, and make records of what it gives"
    )]
    MastersOnDisk,

    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(Arc<CheckpointError>),

    /// Groups are known by their patterns.
    #[error("there is a group `{pattern}` already; `*` has what is in no other")]
    SameGroup {
        /// The pattern.
        pattern: String,
    },

    /// A record of Burn could not be written.
    #[error("cannot write the record {}: {reason}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },

    /// A checkpoint holds something else than this engine writes.
    #[error("the checkpoint cannot be taken up: {reason}")]
    OddCheckpoint {
        /// What is odd about it.
        reason: String,
    },

    /// An optimizer's state that checkpoints have no type for.
    #[error(
        "{optimizer} keeps tensors that are neither f32, f16 nor bf16, which checkpoints do not hold; use an optimizer of \
         `Fused`"
    )]
    StateNotSaved {
        /// The optimizer's type.
        optimizer: &'static str,
    },

    /// State of a layer that is no parameter, and that nobody saves.
    #[error(
        "`{name}` is running state of a layer, which belongs to its rank, and checkpoints hold parameters alone: save it \
         yourself, or use a layer without it, such as `LayerNorm` in place of `BatchNorm`"
    )]
    RunningState {
        /// Its module path.
        name: String,
    },

    /// An optimizer that another engine made.
    #[error("the optimizer is that of another engine; pass one that this engine's `optimizer` returned")]
    ForeignOptimizer,

    /// A rank that the engine does not have.
    #[error("there is no {rank} in a world of {world}")]
    NoSuchRank {
        /// The rank that was named.
        rank: Rank,
        /// The number of ranks.
        world: usize,
    },

    /// `step` without a `backward` on any rank.
    #[error("there is nothing to step: no rank ran `backward` since the last step")]
    NothingToStep,

    /// `step` was given a model that this engine does not hold.
    #[error(
        "parameter `{name}` is missing from the model; pass the model that this engine's `shard` returned"
    )]
    ForeignModel {
        /// A parameter of the sharded model that was not found.
        name: String,
    },

    /// Parameters of the model were changed or replaced behind the engine's back.
    #[error(
        "parameter `{name}` was changed outside of the engine (`map`, `load_record`, a layer replaced); the change would \
         be lost: make it in the function given to `shard`, and add parameters with `extend`"
    )]
    ModelChanged {
        /// The parameter's module path.
        name: String,
    },

    /// The optimizer does more than element-wise arithmetic.
    #[error(
        "{optimizer} is not element-wise: {reason}. A shard is a flat range of a parameter, so the update of an \
         element may depend on that element alone; AdamW, Adam, SGD, Lion, RMSProp and AdaGrad qualify"
    )]
    NotElementwise {
        /// The optimizer's type.
        optimizer: &'static str,
        /// What was observed.
        reason: String,
    },
}

impl ZeroError {
    /// Says what the engine was doing with a disk.
    pub(crate) fn during(self, what: &str) -> Self {
        match self {
            Self::Offload { cause, .. } => Self::Offload { during: what.to_owned(), cause },
            other => other,
        }
    }
}

impl From<ConfigError> for ZeroError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Arc::new(error))
    }
}

impl From<StoreError> for ZeroError {
    fn from(error: StoreError) -> Self {
        let during = match error {
            StoreError::Budget { .. } => "`offload.buffer_bytes` is too small for `offload.block_bytes`",
            _ => "updating parameters",
        };
        Self::Offload { during: during.to_owned(), cause: Arc::new(error) }
    }
}

impl From<UpdateError> for ZeroError {
    fn from(error: UpdateError) -> Self {
        Self::Update(Arc::new(error))
    }
}

impl From<CheckpointError> for ZeroError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Arc::new(error))
    }
}

impl From<LayoutError> for ZeroError {
    fn from(error: LayoutError) -> Self {
        Self::Layout(Arc::new(error))
    }
}

/// Names what the engine was doing when an operation between ranks failed.
pub(crate) trait During<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, ZeroError>;
}

impl<T> During<T> for Result<T, CommError> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, ZeroError> {
        self.map_err(|cause| ZeroError::Communication { during: what(), cause: Arc::new(cause) })
    }
}
