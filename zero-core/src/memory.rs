//! Bytes per rank, computed from the layout that does the sharding.
//!
//! Master weights are f32; the compute dtype exists in replicas, in gathered parameters and in the shards that
//! gathers read. With `n` elements of which `t` are trainable, `s` and `u` of them in the rank's shards, and per
//! element `c` bytes of the compute dtype, `a` of the dtype that gradients accumulate in and `o` of the
//! optimizer, a rank holds when backward ends:
//!
//! | stage | parameters | gradients | optimizer |
//! | --- | --- | --- | --- |
//! | 0 | `4n`, and a replica `cn` unless computing in f32 | `at` | `ot` |
//! | 1 | `cn`, and masters `4s` unless computing in f32 | `at`; `au` if reduced in every backward | `ou` |
//! | 2 | as 1 | `au`; `at` if reduced at the step | `ou` |
//! | 3 | persistent ones as 2; `4s` for the others, and `cs` unless computing in f32 | as 2 | `ou` |
//!
//! When the compute dtype is f32 the master shard is a view into the replica, so it costs nothing. In a world
//! of one, all stages then hold the same.
//!
//! What [`ReduceGradients`] costs, for a step of `b` backwards: `EveryBackward` exchanges every gradient `b` times
//! and holds a bucket, of the dtype that gradients travel in, beside `au`; `AtStep` exchanges it once, and holds
//! `a(t - u)` more from the first backward to the step.
//!
//! # Offload
//!
//! What [`Offload`] keeps elsewhere leaves the device: of each parameter the last elements, as many as
//! [`Placement::elements`] says; masters if layers compute in 16 bits, and of trainable parameters optimizer state, and
//! gradients if they are reduced in every backward. Of gradients, the engine keeps whole buckets on a disk, up to one more
//! than this counts. What is on a disk leaves memory; if that is anything, buffers of a fixed size take some, and the disk
//! has two places for each block, so that a step that fails leaves the old one. What is kept on the host is memory of the
//! rank's all the same.
//!
//! Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
//! section 3.1 for what a training state is made of; the figures differ because gradients there are f16 at
//! every stage.
//!
//! ```
//! use zero_core::{
//!     Bytes, DType, Layout, MemorySetup, OptimizerCost, ParameterSpec, Precision, Rank, Stage, WorldSize,
//!     ZeroConfig,
//! };
//!
//! let weight = ParameterSpec {
//!     name: "fc.weight".into(),
//!     shape: vec![100, 10],
//!     dtype: DType::F32,
//!     trainable: true,
//!     aliases: vec![],
//! };
//! let precision = Precision { compute: DType::BF16, ..Precision::default() };
//! let config = ZeroConfig { precision, persistence_threshold: 0, ..ZeroConfig::default() };
//! let layout = Layout::new(vec![weight], WorldSize::new(4).unwrap(), config.layout_options())?;
//! let held = |stage| {
//!     let config = ZeroConfig { stage, ..config.clone() };
//!     MemorySetup::new(&config, OptimizerCost::ADAMW).plan(&layout, Rank::ROOT).state.total()
//! };
//!
//! assert_eq!(held(Stage::Zero), Bytes::new(4000 + 2000 + 4000 + 8000));
//! assert_eq!(held(Stage::Three), Bytes::new(1000 + 500 + 1000 + 2000));
//! # Ok::<(), zero_core::LayoutError>(())
//! ```

use crate::{
    Bucket, Bytes, DType, Layout, LookAheadOptions, Offload, Parameter, Placement, Precision, Rank,
    ReduceGradients, Stage, Tier, WorldSize, ZeroConfig,
};

/// How many places a block has on a disk.
pub(crate) const PLACES_ON_DISK: u64 = 2;

/// What an optimizer keeps per trainable element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OptimizerCost {
    /// Bytes of state per element, if it is kept in f32.
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

    /// The state of `numel` elements if it is kept in `dtype` instead of f32, saturating.
    pub const fn in_dtype(self, numel: usize, dtype: DType) -> Bytes {
        let f32s = numel as u128 * self.bytes_per_element as u128;
        let bytes = f32s.saturating_mul(dtype.size() as u128).div_ceil(DType::F32.size() as u128);
        Bytes::new(if bytes > u64::MAX as u128 { u64::MAX } else { bytes as u64 })
    }
}

/// The training state of one rank, as held when backward ends, or a part of it.
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

    /// Each of its parts with that of another.
    fn zip(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        let with = |one: Bytes, other: Bytes| Bytes::new(with(one.get(), other.get()));
        Self {
            parameters: with(self.parameters, other.parameters),
            gradients: with(self.gradients, other.gradients),
            optimizer: with(self.optimizer, other.optimizer),
        }
    }
}

/// The memory one rank needs for the model, activations aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryPlan {
    /// What is held in memory when backward ends, on the device and on the host.
    pub state: StateBytes,
    /// The part of `state` that is on the host.
    pub host: StateBytes,
    /// The window of gathered parameters at stage 3, in compute dtype, persistent ones aside: the trainable
    /// parameters of the unit with the most, and all frozen ones, which autodiff keeps from forward to backward.
    /// Zero below stage 3, and in a world of one that computes in f32, where the shard is the parameter.
    pub gathered: Bytes,
    /// The most that look-ahead adds to that window: what is fetched early and what is kept.
    pub ahead: Bytes,
    /// The largest bucket, in the dtype that gradients travel in, if it is alive during backward. Zero if
    /// gradients are reduced at the step, and in a world of one, where nothing is reduced. Buckets that are on their
    /// way beside it are not counted.
    pub bucket: Bytes,
    /// The buffers between memory and the disk, [`Offload::buffer_bytes`] once whatever is there; zero if nothing is.
    pub buffers: Bytes,
    /// What the disk has to have room for: twice the state that is there, and gradients twice that with updates beside
    /// compute; pages that are not full aside.
    pub disk: StateBytes,
}

/// What of a training run decides how much memory it takes, its [`Layout`] aside.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySetup {
    /// What is sharded.
    pub stage: Stage,
    /// The element types.
    pub precision: Precision,
    /// When gradients are reduced.
    pub reduce_gradients: ReduceGradients,
    /// What the optimizer keeps.
    pub optimizer: OptimizerCost,
    /// The budgets of look-ahead; `None` for none.
    pub lookahead: Option<LookAheadOptions>,
    /// What is kept where. [`Tier::Auto`] counts as the device.
    pub offload: Offload,
}

impl MemorySetup {
    /// The setup of a configuration.
    pub fn new(config: &ZeroConfig, optimizer: OptimizerCost) -> Self {
        Self {
            stage: config.stage,
            precision: config.precision,
            reduce_gradients: config.reduce_gradients(),
            optimizer,
            lookahead: Some(config.lookahead_options()),
            offload: config.offload.clone(),
        }
    }

    /// The memory `rank` needs; a rank outside of the world owns no shards.
    pub fn plan(&self, layout: &Layout, rank: Rank) -> MemoryPlan {
        let &Self { stage, precision, optimizer, .. } = self;
        let numel =
            |sharded| if sharded { layout.trainable_shard_numel(rank) } else { layout.trainable_numel() };
        let owned_alone = stage.shards_optimizer() && self.reduce_gradients == ReduceGradients::EveryBackward;
        let state = StateBytes {
            parameters: parameters(layout, stage, precision.compute, rank),
            gradients: Bytes::of(numel(owned_alone), precision.accumulate),
            optimizer: optimizer.in_dtype(numel(stage.shards_optimizer()), precision.optimizer_state),
        };
        let gathered = gathered(layout, stage, precision.compute);
        let disk = self.on(layout, rank, Tier::Nvme);
        MemoryPlan {
            state: state.zip(disk, u64::saturating_sub),
            host: self.on(layout, rank, Tier::Host),
            gathered,
            ahead: self.ahead(layout, gathered),
            bucket: self.bucket(layout),
            buffers: if disk == StateBytes::default() { Bytes::ZERO } else { self.offload.buffer_bytes },
            disk: self.on_disk(disk),
        }
    }

    /// What `state` takes of a disk.
    fn on_disk(&self, state: StateBytes) -> StateBytes {
        // One update reads its gradients while those of the next step come.
        let turns = if self.offload.delayed_update { 2 } else { 1 };
        let StateBytes { parameters, gradients, optimizer } = state;
        let takes = |bytes: Bytes, times: u64| Bytes::new(bytes.get().saturating_mul(PLACES_ON_DISK * times));
        StateBytes {
            parameters: takes(parameters, 1),
            gradients: takes(gradients, turns),
            optimizer: takes(optimizer, 1),
        }
    }

    /// The state of `rank` on a tier other than the device.
    fn on(&self, layout: &Layout, rank: Rank, tier: Tier) -> StateBytes {
        let nothing = Placement::default();
        self.kept(layout, rank, |placement| if placement.tier == tier { placement } else { &nothing })
    }

    /// The state of `rank` that is away from the device if each kind is placed as `placed` says of its placement.
    pub(crate) fn kept<'a>(
        &'a self,
        layout: &Layout,
        rank: Rank,
        placed: impl Fn(&'a Placement) -> &'a Placement,
    ) -> StateBytes {
        let Self { precision, optimizer, offload, .. } = self;
        let elements = |placement, parameter: &Parameter| {
            placed(placement).elements(match self.stage.shards_optimizer() {
                true => parameter.partition().len(rank),
                false => parameter.numel(),
            })
        };
        let parameters = || layout.parameters().iter();
        let numel = |placement| -> usize {
            let trainable = parameters().filter(|parameter| parameter.trainable());
            trainable.map(|parameter| elements(placement, parameter)).sum()
        };
        let masters = || parameters().map(|parameter| elements(&offload.parameters, parameter)).sum();
        StateBytes {
            parameters: match precision.compute {
                DType::F32 => Bytes::ZERO,
                _ => Bytes::of(masters(), DType::F32),
            },
            gradients: match self.reduce_gradients {
                ReduceGradients::AtStep => Bytes::ZERO,
                ReduceGradients::EveryBackward => Bytes::of(numel(&offload.gradients), precision.accumulate),
            },
            optimizer: optimizer.in_dtype(numel(&offload.optimizer), precision.optimizer_state),
        }
    }

    /// The field-wise maximum of [`plan`](Self::plan) over all ranks.
    pub fn plan_largest(&self, layout: &Layout) -> MemoryPlan {
        // No shard is larger than rank 0's, for each parameter: see `Partition`.
        self.plan(layout, Rank::ROOT)
    }

    fn ahead(&self, layout: &Layout, gathered: Bytes) -> Bytes {
        let Some(LookAheadOptions { lookahead_bytes, live_bytes, reuse_bytes }) = self.lookahead else {
            return Bytes::ZERO;
        };
        if gathered == Bytes::ZERO {
            return Bytes::ZERO;
        }
        let sizes = || {
            let sharded = layout.parameters().iter().filter(|parameter| !parameter.persistent());
            sharded.map(|parameter| Bytes::of(parameter.numel(), self.precision.compute))
        };
        // Of those kept, all but the one with the farthest use are needed before it.
        let kept = match reuse_bytes {
            Bytes::ZERO => Bytes::ZERO,
            reuse => reuse + sizes().max().unwrap_or(Bytes::ZERO),
        };
        let most = sizes().sum::<Bytes>().min(live_bytes.unwrap_or(Bytes::new(u64::MAX)));
        (lookahead_bytes + kept).min(Bytes::new(most.get().saturating_sub(gathered.get())))
    }

    fn bucket(&self, layout: &Layout) -> Bytes {
        let in_backward = self.reduce_gradients == ReduceGradients::EveryBackward;
        if !in_backward || layout.world_size() == WorldSize::ONE {
            return Bytes::ZERO;
        }
        let largest = layout.buckets().iter().map(Bucket::numel).max().unwrap_or(0);
        Bytes::of(largest, self.precision.reduce())
    }
}

fn parameters(layout: &Layout, stage: Stage, compute: DType, rank: Rank) -> Bytes {
    let bytes = |parameter: &Parameter| {
        let replica = Bytes::of(parameter.numel(), compute);
        let shard = Bytes::of(parameter.partition().len(rank), DType::F32);
        if stage.shards_parameters() && !parameter.persistent() {
            let read_by_gathers = match compute {
                DType::F32 => Bytes::ZERO,
                _ => Bytes::of(parameter.partition().len(rank), compute),
            };
            return shard + read_by_gathers;
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
