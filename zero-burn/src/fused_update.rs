//! One step of a fused optimizer.

use std::convert::Infallible;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::tensor::Tensor;
use zero_core::{DType, ParameterIndex, Tier};
use zero_offload::{HostBuffer, HostOptimizer, Table, Update, Workers};

use crate::ZeroError;
use crate::engine::Engine;
use crate::exclusive::Exclusive;
use crate::floats::{Floats, FloatsMut};
use crate::fused::Fused;
use crate::fused_state::FusedState;
use crate::held::Updated;
use crate::host::{HostTensor, tensor_from_buffer};
use crate::owned::{OwnedGradients, PIECE};
use crate::phase::Updating;
use crate::rule::{Finished, Job, ShardUpdate};
use crate::staged::{self, Staged};

/// New values of this rank's shards, which nobody has seen yet.
#[derive(Debug)]
pub struct FusedUpdate {
    engine: Arc<Engine>,
    gradients: OwnedGradients,
    shards: Vec<Shard>,
    /// By parameter; without the tables that are in `staged`.
    states: Vec<Option<FusedState>>,
    /// What is on a disk, beside what was there; nothing if nothing is.
    staged: Result<Option<Staged>, ZeroError>,
    /// Whether states in memory were updated half way.
    is_torn: bool,
    /// Held where shards were moved out.
    updating: Option<Updating>,
}

/// One shard while it is updated.
#[derive(Debug)]
struct Shard {
    optimizer: HostOptimizer,
    parameter: ParameterIndex,
    update: Update,
    /// How many elements it has.
    numel: usize,
    /// All of them, or the first if masters are on a disk.
    values: Values,
    /// The new values in the type of layers, if that is another one.
    copy: Option<HostBuffer>,
}

/// What a shard holds while it is updated.
#[derive(Debug)]
enum Values {
    /// To be written to.
    Here(Exclusive),
    /// As it was; what it becomes takes the place of its gradient, which nobody needs any more.
    InGradient(HostTensor),
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Self::Here(values) => values.len(),
            Self::InGradient(old) => old.as_slice().len(),
        }
    }

    /// The new values, in the shard's memory if nobody else has it.
    fn end(self, engine: &Engine, parameter: ParameterIndex, gradients: &mut OwnedGradients) -> Tensor<1> {
        let values = match self {
            Self::Here(values) => values,
            Self::InGradient(old) => {
                drop(old);
                let mut values = Exclusive::to_overwrite(engine.holdings.take_shard(parameter));
                let all = 0..values.len();
                let Ok(()) = gradients.each_own_mut::<Infallible>(engine, parameter, all, |start, new| {
                    values.values()[start..start + new.len()].copy_from_slice(new);
                    Ok(())
                });
                values
            }
        };
        values.into_tensor(&engine.home)
    }
}

impl FusedUpdate {
    /// Computes new values; if states are on a disk, only of elements that have something there:
    /// [`finish`](Self::finish) does the others, when nothing can fail any more. `is_beside` leaves alone what layers may be
    /// reading.
    pub(crate) fn prepare(job: Job<Fused>, is_beside: bool) -> Self {
        let Job { engine, optimizers, updates, gradients, factor, states } = job;
        let mut this = Self {
            engine,
            gradients,
            shards: Vec::with_capacity(updates.len()),
            states,
            staged: Ok(None),
            is_torn: false,
            updating: None,
        };
        let keeps_old = is_beside || this.has_states_on_disk() || this.engine.spill.is_some();
        if !keeps_old {
            this.updating = Some(this.engine.phase.begin_update());
        }
        let prepared = updates.into_iter().try_for_each(|update| {
            let Fused(optimizer) = optimizers[update.group];
            this.begin(update, optimizer, factor, keeps_old)
        });
        this.staged = prepared.and_then(|()| match this.has_states_on_disk() {
            true => this.stage().map(Some),
            false => this.update_memory().map(|()| None),
        });
        this
    }

    fn has_states_on_disk(&self) -> bool {
        self.engine.offload().optimizer.tier == Tier::Nvme
    }

    fn begin(
        &mut self,
        ShardUpdate { parameter, lr, step, .. }: ShardUpdate,
        optimizer: HostOptimizer,
        factor: f64,
        keeps_old: bool,
    ) -> Result<(), ZeroError> {
        let has_states_on_disk = self.has_states_on_disk();
        let engine = &self.engine;
        let state = &mut self.states[parameter.index()];
        if state.is_none() {
            *state = Some(FusedState::new(&optimizer, engine, parameter)?);
        }
        let shard = || engine.held(parameter).shard;
        let values = match keeps_old {
            false => Values::Here(Exclusive::new(engine.holdings.take_shard(parameter))),
            // Memory is short.
            true if has_states_on_disk && self.gradients.has_room_for_values(engine, parameter) => {
                Values::InGradient(HostTensor::new(shard()))
            }
            true => Values::Here(Exclusive::copy(shard())),
        };
        let numel = engine.holdings.owned(parameter).len();
        let compute = engine.config.precision.compute;
        let copy = (compute != DType::F32).then(|| engine.copies.take(numel * compute.size()));
        let update = Update { lr, step, gradient_factor: factor };
        self.shards.push(Shard { optimizer, parameter, update, numel, values, copy });
        Ok(())
    }

    /// Updates the elements of which nothing is on a disk.
    fn update_memory(&mut self) -> Result<(), ZeroError> {
        let kind = Kind::of(&self.engine)?;
        for shard in &mut self.shards {
            let Some(state) = &mut self.states[shard.parameter.index()] else { continue };
            let rows = 0..(shard.numel - rows(&state.disk)).min(shard.values.len());
            let mut memory: Vec<&mut [u8]> = state.memory.iter_mut().map(|state| &mut state[..]).collect();
            self.is_torn = true;
            shard.update(kind, &self.engine, &mut self.gradients, rows, None, &mut memory)?;
            self.is_torn = false;
        }
        Ok(())
    }

    /// Updates the elements whose states, or masters, are on the disk.
    fn stage(&mut self) -> Result<Staged, ZeroError> {
        let Self { engine, gradients, shards, states, .. } = self;
        let (kind, disk) = (Kind::of(engine)?, engine.disk()?);
        let (mut tables, mut owners) = (Vec::new(), Vec::new());
        // Of each table its shard and the element of its first row.
        let mut places = Vec::new();
        for (at, shard) in shards.iter().enumerate() {
            let Some(state) = &mut states[shard.parameter.index()] else { continue };
            let here = tables.len();
            for (table, owner) in staged::take(engine, shard.parameter, state) {
                tables.push(table);
                owners.push(owner);
            }
            let mut first = shard.numel - rows(&tables[here..]);
            for table in &tables[here..] {
                places.push((at, first));
                first += table.rows() as usize;
            }
        }
        let bytes = tables.iter().map(Table::bytes).sum();
        let mut panic = None;
        let update = disk.update(bytes, |pipeline| {
            pipeline.stage(tables, |tile| {
                let (at, first) = places[tile.table];
                let rows = first + tile.rows.start as usize..first + tile.rows.end as usize;
                let (masters, states) = tile.columns.split_at_mut(usize::from(owners[tile.table].has_master));
                let master = masters.first_mut().map(|master| bytemuck::cast_slice_mut(master));
                let run = || shards[at].update(kind, engine, gradients, rows, master, states);
                catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|caught| {
                    panic = Some(caught);
                    Err(ZeroError::UpdatePending)
                })
            })
        });
        match update {
            Ok(update) => Ok(Staged { engine: Arc::clone(engine), owners, update: Some(update) }),
            Err((tables, error)) => {
                staged::give_back(engine, states, &owners, tables);
                // Not before master weights are where they belong.
                panic.map_or(Err(error), |panic| resume_unwind(panic))
            }
        }
    }

    /// Makes it final: on all ranks or, where states are on a disk, on none.
    pub(crate) fn finish(mut self) -> Finished<Fused> {
        if self.updating.is_none() {
            self.updating = Some(self.engine.phase.begin_update());
        }
        let staged = std::mem::replace(&mut self.staged, Ok(None));
        let outcome = if self.has_states_on_disk() {
            let ready = self.engine.together(staged.as_ref().map(|_| ()).map_err(Clone::clone));
            if let Ok(Some(staged)) = staged {
                staged.end(ready.is_ok(), &mut self.states);
            }
            // After what can fail.
            ready.and_then(|()| self.update_memory())
        } else {
            staged.map(drop)
        };
        let Self { engine, mut gradients, shards, states, is_torn, updating, .. } = self;
        let finish = |Shard { parameter, values, copy, .. }: Shard| {
            let compute = engine.config.precision.compute;
            let copy = copy.map(|copy| tensor_from_buffer(copy, compute, &engine.home));
            (parameter, Updated { shard: values.end(&engine, parameter, &mut gradients), copy })
        };
        let outcome = outcome.map(|()| shards.into_iter().map(finish).collect());
        Finished { states, outcome, is_torn, updating }
    }
}

/// How many rows tables have, together.
fn rows(tables: &[Table]) -> usize {
    tables.iter().map(|table| table.rows() as usize).sum()
}

/// Who updates, and the types of layers and of states.
#[derive(Clone, Copy)]
struct Kind<'a> {
    workers: &'a Workers,
    compute: DType,
    stored: DType,
}

impl<'a> Kind<'a> {
    fn of(engine: &'a Engine) -> Result<Self, ZeroError> {
        let precision = &engine.config.precision;
        Ok(Self { workers: engine.workers()?, compute: precision.compute, stored: precision.optimizer_state })
    }
}

impl Shard {
    /// Updates the elements `rows`, whose values are in memory unless they are `master`; `states` are theirs.
    fn update(
        &mut self,
        Kind { workers, compute, stored }: Kind<'_>,
        engine: &Engine,
        gradients: &mut OwnedGradients,
        rows: Range<usize>,
        master: Option<&mut [f32]>,
        states: &mut [&mut [u8]],
    ) -> Result<(), ZeroError> {
        let Self { optimizer, parameter, update, values, copy, .. } = self;
        let mut apply = |start: usize, values: &mut [f32], gradient: Floats<'_>| {
            let range = start..start + gradient.len();
            let in_rows = range.start - rows.start..range.end - rows.start;
            let mut states: Vec<_> = states
                .iter_mut()
                .map(|state| FloatsMut::new(stored, state).slice(in_rows.clone()).into())
                .collect();
            let copy = copy.as_mut().map(|copy| FloatsMut::new(compute, copy).slice(range).into());
            Ok(optimizer.update(workers, *update, values, gradient.into(), &mut states, copy)?)
        };
        let values = match (master, values) {
            (Some(master), _) => master,
            (None, Values::Here(values)) => &mut values.values()[rows.clone()],
            (None, Values::InGradient(old)) => {
                let mut memory = engine.scratch.take(PIECE.min(rows.len()) * size_of::<f32>());
                return gradients.each_own_mut(engine, *parameter, rows.clone(), |start, gradient| {
                    for (nth, gradient) in gradient.chunks_mut(PIECE).enumerate() {
                        let start = start + nth * PIECE;
                        let new = &mut memory.as_mut_slice()[..gradient.len()];
                        new.copy_from_slice(&old.as_slice()[start..start + gradient.len()]);
                        apply(start, new, Floats::F32(gradient))?;
                        gradient.copy_from_slice(new);
                    }
                    Ok(())
                });
            }
        };
        gradients.each_own(engine, *parameter, rows.clone(), &mut |start, gradient| {
            let in_rows = start - rows.start..start - rows.start + gradient.len();
            apply(start, &mut values[in_rows], gradient)
        })
    }
}
