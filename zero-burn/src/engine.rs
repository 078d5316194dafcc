//! One rank's state of one sharded model: shards, replicas, gradients, and the rules that join them.

use std::collections::HashMap;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::ParamId;
use burn::tensor::Tensor;
use zero_comm::{CommError, CommunicatorExt, ReduceOp, Work, panic_message};
use zero_core::{
    Bucket, Bytes, DType, Layout, MinScaleReached, Parameter, ParameterIndex, Rank, ReduceGradients,
    StateBytes,
};
use zero_offload::{HostBuffer, HostPool};

use crate::ZeroError;
use crate::base::Base;
use crate::error::During;
use crate::floats::burn_dtype;
use crate::gathers::Gathers;
use crate::gradients::{Contributions, GradientStore};
use crate::held::{Held, Holdings};
use crate::owned::OwnedGradients;
use crate::report::MemoryReport;
use crate::spill::{Spill, sums_bytes};
use crate::statistics::{Activity, Statistics};
use crate::sums;
use crate::uses::Uses;
use crate::windows::{Values, Windows};

/// One model of one layout on one rank; shared by the model's parameters and the optimizer. Another layout has another
/// engine on the same base, which takes the place of this one.
pub(crate) struct Engine {
    base: Arc<Base>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) bucket_labels: Vec<String>,
    /// Elements of the largest bucket.
    pub(crate) largest_bucket: usize,
    pub(crate) ids: HashMap<ParamId, ParameterIndex>,
    /// By parameter.
    pub(crate) param_ids: Vec<ParamId>,
    pub(crate) uses: Arc<Uses>,
    /// Gathered parameters that do not stay.
    pub(crate) gathers: Arc<Gathers>,
    /// What the module stores in place of each parameter: one NaN.
    pub(crate) stand_ins: Vec<Tensor<1>>,
    pub(crate) holdings: Arc<Holdings>,
    /// What layers compute with.
    pub(crate) windows: Windows,
    /// What the optimizer updates, where that is something else, and not on a disk.
    pub(crate) masters: Option<Windows>,
    /// By parameter: the replica on its way, since the last step.
    pub(crate) renewals: Mutex<Vec<Option<Work<()>>>>,
    pub(crate) gradients: Mutex<GradientStore>,
    /// Where gradients wait for the step that do not wait in memory.
    pub(crate) spill: Option<Spill>,
    standing: Mutex<Standing>,
}

/// Whether an engine is the one in charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    #[default]
    Serving,
    /// Its model is taken off it: parameters are their stand-ins.
    Leaving,
    /// Another one has taken its place: whoever still computes with it gets NaN, and the next call says so.
    Replaced,
}

impl Deref for Engine {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("stage", &self.config.stage)
            .field("comm", &self.comm)
            .finish_non_exhaustive()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in the middle of backward is answered by discarding; the values themselves are never half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// The engine of `layout` on `base`, which holds the shards of its parameters; it goes on where `previous` stood.
    pub(crate) fn new(
        base: Arc<Base>,
        layout: Layout,
        ids: HashMap<ParamId, ParameterIndex>,
        previous: Option<&Self>,
    ) -> Result<Self, ZeroError> {
        let config = &base.config;
        let layout = Arc::new(layout);
        let bucket_labels: Vec<_> =
            layout.buckets().iter().map(|bucket| sums::label(&layout, bucket)).collect();
        let mut param_ids: Vec<_> = ids.iter().map(|(id, index)| (*index, *id)).collect();
        param_ids.sort_unstable_by_key(|(index, _)| *index);
        let windows = Windows {
            comm: Arc::clone(&base.comm),
            layout: Arc::clone(&layout),
            dtype: config.precision.compute,
            values: Values::Compute,
            copies: base.copies_windows(),
            device: base.device.clone(),
            #[cfg(feature = "cube")]
            on_devices: base.transports.shards.clone(),
            recorder: Arc::clone(&base.recorder),
        };
        let is_mixed = config.precision.compute != DType::F32;
        let masters = (is_mixed && base.masters_on_disk().is_none()).then(|| Windows {
            dtype: DType::F32,
            values: Values::Master,
            ..windows.clone()
        });
        let counted = previous.map_or_else(Default::default, |engine| engine.gathers.statistics());
        // What is needed in every step need not be allocated again: buckets that fill or are on their way, and what
        // reducing one takes for a moment; all sums; all replicas, whose memory is idle only within a step.
        let largest_bucket = layout.buckets().iter().map(Bucket::numel).max().unwrap_or(0);
        base.scratch.expect(Bytes::of(largest_bucket, DType::F32));
        // Stage 0 puts each gradient together for the optimizer: others hold a part of a bucket, which is in order.
        let gradients = if config.stage.shards_optimizer() { 1 } else { 2 };
        base.sums.set_retain(Bytes::of(layout.numel().saturating_mul(gradients), DType::F32));
        base.replicas.set_retain(Bytes::of(layout.numel(), DType::F32));
        base.copies.set_retain(Bytes::of(layout.shard_numel(base.comm.rank()), config.precision.compute));
        let (rank, size) = (base.comm.rank(), config.precision.accumulate.size());
        let sums = layout.buckets().iter().map(|bucket| sums_bytes(config.stage, rank, bucket, size));
        let spill = Spill::open(&base, &bucket_labels, &sums.collect::<Vec<_>>())?;
        Ok(Self {
            spill,
            uses: Uses::new(layout.parameters().len()),
            gathers: Gathers::new(windows.clone(), &base, config.lookahead_options(), counted),
            holdings: Arc::new(Holdings::new(windows.clone(), &base)),
            gradients: Mutex::new(GradientStore::new(layout.parameters().len(), layout.buckets().len())),
            stand_ins: layout
                .parameters()
                .iter()
                .map(|_| Tensor::full([1], f32::NAN, &base.device))
                .collect(),
            renewals: Mutex::new(layout.parameters().iter().map(|_| None).collect()),
            standing: Mutex::default(),
            bucket_labels,
            largest_bucket,
            windows,
            masters,
            layout,
            ids,
            param_ids: param_ids.into_iter().map(|(_, id)| id).collect(),
            base,
        })
    }

    pub(crate) fn standing(&self) -> Standing {
        *lock(&self.standing)
    }

    pub(crate) fn set_standing(&self, standing: Standing) {
        *lock(&self.standing) = standing;
    }

    /// The base, for what may outlive this engine.
    pub(crate) fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Refuses what would tear gradients and parameters apart.
    pub(crate) fn check_no_gradients(&self) -> Result<(), ZeroError> {
        self.check_no_update()?;
        self.check_stepped()
    }

    /// Refuses to go on between a backward and its step.
    pub(crate) fn check_stepped(&self) -> Result<(), ZeroError> {
        if lock(&self.gradients).is_empty() { Ok(()) } else { Err(ZeroError::GradientsPending) }
    }

    /// Forgets that there were backwards.
    pub(crate) fn discard_gradients(&self) {
        lock(&self.gradients).discard();
    }

    pub(crate) fn world(&self) -> usize {
        self.comm.world_size().get()
    }

    /// Whether gradients leave for their owners while backward runs.
    pub(crate) fn reduces_in_backward(&self) -> bool {
        let is_wanted = self.config.reduce_gradients() == ReduceGradients::EveryBackward;
        // A rank alone has nobody to send them to: it adds them up as they come, unless it is told to.
        let is_asked = self.config.reduce_gradients.is_some() || self.spill.is_some();
        is_wanted && (self.world() > 1 || is_asked)
    }

    /// Bytes of the sums that this rank gets of a bucket.
    pub(crate) fn sums_bytes(&self, bucket: usize) -> usize {
        let size = self.config.precision.accumulate.size();
        sums_bytes(self.config.stage, self.comm.rank(), &self.layout.buckets()[bucket], size)
    }

    /// Memory for the sums that this rank gets of a bucket.
    pub(crate) fn sums(&self, bucket: usize) -> HostBuffer {
        self.sums.take(self.sums_bytes(bucket))
    }

    /// Whether shards are read by other ranks.
    pub(crate) fn has_windows(&self) -> bool {
        self.config.stage.shards_optimizer() && self.world() > 1
    }

    pub(crate) fn parameter(&self, index: ParameterIndex) -> &Parameter {
        &self.layout.parameters()[index.index()]
    }

    pub(crate) fn shape(&self, index: ParameterIndex) -> Vec<usize> {
        self.parameter(index).shape().to_vec()
    }

    pub(crate) fn held(&self, index: ParameterIndex) -> Held {
        self.holdings.get(index)
    }

    /// Notes whether an update is computed beside compute.
    pub(crate) fn set_pending(&self, is_pending: bool) {
        self.pending.store(is_pending, Ordering::Release);
    }

    /// Refuses to give out parameters that an update is about to change.
    pub(crate) fn check_no_update(&self) -> Result<(), ZeroError> {
        if self.pending.load(Ordering::Acquire) { Err(ZeroError::UpdatePending) } else { Ok(()) }
    }

    /// Notes that a record is made of parameters that an update is about to change; told by the next fallible call.
    pub(crate) fn note_unless_current(&self) {
        if let Err(pending) = self.check_no_update() {
            self.phase.note(pending);
        }
    }

    /// The first failure of the engine, if it failed.
    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        self.phase.check()
    }

    /// Keeps the first failure of an operation between ranks: without the others nothing can go on, and they cannot
    /// without this one.
    pub(crate) fn fail<T>(&self, result: Result<T, ZeroError>) -> Result<T, ZeroError> {
        result.inspect_err(|error| {
            if matches!(error, ZeroError::Communication { .. } | ZeroError::RanksDiffer { .. }) {
                self.break_off(error);
            }
        })
    }

    /// Ends the engine on all ranks: what failed has left state that does not fit together.
    pub(crate) fn break_off(&self, error: &ZeroError) {
        self.phase.fail(error);
        self.comm.abort(&error.to_string());
    }

    /// The whole parameter, flat. Without the other ranks it is NaN, and the failure is kept for the next fallible
    /// call: `Param::val` has no error to give.
    pub(crate) fn whole_or_nan(&self, index: ParameterIndex) -> Tensor<1> {
        let nan = || {
            let nan = Tensor::<1>::full([self.parameter(index).numel()], f32::NAN, &self.device);
            nan.cast(burn_dtype(self.config.precision.compute))
        };
        if self.standing() == Standing::Replaced {
            self.phase.note(ZeroError::Replaced);
            return nan();
        }
        self.phase
            .check_failure()
            .and_then(|()| {
                let name = self.parameter(index).name();
                let gathered = self.whole(index).during(|| format!("gathering parameter `{name}`"));
                self.fail(gathered)
            })
            .unwrap_or_else(|_| nan())
    }

    fn whole(&self, index: ParameterIndex) -> Result<Tensor<1>, CommError> {
        let in_place = self.phase.wait_for_shards();
        let held = self.held(index);
        drop(in_place);
        if let Some(whole) = held.whole {
            return Ok(whole);
        }
        if self.stays_whole(index) { self.renew(index) } else { self.gathers.whole(index) }
    }

    /// Whether layers compute in another type than the optimizer.
    pub(crate) fn is_mixed(&self) -> bool {
        self.config.precision.compute != DType::F32
    }

    /// Counts up whenever parameters change: what was computed under another version does not fit.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Notes that a parameter's value was set in the module, where it would be lost; told by the next fallible call.
    pub(crate) fn report_change(&self, index: ParameterIndex) {
        self.phase.note(ZeroError::ModelChanged { name: self.parameter(index).name().to_owned() });
    }

    /// Takes in a gradient from a tape of `version`. Errors wait for the end of backward, which can return them.
    pub(crate) fn receive_gradient(&self, index: ParameterIndex, version: u64, gradient: Tensor<1>) {
        let name = || self.parameter(index).name().to_owned();
        if self.standing() == Standing::Replaced {
            self.phase.note(ZeroError::Replaced);
        } else if !self.phase.is_in_backward() {
            self.phase.note(ZeroError::StrayGradient { name: name() });
        } else if !self.parameter(index).trainable() {
            self.phase.note(ZeroError::Unfrozen { name: name() });
        } else if self.expect_version(index, version) {
            lock(&self.gradients).receive(self, index, gradient);
        }
    }

    /// Whether parameters are still those of `version`; else notes that a loss was computed with others.
    pub(crate) fn expect_version(&self, index: ParameterIndex, version: u64) -> bool {
        let fits = version == self.version();
        if !fits {
            self.phase.note(ZeroError::StaleLoss { name: self.parameter(index).name().to_owned() });
        }
        fits
    }

    /// Runs `backward` on the tape and settles its gradients with the other ranks, whatever happens in it.
    ///
    /// What is refused here alone is settled with the others, too: they have run theirs, and wait.
    pub(crate) fn backward(
        &self,
        weight: f64,
        loss: f64,
        run: Result<impl FnOnce(), ZeroError>,
    ) -> Result<(), ZeroError> {
        self.phase.check_failure()?;
        lock(&self.gradients).begin_backward(weight);
        let mut panic = None;
        let silent = match self.check().and(run) {
            Err(refusal) => Some(refusal),
            Ok(run) => {
                self.phase.set_in_backward(true);
                let run = || catch_unwind(AssertUnwindSafe(run));
                panic = self.recorder.during(Activity::Compute, "backward", 0, run).err();
                self.phase.set_in_backward(false);
                // A gather inside of backward, or a gradient that should not have come, has failed without a word.
                self.check().err()
            }
        };
        self.ladder.step_down();
        let silent = silent.or(self.settle_renewals().err());
        let silent = silent.or(self.check_spill().err());
        let mut gradients = lock(&self.gradients);
        let failed = panic.is_some() || silent.is_some();
        let settled = gradients.end_backward(self, failed).during(|| String::from("reducing gradients"));
        let error = match (self.fail(settled), silent) {
            (Ok(None), _) => None,
            (Err(error), _) | (Ok(_), Some(error)) => Some(error),
            (Ok(Some(rank)), None) => Some(match panic {
                None => ZeroError::BackwardFailed { rank, message: String::from("see its own error") },
                Some(panic) => {
                    ZeroError::BackwardFailed { rank: self.comm.rank(), message: panic_message(&*panic) }
                }
            }),
        };
        if let Some(error) = error {
            gradients.discard();
            return Err(error);
        }
        gradients.commit(weight, loss);
        *lock(&self.after_backward) = StateBytes {
            parameters: self.holdings.bytes(),
            gradients: gradients.bytes(self),
            optimizer: Bytes::ZERO,
        };
        Ok(())
    }

    /// Goes on if all ranks are ready; a rank that is not says why. Collective.
    pub(crate) fn together<T>(&self, ready: Result<T, ZeroError>) -> Result<T, ZeroError> {
        self.phase.check_failure()?;
        let mut lowest = [if ready.is_ok() { self.world() } else { self.comm.rank().index() } as f64];
        if self.world() > 1 {
            let agreed = self.comm.all_reduce(&mut lowest, ReduceOp::Min, "whether all ranks are ready");
            self.fail(agreed.during(|| String::from("agreeing on what to do")))?;
        }
        let ready = ready?;
        match lowest[0] as usize {
            rank if rank < self.world() => Err(ZeroError::RefusedElsewhere { rank: Rank::new(rank) }),
            _ => Ok(ready),
        }
    }

    fn check_spill(&self) -> Result<(), ZeroError> {
        self.spill.as_ref().map_or(Ok(()), Spill::check)
    }

    /// What all ranks brought since the last step. `ready` has the learning rates of all parameters, or why this rank
    /// refuses to step: then none does.
    pub(crate) fn contributions(
        &self,
        ready: Result<Vec<f64>, ZeroError>,
    ) -> Result<(Contributions, Vec<f64>), ZeroError> {
        self.phase.check_failure()?;
        let contributions = lock(&self.gradients).contributions(self, ready.as_deref().ok());
        let contributions = self.fail(contributions.during(|| String::from("agreeing on the step")))?;
        let Some(contributions) = contributions else {
            // Which fails, for a rank is not ready, and says which.
            return self.together(ready).and(Err(ZeroError::NothingToStep));
        };
        Ok((contributions, ready?))
    }

    /// Moves the reduced gradients out, with the first that came to this rank and was not finite, and with the sum of
    /// squares over all ranks.
    pub(crate) fn take_gradients(&self) -> Result<(OwnedGradients, Option<ParameterIndex>, f64), ZeroError> {
        self.fail(self.settle_reads().during(|| String::from("reading parameters")))?;
        let mut store = lock(&self.gradients);
        let taken = store.take(self).and_then(|gradients| {
            let sum_of_squares = gradients.sum_of_squares(self)?;
            Ok((gradients, store.not_finite(), sum_of_squares))
        });
        store.discard();
        drop(store);
        let (gradients, not_finite, norm) = self.fail(taken.during(|| String::from("reducing gradients")))?;
        let read = norm.map_err(|error| ZeroError::from(error).during("reading gradients from the disk"));
        // Whether a disk or a device is used is the same on all ranks, though not whether it works.
        let ready = self.check_spill().and_then(|()| self.check_device()).and(read);
        let may_differ = self.spill.is_some() || self.has_device();
        let sum_of_squares = if may_differ { self.together(ready)? } else { ready? };
        Ok((gradients, not_finite, sum_of_squares))
    }

    /// Which gradient was not finite, and on which rank; see [`OwnedGradients::find_not_finite`].
    pub(crate) fn find_not_finite(
        &self,
        arrived: Option<ParameterIndex>,
        sums: &OwnedGradients,
    ) -> Result<Option<(ParameterIndex, Rank)>, ZeroError> {
        let found = sums.find_not_finite(self, arrived);
        self.fail(found.during(|| String::from("looking for gradients that are not finite")))
    }

    /// What the loss, and with it every gradient, is multiplied by.
    pub(crate) fn loss_scale(&self) -> f64 {
        lock(&self.scale).scale()
    }

    /// Adapts the loss scale to whether the gradients overflowed.
    pub(crate) fn update_loss_scale(&self, overflow: bool) -> Result<(), MinScaleReached> {
        lock(&self.scale).update(overflow)
    }

    /// What was counted since the engine began.
    pub(crate) fn statistics(&self) -> Statistics {
        let ahead = self.gathers.statistics();
        let (offloaded, offload_time) = self.traffic.get();
        Statistics {
            offloaded,
            offload_time,
            lookahead_hits: ahead.hits,
            lookahead_misses: ahead.misses,
            lookahead_wasted: ahead.wasted,
            ..self.recorder.snapshot()
        }
    }

    /// Counts state that an optimizer of this engine took or, on its end, gave back.
    pub(crate) fn count_optimizer_bytes(&self, taken: u64, given_back: u64) {
        self.optimizer_bytes.fetch_add(taken, Ordering::AcqRel);
        self.optimizer_bytes.fetch_sub(given_back, Ordering::AcqRel);
    }

    pub(crate) fn report(&self) -> MemoryReport {
        let optimizer = Bytes::new(self.optimizer_bytes.load(Ordering::Acquire));
        let pools = [self.gathers.pool(), self.scratch.pool(), &self.sums, &self.replicas, &self.copies];
        let windows = [&self.windows].into_iter().chain(&self.masters).filter(|_| self.has_windows());
        MemoryReport {
            state: StateBytes { optimizer, ..*lock(&self.after_backward) },
            gathered: self.gathers.live(),
            gathered_peak: self.gathers.peak(),
            buckets: self.scratch.pool().live() + self.buckets_on_device(),
            windows: windows.map(Windows::copied_bytes).sum(),
            idle: pools.map(HostPool::idle).into_iter().sum(),
            allocations: pools.map(HostPool::allocations).into_iter().sum(),
        }
    }
}
