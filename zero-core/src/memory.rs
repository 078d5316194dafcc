//! Bytes per rank, computed from the layout that does the sharding.
//!
//! Master weights and gradients are f32; the compute dtype exists only in replicas and gathered parameters.
//! With `n` elements of which `t` are trainable, `s` and `u` of them in the rank's shards, `c` bytes per
//! element of the compute dtype and `o` of the optimizer, a rank holds when backward ends:
//!
//! | stage | parameters | gradients | optimizer |
//! | --- | --- | --- | --- |
//! | 0 | `4n`, and a replica `cn` unless computing in f32 | `4t` | `ot` |
//! | 1 | `cn`, and masters `4s` unless computing in f32 | `4t` | `ou` |
//! | 2 | as 1 | `4u` | `ou` |
//! | 3 | persistent ones as 2, `4s` for the others | `4u` | `ou` |
//!
//! When the compute dtype is f32 the master shard is a view into the replica, so it costs nothing. In a world
//! of one, all stages then hold the same.
//!
//! Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//! section 3.1 for what a training state is made of; the figures differ because gradients here are f32 at
//! every stage.
//!
//! ```
//! use zero_core::memory::{self, OptimizerCost};
//! use zero_core::{Bytes, DType, Layout, LayoutOptions, ParameterSpec, Rank, Stage, WorldSize};
//!
//! let weight = ParameterSpec {
//!     name: "fc.weight".into(),
//!     shape: vec![100, 10],
//!     dtype: DType::F32,
//!     trainable: true,
//!     aliases: vec![],
//! };
//! let layout = Layout::new(vec![weight], WorldSize::new(4).unwrap(), LayoutOptions::default())?;
//! let held = |stage| {
//!     memory::plan(&layout, stage, DType::BF16, OptimizerCost::ADAMW, Rank::ROOT).state.total()
//! };
//!
//! assert_eq!(held(Stage::Zero), Bytes::new(4000 + 2000 + 4000 + 8000));
//! assert_eq!(held(Stage::Three), Bytes::new(1000 + 1000 + 2000));
//! # Ok::<(), zero_core::LayoutError>(())
//! ```

use crate::{Bucket, Bytes, DType, Layout, Parameter, Rank, Stage, WorldSize};

/// What an optimizer keeps per trainable element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptimizerCost {
    /// Bytes of state per element.
    pub bytes_per_element: u64,
}

impl OptimizerCost {
    /// Adam and AdamW: two f32 moments.
    pub const ADAMW: Self = Self { bytes_per_element: 8 };
    /// Lion: one f32 moment.
    pub const LION: Self = Self { bytes_per_element: 4 };
    /// SGD with momentum: one f32 velocity.
    pub const MOMENTUM: Self = Self { bytes_per_element: 4 };
    /// Plain SGD keeps nothing.
    pub const SGD: Self = Self { bytes_per_element: 0 };

    /// The state of `numel` elements, saturating.
    pub const fn of(self, numel: usize) -> Bytes {
        Bytes::new((numel as u64).saturating_mul(self.bytes_per_element))
    }
}

/// The training state of one rank, as held when backward ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateBytes {
    /// Replicas, master weights and shards.
    pub parameters: Bytes,
    /// Accumulated gradients.
    pub gradients: Bytes,
    /// Optimizer state.
    pub optimizer: Bytes,
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.parameters + self.gradients + self.optimizer
    }
}

/// The memory one rank needs for the model, activations aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryPlan {
    /// What is held when backward ends.
    pub state: StateBytes,
    /// The window of gathered parameters at stage 3, in compute dtype, persistent ones aside: the trainable
    /// parameters of the unit with the most, and all frozen ones, which autodiff keeps from forward to backward.
    /// Zero below stage 3, and in a world of one that computes in f32, where the shard is the parameter.
    pub gathered: Bytes,
    /// The largest bucket, in f32, which is alive during backward at stages 2 and 3. Zero below, and in a
    /// world of one, where nothing is reduced.
    pub bucket: Bytes,
}

/// The memory `rank` needs; a rank outside of the world owns no shards.
pub fn plan(
    layout: &Layout,
    stage: Stage,
    compute: DType,
    optimizer: OptimizerCost,
    rank: Rank,
) -> MemoryPlan {
    let trainable =
        if stage.shards_optimizer() { layout.trainable_shard_numel(rank) } else { layout.trainable_numel() };
    let gradients =
        if stage.shards_gradients() { layout.trainable_shard_numel(rank) } else { layout.trainable_numel() };
    MemoryPlan {
        state: StateBytes {
            parameters: parameters(layout, stage, compute, rank),
            gradients: Bytes::of(gradients, DType::F32),
            optimizer: optimizer.of(trainable),
        },
        gathered: gathered(layout, stage, compute),
        bucket: bucket(layout, stage),
    }
}

/// The field-wise maximum of [`plan`] over all ranks.
pub fn plan_largest(layout: &Layout, stage: Stage, compute: DType, optimizer: OptimizerCost) -> MemoryPlan {
    // No shard is larger than rank 0's, for each parameter: see `Partition`.
    plan(layout, stage, compute, optimizer, Rank::ROOT)
}

fn parameters(layout: &Layout, stage: Stage, compute: DType, rank: Rank) -> Bytes {
    let bytes = |parameter: &Parameter| {
        let replica = Bytes::of(parameter.numel(), compute);
        let shard = Bytes::of(parameter.partition().len(rank), DType::F32);
        if stage.shards_parameters() && !parameter.persistent() {
            return shard;
        }
        if compute == DType::F32 {
            return replica;
        }
        let masters = if stage.shards_optimizer() { shard } else { Bytes::of(parameter.numel(), DType::F32) };
        replica + masters
    };
    layout.parameters().iter().map(bytes).sum()
}

fn gathered(layout: &Layout, stage: Stage, compute: DType) -> Bytes {
    let shard_is_whole = layout.world_size() == WorldSize::ONE && compute == DType::F32;
    if !stage.shards_parameters() || shard_is_whole {
        return Bytes::ZERO;
    }
    let (mut windows, mut frozen) = (vec![Bytes::ZERO; layout.units().len()], Bytes::ZERO);
    for parameter in layout.parameters().iter().filter(|parameter| !parameter.persistent()) {
        let bytes = Bytes::of(parameter.numel(), compute);
        if !parameter.trainable() {
            frozen += bytes;
        } else if let Some(unit) = layout.unit_of(parameter.index()) {
            windows[unit] += bytes;
        }
    }
    windows.into_iter().max().unwrap_or(Bytes::ZERO) + frozen
}

fn bucket(layout: &Layout, stage: Stage) -> Bytes {
    if !stage.shards_gradients() || layout.world_size() == WorldSize::ONE {
        return Bytes::ZERO;
    }
    let largest = layout.buckets().iter().map(Bucket::numel).max().unwrap_or(0);
    Bytes::of(largest, DType::F32)
}
