//! One step of a fused optimizer on a CubeCL device: shards, states and gradients stay where they are.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::Tensor;
use zero_core::{DType, ParameterIndex};
use zero_offload::{HostOptimizer, Update};

use crate::ZeroError;
use crate::arena::{Arena, Content, Places, Port};
use crate::cube;
use crate::engine::Engine;
use crate::fused::Fused;
use crate::fused_state::FusedState;
use crate::held::{Held, Updated};
use crate::kernels::{self, Buffer, UpdateBuffers, UpdateRow};
use crate::owned::OwnedGradients;
use crate::rule::{Finished, Job, ShardUpdate};

/// Updates all shards, with a launch for each bucket of them.
pub(crate) fn update(job: Job<Fused>, port: Port) -> Finished<Fused> {
    let Job { engine, optimizers, updates, mut gradients, factor, mut states } = job;
    let updating = Some(engine.phase.begin_update());
    // What is shown has the memory, too. All ranks have agreed on the step: none computes with it any more.
    if let Some(shown) = &engine.transports.shards {
        shown.withdraw();
    }
    let mut by_bucket: BTreeMap<usize, HashMap<ParameterIndex, Change>> = BTreeMap::new();
    for ShardUpdate { parameter, group, lr, step } in updates {
        let Some(bucket) = engine.layout.bucket_of(parameter) else { continue };
        let Fused(optimizer) = optimizers[group];
        let update = Update { lr, step, gradient_factor: factor };
        by_bucket.entry(bucket).or_default().insert(parameter, Change { optimizer, update });
    }
    let mut step =
        Step { engine: &engine, port, gradients: &mut gradients, states: &mut states, updated: Vec::new() };
    let outcome = by_bucket.into_iter().try_for_each(|(bucket, changes)| step.bucket(bucket, changes));
    let updated = step.updated;
    // Shards of earlier buckets are new, those of later ones are not.
    Finished { is_torn: outcome.is_err(), states, outcome: outcome.map(|()| updated), updating }
}

/// What is done to one shard.
#[derive(Clone, Copy, Debug)]
struct Change {
    optimizer: HostOptimizer,
    update: Update,
}

/// One shard of a buffer. Those that are not updated now are there as well: left where they were, they would keep a whole
/// buffer of old values alive.
#[derive(Debug)]
struct Member {
    parameter: ParameterIndex,
    change: Option<Change>,
}

/// What a parameter has beside its shard.
enum Left {
    /// The shard is the replica, too.
    ShardIsWhole,
    /// The replica.
    Rest(Box<Option<Tensor<1>>>),
}

/// The gradients of a bucket on the device, and where in them those of parameters lie.
struct Gradients {
    buffer: Buffer,
    /// By parameter: where runs begin in the shard, where in the buffer, and how many elements they have.
    runs: HashMap<ParameterIndex, Vec<[usize; 3]>>,
}

struct Step<'a> {
    engine: &'a Engine,
    port: Port,
    gradients: &'a mut OwnedGradients,
    /// By parameter.
    states: &'a mut [Option<FusedState>],
    updated: Vec<(ParameterIndex, Updated)>,
}

impl Step<'_> {
    fn bucket(
        &mut self,
        bucket: usize,
        mut changes: HashMap<ParameterIndex, Change>,
    ) -> Result<(), ZeroError> {
        let gradients = self.take_gradients(bucket, &changes)?;
        // By how many states they have.
        let mut batches: BTreeMap<usize, Vec<Member>> = BTreeMap::new();
        for &parameter in self.engine.layout.buckets()[bucket].parameters() {
            let change = changes.remove(&parameter);
            let states = match (&change, &self.states[parameter.index()]) {
                (Some(change), _) => change.optimizer.states().len(),
                (None, Some(state)) if self.engine.is_by_itself(parameter) => state.len(),
                (None, _) => continue,
            };
            batches.entry(states).or_default().push(Member { parameter, change });
        }
        batches.into_iter().try_for_each(|(states, members)| self.batch(states, members, &gradients))
    }

    /// Updates shards that lie, or are put, side by side.
    fn batch(&mut self, states: usize, members: Vec<Member>, gradients: &Gradients) -> Result<(), ZeroError> {
        let (engine, precision) = (self.engine, &self.engine.config.precision);
        let lengths = members.iter().map(|member| engine.holdings.owned(member.parameter).len());
        let places = self.port.places(lengths.collect());
        let (shards, left): (Vec<_>, Vec<_>) = members.iter().map(|member| self.move_out(member)).unzip();
        let values = Arena::of(&self.port, &places, DType::F32, shards)?;
        let columns = self.columns(states, &members)?.into_iter();
        let columns = columns.map(|column| Arena::of(&self.port, &places, precision.optimizer_state, column));
        let columns: Vec<_> = columns.collect::<Result<_, ZeroError>>()?;
        let copy = engine.is_mixed().then(|| Arena::empty(&self.port, &places, precision.compute));
        let buffers = UpdateBuffers {
            values: values.buffer(&places)?,
            gradients: gradients.buffer.clone(),
            states: columns.iter().map(|column| column.buffer(&places)).collect::<Result<_, _>>()?,
            copy: copy.as_ref().map(|copy| copy.buffer(&places)).transpose()?,
        };
        kernels::update(&self.port.client, &rows(&members, &places, gradients), &buffers)?;
        // Or it would be one more who has the memory.
        drop(buffers);
        for column in columns {
            for (member, view) in members.iter().zip(column.views(&places)) {
                if let Some(state) = &mut self.states[member.parameter.index()] {
                    state.device.push(view);
                }
            }
        }
        let mut copies = copy.map(|copy| copy.tensors(&places).into_iter());
        for ((member, shard), left) in members.into_iter().zip(values.tensors(&places)).zip(left) {
            let copy = copies.as_mut().and_then(Iterator::next);
            self.put_back(&member, shard, copy, left);
        }
        Ok(())
    }

    /// Moves a shard out, and what goes back beside it if it is not updated.
    fn move_out(&self, member: &Member) -> (Content, Left) {
        // What is shown of it lies in a buffer with the copies of others, and is made anew.
        let Held { shard, whole, shown: _ } = self.engine.holdings.take(member.parameter);
        let left = match whole.filter(|_| member.change.is_none()) {
            Some(whole) if cube::same_extent(whole.clone(), shard.clone()) => Left::ShardIsWhole,
            whole => Left::Rest(Box::new(whole)),
        };
        (Content::Device(Box::new(cube::buffer(shard))), left)
    }

    /// Moves states out, by state and then by member.
    fn columns(&mut self, states: usize, members: &[Member]) -> Result<Vec<Vec<Content>>, ZeroError> {
        let mut columns: Vec<Vec<Content>> = (0..states).map(|_| Vec::with_capacity(members.len())).collect();
        for &Member { parameter, change } in members {
            let state = &mut self.states[parameter.index()];
            if let (None, Some(change)) = (&state, change) {
                *state = Some(FusedState::new(&change.optimizer, self.engine, parameter)?);
            }
            let moved = state.as_mut().into_iter().flat_map(FusedState::take);
            columns.iter_mut().zip(moved).for_each(|(column, state)| column.push(state));
        }
        Ok(columns)
    }

    fn put_back(&mut self, member: &Member, shard: Tensor<1>, copy: Option<Tensor<1>>, left: Left) {
        if member.change.is_some() {
            self.updated.push((member.parameter, Updated { shard, copy }));
            return;
        }
        let held = match left {
            Left::ShardIsWhole => Held { whole: Some(shard.clone()), ..Held::new(shard) },
            Left::Rest(whole) => Held { whole: *whole, ..Held::new(shard) },
        };
        self.engine.holdings.put(member.parameter, held);
    }

    /// Moves the gradients of a bucket to the device, as far as they are not there.
    fn take_gradients(
        &mut self,
        bucket: usize,
        changes: &HashMap<ParameterIndex, Change>,
    ) -> Result<Gradients, ZeroError> {
        let Self { engine, port, gradients, .. } = self;
        let accumulate = engine.config.precision.accumulate;
        if let OwnedGradients::Whole(all) = gradients {
            let mut pieces = Vec::new();
            let mut lengths = Vec::new();
            let parameters = engine.layout.buckets()[bucket].parameters().iter();
            let parameters: Vec<_> = parameters.filter(|parameter| changes.contains_key(parameter)).collect();
            for &parameter in &parameters {
                let gradient = all[parameter.index()].take();
                let gradient = gradient.unwrap_or_else(|| Tensor::empty([0], &engine.device));
                lengths.push(gradient.shape().num_elements());
                pieces.push(Content::Device(Box::new(cube::buffer(gradient))));
            }
            let places = port.places(lengths.clone());
            let arena = Arena::of(port, &places, accumulate, pieces)?;
            let runs = parameters.into_iter().zip(places.starts.iter().zip(lengths));
            let runs = runs.map(|(parameter, (start, len))| (*parameter, vec![[0, *start, len]])).collect();
            return Ok(Gradients { buffer: arena.buffer(&places)?, runs });
        }
        let runs = changes.keys().map(|parameter| (*parameter, gradients.places(engine, *parameter)));
        let runs = runs.collect();
        let tensor = gradients.take_to_device(engine, bucket)?;
        let len = tensor.shape().num_elements();
        let handle = cube::buffer(tensor).handle;
        Ok(Gradients { buffer: Buffer::new(handle, accumulate, len)?, runs })
    }
}

/// What a launch does to those that are updated.
fn rows(members: &[Member], places: &Places, gradients: &Gradients) -> Vec<UpdateRow> {
    let mut rows = Vec::new();
    for (member, &start) in members.iter().zip(&places.starts) {
        let Some(Change { optimizer, update }) = member.change else { continue };
        for &[first, from, len] in gradients.runs.get(&member.parameter).into_iter().flatten() {
            let here = start + first;
            let (values, states, copy) = (here, here, here);
            rows.push(UpdateRow { optimizer, update, len, values, gradients: from, states, copy });
        }
    }
    rows
}
