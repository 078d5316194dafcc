//! What may update shards.

use std::sync::Arc;

use burn::optim::Optimizer;
use burn::tensor::Tensor;
use serde_json::{Map, Value};
use zero_core::{DType, ParameterIndex, Tier};

use crate::ZeroError;
use crate::elementwise;
use crate::engine::Engine;
use crate::held::Updated;
use crate::kept::Kept;
use crate::owned::OwnedGradients;
use crate::phase::Updating;
use crate::stored::{Pattern, Stored};

/// An optimizer that can update shards: any element-wise one of Burn, or [`Fused`](crate::Fused).
pub trait ShardOptimizer: Rule {}

impl<R: Rule> ShardOptimizer for R {}

/// How shards are updated.
pub trait Rule: Clone {
    /// What is kept of a shard from step to step.
    type State: Kept + Send + Sync;

    /// An update that nobody has seen yet.
    type Prepared;

    /// Refuses what cannot update the shards of an engine.
    fn check(&self, host: Host<'_>) -> Result<(), ZeroError>;

    /// The state of a parameter before its first update, if there is to be room for it from the beginning.
    fn begin(&self, host: Host<'_>, parameter: ParameterIndex) -> Result<Option<Self::State>, ZeroError>;

    /// The hyper-parameters, for who reads a checkpoint.
    fn hyper_parameters(&self) -> Map<String, Value>;

    /// Names and types of the tensors in the state of a shard that was updated; the same on all ranks.
    fn tensors(&self, host: Host<'_>) -> Result<Vec<(String, DType)>, ZeroError>;

    /// A state of a shard that was updated before, to be filled; `old` is the present one, if there is one.
    fn blank(
        &self,
        host: Host<'_>,
        parameter: ParameterIndex,
        old: Option<Self::State>,
        scalars: Option<&Map<String, Value>>,
    ) -> Result<Self::State, ZeroError>;

    /// Whether these are the scalars of a state; if not, why not.
    fn check_scalars(&self, _: Host<'_>, _: Option<&Map<String, Value>>) -> Result<(), String> {
        Ok(())
    }

    /// Whether shards can be updated at this rate.
    fn takes_rate(&self, lr: f64) -> bool {
        // Parameters are `f32`.
        (lr as f32).is_finite()
    }

    /// Computes what becomes of this rank's shards, beside whatever else runs if `is_beside`. Others see it, and it cannot
    /// be taken back, only when it is [finished](Self::finish).
    fn prepare(job: Job<Self>, is_beside: bool) -> Self::Prepared;

    /// Gives the states back, and the new shards; nothing has changed if it fails, unless it is torn. Collective where
    /// state is on a disk.
    fn finish(prepared: Self::Prepared) -> Finished<Self>;

    /// Bytes of memory that a state takes.
    fn bytes(state: &Self::State) -> u64;
}

/// The engine whose shards are updated.
#[derive(Clone, Copy, Debug)]
pub struct Host<'a>(pub(crate) &'a Engine);

/// What one step has to do.
pub struct Job<R: Rule> {
    pub(crate) engine: Arc<Engine>,
    /// By group.
    pub(crate) optimizers: Vec<R>,
    pub(crate) updates: Vec<ShardUpdate>,
    pub(crate) gradients: OwnedGradients,
    /// What the summed gradients are multiplied by first.
    pub(crate) factor: f64,
    /// By parameter.
    pub(crate) states: States<R>,
}

/// What is kept, by parameter.
pub(crate) type States<R> = Vec<Option<<R as Rule>::State>>;

/// The end of an update.
pub struct Finished<R: Rule> {
    pub(crate) states: States<R>,
    pub(crate) outcome: Result<Vec<(ParameterIndex, Updated)>, ZeroError>,
    /// Whether it failed half way: then some states are of this step and some of the one before.
    pub(crate) is_torn: bool,
    /// Held where shards were moved out.
    pub(crate) updating: Option<Updating>,
}

impl<R: Rule> std::fmt::Debug for Finished<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Finished").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

impl<R: Rule> std::fmt::Debug for Job<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("updates", &self.updates)
            .field("factor", &self.factor)
            .finish_non_exhaustive()
    }
}

/// One update of one shard, which has elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardUpdate {
    pub(crate) parameter: ParameterIndex,
    pub(crate) group: usize,
    pub(crate) lr: f64,
    /// Which update of the parameter it is, from 1.
    pub(crate) step: u64,
}

impl<O: Optimizer> Rule for O {
    type State = Stored<O::State<1>>;
    type Prepared = Finished<Self>;

    fn check(&self, Host(engine): Host<'_>) -> Result<(), ZeroError> {
        let offload = engine.offload();
        if offload.optimizer.tier == Tier::Nvme || offload.delayed_update {
            return Err(ZeroError::NotOffloadable { optimizer: std::any::type_name::<O>() });
        }
        elementwise::check(self, &engine.home, engine.config.precision.optimizer_state)
    }

    fn begin(&self, _: Host<'_>, _: ParameterIndex) -> Result<Option<Self::State>, ZeroError> {
        Ok(None)
    }

    fn hyper_parameters(&self) -> Map<String, Value> {
        Map::from_iter([(String::from("optimizer"), Value::from(std::any::type_name::<O>()))])
    }

    fn tensors(&self, host: Host<'_>) -> Result<Vec<(String, DType)>, ZeroError> {
        let tensors = pattern(self, host).tensors();
        tensors.ok_or(ZeroError::StateNotSaved { optimizer: std::any::type_name::<O>() })
    }

    fn blank(
        &self,
        host: Host<'_>,
        parameter: ParameterIndex,
        _: Option<Self::State>,
        scalars: Option<&Map<String, Value>>,
    ) -> Result<Self::State, ZeroError> {
        let numel = host.0.holdings.owned(parameter).len();
        pattern(self, host).blank(numel, scalars).map_err(|reason| {
            let name = host.0.parameter(parameter).name();
            ZeroError::OddCheckpoint { reason: format!("the optimizer state of `{name}`: {reason}") }
        })
    }

    fn check_scalars(&self, host: Host<'_>, scalars: Option<&Map<String, Value>>) -> Result<(), String> {
        pattern(self, host).blank::<O::State<1>>(0, scalars).map(drop)
    }

    fn prepare(job: Job<Self>, _: bool) -> Finished<Self> {
        let Job { engine, optimizers, updates, mut gradients, factor, mut states } = job;
        let update = |ShardUpdate { parameter, group, lr, .. }: ShardUpdate| {
            let gradient = match gradients.take(&engine, parameter, factor as f32) {
                Ok(gradient) => gradient?,
                Err(error) => return Some(Err(ZeroError::from(error))),
            };
            let state = states[parameter.index()].take().and_then(|stored| stored.load(&engine.home));
            let shard = engine.held(parameter).shard;
            let (shard, state): (Tensor<1>, _) = optimizers[group].step(lr, shard, gradient, state);
            let dtype = engine.config.precision.optimizer_state;
            states[parameter.index()] = state.map(|state| Stored::new(state, dtype));
            Some(Ok((parameter, Updated { shard, copy: None })))
        };
        let outcome = updates.into_iter().filter_map(update).collect();
        let outcome: Result<_, _> = outcome;
        Finished { states, is_torn: outcome.is_err(), outcome, updating: None }
    }

    fn finish(prepared: Finished<Self>) -> Finished<Self> {
        prepared
    }

    fn bytes(state: &Self::State) -> u64 {
        state.bytes()
    }
}

fn pattern<O: Optimizer>(optimizer: &O, Host(engine): Host<'_>) -> Pattern {
    Pattern::of(optimizer, engine.config.precision.optimizer_state, &engine.home)
}
