//! The optimizer step on shards.

use std::sync::Arc;
use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use wildmatch::WildMatch;
use zero_core::ParameterIndex;

use crate::ZeroError;
use crate::engine::Engine;
use crate::error::During;
use crate::group::{Group, GroupRate};
use crate::kept::Kept;
use crate::not_finite::NotFinite;
use crate::owned::OwnedGradients;
use crate::report::MemoryReport;
use crate::rule::{Finished, Host, Job, ShardOptimizer, ShardUpdate, States};
use crate::slot::Slot;
use crate::stand_in::check_model;
use crate::statistics::{Activity, Statistics};

/// PyTorch's guard against a division by a norm of zero (`clip_grad_norm_`).
const CLIP_EPSILON: f64 = 1e-6;

/// Updates a sharded model with element-wise Burn optimizers; made by [`Zero::optimizer`](crate::Zero::optimizer).
///
/// Holds the optimizer state of this rank's shards, and nothing else.
pub struct ZeroOptimizer<O: ShardOptimizer> {
    slot: Arc<Slot>,
    /// The one that `states` and `group_of` go by.
    engine: Arc<Engine>,
    /// The last one has what no other has.
    pub(crate) groups: Vec<Group<O>>,
    /// By parameter.
    pub(crate) group_of: Vec<usize>,
    pub(crate) states: States<O>,
    /// How often each parameter was updated, by parameter; the same on all ranks.
    pub(crate) updates: Vec<u64>,
    /// An update that is computed beside the step after it.
    pending: Option<Pending<O>>,
    /// Bytes of each state that there is, by parameter.
    state_bytes: Vec<u64>,
    pub(crate) step: u64,
    pub(crate) skipped: u64,
    /// What had been counted when the last step ended.
    counted: Statistics,
}

/// An update on its way.
struct Pending<O: ShardOptimizer> {
    prepared: O::Prepared,
    /// Parameters that are updated here or on other ranks.
    updated: Vec<ParameterIndex>,
    /// Parameters of which other ranks alone have elements.
    nothing_here: Vec<ParameterIndex>,
}

/// What one step did; equal on all ranks, but for `memory` and `statistics`.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Steps applied so far, this one included.
    pub step: u64,
    /// Whether parameters were updated. A gradient that is not finite skips the step on every rank.
    pub applied: bool,
    /// Steps skipped so far, this one included.
    pub skipped: u64,
    /// Why the step was skipped.
    pub not_finite: Option<NotFinite>,
    /// The mean of all losses since the last step over ranks and micro-batches, by their weights.
    pub loss: f64,
    /// What the losses were multiplied by in backward. It does not show in `loss` and `grad_norm`.
    pub loss_scale: f64,
    /// The L2 norm of the mean gradient over all trainable parameters, before clipping.
    pub grad_norm: f64,
    /// What the gradient was multiplied by to keep its norm within `clip_norm`; 1 where nothing was clipped.
    pub clip_factor: f64,
    /// Memory of this rank.
    pub memory: MemoryReport,
    /// What this rank did since the last step.
    pub statistics: Statistics,
}

impl<O: ShardOptimizer> std::fmt::Debug for ZeroOptimizer<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZeroOptimizer")
            .field("optimizer", &std::any::type_name::<O>())
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl<O: ShardOptimizer> ZeroOptimizer<O> {
    pub(crate) fn new(slot: Arc<Slot>, optimizer: O) -> Result<Self, ZeroError> {
        let engine = slot.get()?;
        optimizer.check(Host(&engine))?;
        let parameters = engine.layout.parameters().len();
        let states = (0..parameters).map(|at| optimizer.begin(Host(&engine), ParameterIndex::new(at)));
        let states = states.collect::<Result<_, _>>()?;
        let rest = Group { pattern: String::from("*"), optimizer, rate: GroupRate::Times(1.0) };
        Ok(Self {
            counted: engine.statistics(),
            slot,
            engine,
            groups: vec![rest],
            group_of: vec![0; parameters],
            states,
            updates: vec![0; parameters],
            pending: None,
            state_bytes: vec![0; parameters],
            step: 0,
            skipped: 0,
        })
    }

    /// The same, with an optimizer of their own for the parameters whose module path matches `pattern`, in which `*`
    /// stands for any characters and `?` for one: their own decay and betas, and, by `rate`, their own learning rate.
    ///
    /// A parameter belongs to the first group that matches. A tied parameter goes by the first of its paths. Every rank
    /// has to make the same groups, before the first step.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::AdamWConfig, tensor::Device};
    /// # use zero_burn::{GroupRate, LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
    /// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
    /// # let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
    /// # let model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
    /// let optimizer = zero
    ///     .optimizer(AdamWConfig::new().with_weight_decay(0.1).build())?
    ///     .group("*bias", AdamWConfig::new().with_weight_decay(0.0).build(), GroupRate::Times(2.0))?;
    /// # drop((model, optimizer));
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`ZeroError::SameGroup`]; [`ZeroError::EmptyGroup`] if no parameter is left that matches, [`ZeroError::NotElementwise`],
    /// [`ZeroError::NotOffloadable`], [`ZeroError::Offload`] without room on a disk, [`ZeroError::Workers`],
    /// [`ZeroError::InvalidLearningRate`], [`ZeroError::GroupTooLate`] after the first step.
    pub fn group(mut self, pattern: &str, optimizer: O, rate: GroupRate) -> Result<Self, ZeroError> {
        if self.step > 0 {
            return Err(ZeroError::GroupTooLate { pattern: pattern.to_owned() });
        }
        self.follow()?;
        rate.check()?;
        if self.groups.iter().any(|group| group.pattern == pattern) {
            return Err(ZeroError::SameGroup { pattern: pattern.to_owned() });
        }
        optimizer.check(Host(&self.engine))?;
        let (rest, matcher) = (self.groups.len() - 1, WildMatch::new(pattern));
        let mut members = 0;
        for parameter in self.engine.layout.parameters() {
            let group = &mut self.group_of[parameter.index().index()];
            if *group == rest {
                let is_member = matcher.matches(parameter.name());
                *group = if is_member { rest } else { rest + 1 };
                if is_member {
                    // What another optimizer keeps gives its room back first.
                    let state = &mut self.states[parameter.index().index()];
                    *state = None;
                    self.engine.count_optimizer_bytes(
                        0,
                        std::mem::take(&mut self.state_bytes[parameter.index().index()]),
                    );
                    *state = optimizer.begin(Host(&self.engine), parameter.index())?;
                }
                members += usize::from(is_member);
            }
        }
        if members == 0 {
            let name = self.engine.layout.parameters().first().map_or("", |parameter| parameter.name());
            return Err(ZeroError::EmptyGroup { pattern: pattern.to_owned(), example: name.to_owned() });
        }
        self.groups.insert(rest, Group { pattern: pattern.to_owned(), optimizer, rate });
        Ok(self)
    }

    /// Sets the learning rate of the group that was made with `pattern`, for the steps that follow; `"*"` is the one of
    /// all parameters that no other group has. Every rank has to set the same.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NoSuchGroup`] if no group was made with that pattern, [`ZeroError::InvalidLearningRate`].
    pub fn set_rate(&mut self, pattern: &str, rate: GroupRate) -> Result<(), ZeroError> {
        rate.check()?;
        let group = self.groups.iter_mut().find(|group| group.pattern == pattern);
        let Some(group) = group else {
            let groups = self.groups.iter().map(|group| group.pattern.clone()).collect();
            return Err(ZeroError::NoSuchGroup { pattern: pattern.to_owned(), groups });
        };
        group.rate = rate;
        Ok(())
    }

    /// Averages the gradients of all backwards since the last step, clips them, updates this rank's shards and
    /// publishes them. Every rank has to call it, with the same rate: a number, or what a schedule of Burn gives, be it
    /// for all parameters or by module path.
    ///
    /// A parameter that got no gradient on any rank is left alone, as Burn's own optimizers do. While it runs, a step
    /// holds this rank's old and new shards side by side (at stage 0: parameters); those in f32 not if it is one of
    /// [`Fused`](crate::Fused) that finds nobody else with their memory, unless the update is beside compute with states in
    /// memory, or gradients are on a disk or of 16 bits and a disk may fail it.
    ///
    /// The model's values change; it is asked for to make sure that it is the engine's, and that nobody set values in it.
    ///
    /// # Errors
    ///
    /// Before anything is changed, with [`ZeroError::RefusedElsewhere`] on the other ranks:
    /// [`ZeroError::InvalidLearningRate`], [`ZeroError::ForeignModel`] for a model of another engine,
    /// [`ZeroError::Replaced`] for one from before [`freeze`](crate::Zero::freeze) and its like,
    /// [`ZeroError::ModelChanged`] for one whose parameters were set outside of it, [`ZeroError::UpdatePending`] for the
    /// update of another optimizer, and any [pending misuse](crate::Zero::check). [`ZeroError::NothingToStep`] without a
    /// backward since the last step; [`ZeroError::Offload`] if a disk fails; [`ZeroError::ScaleAtMinimum`], on all ranks,
    /// with the step skipped; [`ZeroError::Communication`] when another rank is lost.
    ///
    /// # Panics
    ///
    /// If `lr` is an empty `ModuleLearningRate`, which Burn makes by `default` alone.
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: &mut M,
    ) -> Result<StepOutcome, ZeroError> {
        let engine = self.slot.get()?;
        let ready = self.follow().and_then(|()| self.rates(&lr.into())).and_then(|rates| {
            engine.check()?;
            check_model(model, &engine)?;
            if self.pending.is_none() {
                // It would be of another optimizer, whose shards this step would change.
                engine.check_no_update()?;
            }
            Ok(rates)
        });
        let (contributions, rates) = engine.contributions(ready)?;
        if contributions.weight <= 0.0 {
            engine.discard_gradients();
            return Err(ZeroError::NothingToStep);
        }
        if let Err(error) = self.finish_pending() {
            engine.discard_gradients();
            return Err(error);
        }
        let (gradients, arrived, sum_of_squares) = engine.take_gradients()?;
        // It changes with a step alone, so it is that of all backwards.
        let loss_scale = engine.loss_scale();
        let divisor = contributions.weight * loss_scale;
        let grad_norm = sum_of_squares.sqrt() / divisor;
        let applied = grad_norm.is_finite();
        let clip_factor = match engine.config.clip_norm {
            Some(limit) if applied => (limit / (grad_norm + CLIP_EPSILON)).min(1.0),
            _ => 1.0,
        };
        let mut not_finite = None;
        if applied {
            let begin = Instant::now();
            let offload = engine.offload();
            let is_beside = offload.delayed_update && self.step >= offload.exact_steps;
            let factor = clip_factor / divisor;
            engine.set_pending(is_beside);
            let prepared = self.prepare(gradients, &contributions.counts, &rates, factor, is_beside);
            if is_beside {
                self.pending = Some(prepared);
            } else {
                self.finish(prepared)?;
            }
            engine.recorder.note(Activity::Update, "step", 0, begin);
            self.step = self.step.saturating_add(1);
        } else {
            let found = engine.find_not_finite(arrived, &gradients)?;
            not_finite = found.map(|(parameter, rank)| NotFinite {
                parameter: engine.parameter(parameter).name().to_owned(),
                rank,
            });
            self.skipped = self.skipped.saturating_add(1);
            tracing::warn!(?not_finite, loss_scale, "a gradient is not finite, the step is skipped");
        }
        let counted = engine.statistics();
        let statistics = counted.since(std::mem::replace(&mut self.counted, counted));
        if let Err(at_minimum) = engine.update_loss_scale(!applied) {
            return Err(ZeroError::ScaleAtMinimum { not_finite, scale: at_minimum.scale });
        }
        Ok(StepOutcome {
            step: self.step,
            applied,
            skipped: self.skipped,
            not_finite,
            loss: contributions.weighted_loss / contributions.weight,
            loss_scale,
            grad_norm,
            clip_factor,
            memory: engine.report(),
            statistics,
        })
    }

    /// Ends the update that is computed beside compute, so that the model is as of the last step: before an evaluation, a
    /// save, and the end. Collective. Nothing happens unless the configuration has `offload.delayed_update`.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Offload`] and [`ZeroError::RefusedElsewhere`] if a disk failed on one rank: then the update is dropped
    /// on all. [`ZeroError::Communication`].
    pub fn flush(&mut self) -> Result<(), ZeroError> {
        if self.pending.is_some() {
            // Replicas of the old values are here when the first rank shows new ones.
            self.engine.settle_renewals()?;
            let agreed = self.engine.comm.barrier("flush of the delayed update");
            self.engine.fail(agreed.during(|| String::from("ending the delayed update")))?;
        }
        self.finish_pending()
    }

    /// Steps applied so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Steps skipped so far, because a gradient was not finite.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Goes on with the engine that is in charge now, which is to be that of `slot`.
    pub(crate) fn attend(&mut self, slot: &Arc<Slot>) -> Result<(), ZeroError> {
        if Arc::ptr_eq(slot, &self.slot) { self.follow() } else { Err(ZeroError::ForeignOptimizer) }
    }

    /// Counts the states anew.
    pub(crate) fn count_states(&mut self) {
        let bytes = |state: &Option<O::State>| state.as_ref().map_or(0, O::bytes);
        let now: Vec<_> = self.states.iter().map(bytes).collect();
        self.engine.count_optimizer_bytes(now.iter().sum(), self.state_bytes.iter().sum());
        self.state_bytes = now;
    }

    /// Goes on with the engine that is in charge now. Old parameters keep group and state, new ones fall into groups by
    /// their paths.
    fn follow(&mut self) -> Result<(), ZeroError> {
        let engine = self.slot.get()?;
        if Arc::ptr_eq(&engine, &self.engine) {
            return Ok(());
        }
        for parameter in &engine.layout.parameters()[self.group_of.len()..] {
            let is_member = |group: &Group<O>| WildMatch::new(&group.pattern).matches(parameter.name());
            let rest = self.groups.len() - 1;
            let group = self.groups[..rest].iter().position(is_member).unwrap_or(rest);
            let state = self.groups[group].optimizer.begin(Host(&engine), parameter.index())?;
            self.group_of.push(group);
            self.states.push(state);
            self.updates.push(0);
            self.state_bytes.push(0);
        }
        for (parameter, state) in engine.layout.parameters().iter().zip(&mut self.states) {
            if let (false, Some(state)) = (parameter.trainable(), state) {
                state.put_away()?;
            }
        }
        self.engine = engine;
        Ok(())
    }

    /// The learning rate of each parameter.
    fn rates(&self, lr: &ModuleLearningRate) -> Result<Vec<f64>, ZeroError> {
        let parameters =
            self.engine.layout.parameters().iter().zip(&self.engine.param_ids).zip(&self.group_of);
        parameters
            .map(|((parameter, id), group)| {
                let group = &self.groups[*group];
                let lr = group.rate.at(lr.lr_from_param(*id, Some(parameter.name())));
                if group.optimizer.takes_rate(lr) {
                    Ok(lr)
                } else {
                    Err(ZeroError::InvalidLearningRate { lr })
                }
            })
            .collect()
    }

    /// Begins to update this rank's shards of the parameters that got a gradient on any rank.
    fn prepare(
        &mut self,
        gradients: OwnedGradients,
        counts: &[f64],
        rates: &[f64],
        factor: f64,
        is_beside: bool,
    ) -> Pending<O> {
        let parameters = self.engine.layout.parameters().iter();
        let updated: Vec<_> = parameters
            .filter(|parameter| parameter.trainable() && counts[parameter.index().index()] > 0.0)
            .map(|parameter| parameter.index())
            .collect();
        let is_here = |parameter: &ParameterIndex| !self.engine.holdings.owned(*parameter).is_empty();
        let (updates, nothing_here): (Vec<_>, Vec<_>) = updated.iter().copied().partition(is_here);
        let updates = updates.into_iter().map(|parameter| ShardUpdate {
            parameter,
            group: self.group_of[parameter.index()],
            lr: rates[parameter.index()],
            step: self.updates[parameter.index()].saturating_add(1),
        });
        let job = Job {
            updates: updates.collect(),
            optimizers: self.groups.iter().map(|group| group.optimizer.clone()).collect(),
            states: std::mem::take(&mut self.states),
            engine: Arc::clone(&self.engine),
            gradients,
            factor,
        };
        Pending { prepared: O::prepare(job, is_beside), updated, nothing_here }
    }

    /// Ends an update, and shows its parameters to all ranks.
    fn finish(&mut self, Pending { prepared, updated, nothing_here }: Pending<O>) -> Result<(), ZeroError> {
        // Readers wait until the new shards are in place.
        let Finished { states, outcome, is_torn, updating: _updating } = O::finish(prepared);
        self.states = states;
        if let (true, Err(error)) = (is_torn, &outcome) {
            self.engine.break_off(error);
        }
        for (bytes, state) in self.state_bytes.iter_mut().zip(&self.states) {
            if let (0, Some(state)) = (*bytes, state) {
                *bytes = O::bytes(state);
                self.engine.count_optimizer_bytes(*bytes, 0);
            }
        }
        let shards = outcome?;
        for parameter in updated {
            let updates = &mut self.updates[parameter.index()];
            *updates = updates.saturating_add(1);
        }
        self.engine.replace_shards(shards, &nothing_here)
    }

    /// Ends the update that is computed beside compute, if there is one.
    fn finish_pending(&mut self) -> Result<(), ZeroError> {
        match self.pending.take() {
            Some(pending) => {
                let finished = self.finish(pending);
                self.engine.set_pending(false);
                // It was counted when it began.
                finished.inspect_err(|_| self.step -= 1)
            }
            None => Ok(()),
        }
    }
}

impl<O: ShardOptimizer> Drop for ZeroOptimizer<O> {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            // To end it takes all ranks.
            tracing::warn!(
                "an optimizer is dropped while its last update is under way, which is lost; call `flush` before"
            );
            drop(pending);
            self.engine.set_pending(false);
        }
        self.engine.count_optimizer_bytes(0, self.state_bytes.iter().sum());
    }
}
