//! The optimizer step on shards.

use std::sync::Arc;

use burn::module::Module;
use burn::optim::{Optimizer, RecordState, StateSink};
use zero_core::ParameterIndex;

use crate::ZeroError;
use crate::elementwise;
use crate::engine::Engine;
use crate::report::MemoryReport;
use crate::stand_in::check_model;

/// PyTorch's guard against a division by a norm of zero (`clip_grad_norm_`).
const CLIP_EPSILON: f64 = 1e-6;

/// Updates a sharded model with an element-wise Burn optimizer; made by [`Zero::optimizer`](crate::Zero::optimizer).
///
/// Holds the optimizer state of this rank's shards, and nothing else.
pub struct ZeroOptimizer<O: Optimizer> {
    engine: Arc<Engine>,
    optimizer: O,
    states: Vec<Option<O::State<1>>>,
    state_bytes: u64,
    step: u64,
}

/// What one step did; equal on all ranks, but for `memory`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Steps applied so far, this one included.
    pub step: u64,
    /// Whether parameters were updated. A gradient that is not finite skips the step on every rank.
    pub applied: bool,
    /// The mean of all losses since the last step over ranks and micro-batches, by their weights.
    pub loss: f64,
    /// The L2 norm of the mean gradient over all trainable parameters, before clipping.
    pub grad_norm: f64,
    /// What the gradient was multiplied by to keep its norm within `clip_norm`; 1 where nothing was clipped.
    pub clip_factor: f64,
    /// Memory of this rank.
    pub memory: MemoryReport,
}

impl<O: Optimizer> std::fmt::Debug for ZeroOptimizer<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZeroOptimizer")
            .field("optimizer", &std::any::type_name::<O>())
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl<O: Optimizer> ZeroOptimizer<O> {
    pub(crate) fn new(engine: Arc<Engine>, optimizer: O) -> Result<Self, ZeroError> {
        elementwise::check(&optimizer, &engine.device)?;
        let parameters = engine.layout.parameters().len();
        Ok(Self {
            engine,
            optimizer,
            states: (0..parameters).map(|_| None).collect(),
            state_bytes: 0,
            step: 0,
        })
    }

    /// Averages the gradients of all backwards since the last step, clips them, updates this rank's shards and
    /// publishes them. Every rank has to call it.
    ///
    /// A parameter that got no gradient on any rank is left alone, as Burn's own optimizers do. While it runs, a step
    /// holds this rank's old and new shards side by side (at stage 0: parameters).
    ///
    /// The model's values change; it is asked for to make sure that it is the engine's, and that nobody set values in it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidLearningRate`]; [`ZeroError::NothingToStep`] without a backward since the last step;
    /// [`ZeroError::ForeignModel`] for a model of another engine and [`ZeroError::ModelChanged`] for one whose
    /// parameters were set outside of it, before anything is changed; [`ZeroError::StrayGradient`] and [`ZeroError::Unfrozen`] for gradients that should not have come;
    /// [`ZeroError::Communication`] when another rank is lost.
    pub fn step<M: Module>(&mut self, lr: f64, model: &mut M) -> Result<StepOutcome, ZeroError> {
        if !lr.is_finite() {
            return Err(ZeroError::InvalidLearningRate { lr });
        }
        let engine = self.engine.clone();
        engine.check()?;
        check_model(model, &engine)?;

        let contributions = engine.contributions(lr)?;
        if contributions.weight <= 0.0 {
            return Err(ZeroError::NothingToStep);
        }
        let (mut gradients, sum_of_squares) = engine.take_gradients()?;
        let grad_norm = sum_of_squares.sqrt() / contributions.weight;
        let clip_factor = match engine.config.clip_norm {
            Some(limit) => (limit / (grad_norm + CLIP_EPSILON)).min(1.0),
            None => 1.0,
        };
        let applied = grad_norm.is_finite();
        if applied {
            let factor = (clip_factor / contributions.weight) as f32;
            let mut updated = Vec::new();
            for parameter in engine.layout.parameters().iter().filter(|parameter| parameter.trainable()) {
                let index = parameter.index();
                if contributions.counts[index.index()] > 0.0
                    && let Some(gradient) = gradients.take(&engine, index, factor)
                {
                    updated.push((index, self.update(lr, index, gradient)));
                }
            }
            drop(gradients);
            engine.replace_shards(updated)?;
            self.step += 1;
        } else {
            tracing::warn!(grad_norm, "the gradient is not finite, the step is skipped");
        }
        Ok(StepOutcome {
            step: self.step,
            applied,
            loss: contributions.weighted_loss / contributions.weight,
            grad_norm,
            clip_factor,
            memory: engine.report(),
        })
    }

    /// Steps applied so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    fn update(&mut self, lr: f64, index: ParameterIndex, gradient: burn::Tensor<1>) -> burn::Tensor<1> {
        let shard = self.engine.held(index).shard;
        if shard.shape().num_elements() == 0 {
            return shard;
        }
        let state = self.states[index.index()].take();
        let first = state.is_none();
        let (shard, state) = self.optimizer.step(lr, shard, gradient, state);
        if first {
            let bytes = state.as_ref().map_or(0, state_bytes);
            self.state_bytes += bytes;
            self.engine.count_optimizer_bytes(bytes, 0);
        }
        self.states[index.index()] = state;
        shard
    }
}

impl<O: Optimizer> Drop for ZeroOptimizer<O> {
    fn drop(&mut self) {
        self.engine.count_optimizer_bytes(0, self.state_bytes);
    }
}

/// Bytes of the tensors in an optimizer's state.
fn state_bytes<S: RecordState>(state: &S) -> u64 {
    let mut sink = StateSink::default();
    state.state_flatten("", &mut sink);
    sink.tensors.iter().map(|(_, data)| data.as_bytes().len() as u64).sum()
}
