//! Optimizers that update a shard in one pass over host memory.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use zero_core::{DType, ParameterIndex, Tier};
use zero_offload::{
    HostBuffer, HostOptimizer, OptimizerConfig, StagedUpdate, StateSpec, Table, Update, UpdateError, Workers,
};

use crate::ZeroError;
use crate::engine::Engine;
use crate::exclusive::Exclusive;
use crate::floats::FloatsMut;
use crate::held::Updated;
use crate::host::tensor_from_buffer;
use crate::owned::OwnedGradients;
use crate::rule::{Host, Job, Rule, ShardUpdate};

/// An optimizer for shards in host memory: one pass scales the gradient, decays, updates moments and parameter, and writes
/// what layers compute with. Several times as fast as Burn's own on the CPU, in less memory.
///
/// Where nobody else holds a shard's memory it is updated in place. The threads are those of the rank's share of the host's
/// cores.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
/// use zero_burn::{Adam, Fused, LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
///
/// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
/// let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
/// let mut model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
/// let mut optimizer = zero.optimizer(Fused::new(Adam { beta2: 0.95, ..Adam::ADAMW })?)?;
/// zero.backward(model.forward(Tensor::<2>::ones([2, 8], zero.device())).mean())?;
/// optimizer.step(1e-3, &mut model)?;
/// # Ok(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fused(HostOptimizer);

impl Fused {
    /// The optimizer with the hyper-parameters of [`Adam`](crate::Adam) (and AdamW), [`Adagrad`](crate::Adagrad),
    /// [`Lion`](crate::Lion) or [`Sgd`](crate::Sgd).
    ///
    /// # Errors
    ///
    /// [`ZeroError::HyperParameter`].
    pub fn new(config: impl Into<OptimizerConfig>) -> Result<Self, ZeroError> {
        HostOptimizer::new(config).map(Self).map_err(|error| ZeroError::HyperParameter(Arc::new(error)))
    }

    /// The hyper-parameters.
    pub fn config(&self) -> &OptimizerConfig {
        self.0.config()
    }
}

/// What is kept of a shard: PyTorch's states, in the type that the configuration says.
#[derive(Debug)]
pub struct FusedState {
    /// Updates so far.
    steps: u64,
    /// Of the first elements.
    memory: Vec<HostBuffer>,
    /// Of the others.
    disk: Option<Table>,
}

impl FusedState {
    fn new(optimizer: &HostOptimizer, engine: &Engine, parameter: ParameterIndex) -> Result<Self, ZeroError> {
        let (dtype, placement) = (engine.config.precision.optimizer_state, &engine.config.offload.optimizer);
        let numel = engine.held(parameter).shard.shape().num_elements();
        let specs = optimizer.states();
        let on_disk = match placement.tier {
            Tier::Nvme if !specs.is_empty() => placement.elements(numel),
            _ => 0,
        };
        let fill = |spec: &StateSpec, bytes: &mut [u8]| match dtype {
            DType::BF16 => bytemuck::cast_slice_mut(bytes).fill(bf16::from_f32(spec.initial)),
            _ => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
        };
        let memory = specs.iter().map(|spec| {
            let mut buffer = engine.states.take((numel - on_disk) * dtype.size());
            fill(spec, &mut buffer);
            buffer
        });
        let memory = memory.collect();
        let disk = (on_disk > 0)
            .then(|| {
                let columns = specs.iter().map(|spec| {
                    let mut initial = vec![0; dtype.size()];
                    fill(spec, &mut initial);
                    (spec.name, dtype.size(), initial)
                });
                let name = engine.parameter(parameter).name();
                let table = engine.disk()?.reserve(name, on_disk, &columns.collect::<Vec<_>>());
                table.map_err(|error| ZeroError::from(error).during("making room for optimizer state"))
            })
            .transpose()?;
        Ok(Self { steps: 0, memory, disk })
    }

    /// Elements whose state is in memory.
    fn in_memory(&self, numel: usize) -> usize {
        numel - self.disk.as_ref().map_or(0, |table| table.rows() as usize)
    }
}

/// One shard while it is updated.
struct Shard<'a> {
    optimizer: &'a HostOptimizer,
    parameter: ParameterIndex,
    update: Update,
    values: Exclusive,
    /// The new values in the type of layers, if that is another one.
    copy: Option<HostBuffer>,
}

/// What is common to the shards of a step.
struct Step<'a> {
    workers: &'a Workers,
    /// The types of layers and of states.
    compute: DType,
    stored: DType,
    gradients: &'a OwnedGradients,
    engine: &'a Engine,
}

impl Step<'_> {
    /// Updates the elements `rows` of a shard; `states` are theirs.
    fn update(
        &self,
        shard: &mut Shard<'_>,
        rows: Range<usize>,
        states: &mut [&mut [u8]],
    ) -> Result<(), UpdateError> {
        let Shard { optimizer, parameter, update, values, copy } = shard;
        self.gradients.each_own(self.engine, *parameter, |start, gradient| {
            let range = rows.start.max(start)..rows.end.min(start + gradient.len());
            if range.is_empty() {
                return Ok(());
            }
            let gradient = gradient.slice(range.start - start..range.end - start);
            let in_rows = range.start - rows.start..range.end - rows.start;
            let mut states: Vec<_> = states
                .iter_mut()
                .map(|state| FloatsMut::new(self.stored, state).slice(in_rows.clone()).into())
                .collect();
            let copy =
                copy.as_mut().map(|copy| FloatsMut::new(self.compute, copy).slice(range.clone()).into());
            optimizer.update(
                self.workers,
                *update,
                &mut values.values()[range],
                gradient.into(),
                &mut states,
                copy,
            )
        })
    }
}

impl Rule for Fused {
    type State = FusedState;

    fn check(&self, Host(engine): Host<'_>) -> Result<(), ZeroError> {
        engine.workers().map(drop)
    }

    fn begin(
        &self,
        Host(engine): Host<'_>,
        parameter: ParameterIndex,
    ) -> Result<Option<FusedState>, ZeroError> {
        let is_disk = engine.config.offload.optimizer.tier == Tier::Nvme;
        let wanted = is_disk && engine.parameter(parameter).trainable();
        wanted.then(|| FusedState::new(&self.0, engine, parameter)).transpose()
    }

    fn takes_rate(&self, lr: f64) -> bool {
        lr.is_finite() && lr >= 0.0
    }

    fn update(job: Job<'_, Self>) -> Result<Vec<(ParameterIndex, Updated)>, ZeroError> {
        let Job { engine, groups, updates, gradients, factor, states } = job;
        let is_disk = engine.config.offload.optimizer.tier == Tier::Nvme;
        let (compute, stored) = (engine.config.precision.compute, engine.config.precision.optimizer_state);
        let step = Step { workers: engine.workers()?, compute, stored, gradients: &gradients, engine };
        let shards = updates.into_iter().map(|ShardUpdate { parameter, group, lr }| {
            let Self(optimizer) = &groups[group].optimizer;
            let state = &mut states[parameter.index()];
            let steps = match state {
                Some(state) => state.steps,
                None => state.insert(FusedState::new(optimizer, engine, parameter)?).steps,
            };
            let values = match is_disk {
                // It may fail: then the old values are still there.
                true => Exclusive::copy(engine.held(parameter).shard),
                false => Exclusive::new(engine.take_shard(parameter)?),
            };
            Ok(Shard {
                optimizer,
                parameter,
                update: Update { lr, step: steps + 1, gradient_factor: factor },
                copy: (compute != DType::F32).then(|| engine.copies.take(values.len() * compute.size())),
                values,
            })
        });
        let shards = shards.collect::<Result<Vec<_>, ZeroError>>();
        // Room on a disk may have failed on one rank alone.
        let mut shards = if is_disk { engine.together(shards)? } else { shards? };
        if is_disk {
            update_on_disk(&step, &mut shards, states)?;
        }
        let mut updated = Vec::with_capacity(shards.len());
        for mut shard in shards {
            let Some(state) = &mut states[shard.parameter.index()] else { continue };
            let rows = 0..state.in_memory(shard.values.len());
            let mut memory: Vec<&mut [u8]> = state.memory.iter_mut().map(|state| &mut state[..]).collect();
            step.update(&mut shard, rows, &mut memory)?;
            state.steps += 1;
            let copy = shard.copy.map(|copy| tensor_from_buffer(copy, compute, &engine.device));
            updated
                .push((shard.parameter, Updated { shard: shard.values.into_tensor(&engine.device), copy }));
        }
        Ok(updated)
    }

    fn bytes(state: &FusedState) -> u64 {
        state.memory.iter().map(|state| state.len() as u64).sum()
    }
}

/// Updates the elements whose states are on the disk, on all ranks or on none. Collective.
fn update_on_disk(
    step: &Step<'_>,
    shards: &mut [Shard<'_>],
    states: &mut [Option<FusedState>],
) -> Result<(), ZeroError> {
    let engine = step.engine;
    let disk = engine.disk()?;
    // The tables, each with its shard and the first row's element.
    let (mut tables, mut places) = (Vec::new(), Vec::new());
    for (at, shard) in shards.iter().enumerate() {
        let state = states[shard.parameter.index()].as_mut();
        let Some(state) = state else { continue };
        let first = state.in_memory(shard.values.len());
        if let Some(table) = state.disk.take() {
            tables.push(table);
            places.push((at, first));
        }
    }
    let width = step.stored.size() as u64;
    let bytes = tables.iter().map(|table: &Table| table.rows() * table.width() as u64 * width).sum();
    let outcome = disk.update(bytes, |pipeline| {
        let staged = pipeline.stage(&mut tables, |tile| {
            let (at, first) = places[tile.table];
            let rows = first + tile.rows.start as usize..first + tile.rows.end as usize;
            step.update(&mut shards[at], rows, &mut tile.columns).map_err(ZeroError::from)
        });
        engine.together(staged).map(StagedUpdate::commit)
    });
    for (table, (at, _)) in tables.into_iter().zip(places) {
        if let Some(state) = &mut states[shards[at].parameter.index()] {
            state.disk = Some(table);
        }
    }
    outcome
}
