//! One rank's state of one sharded model: shards, replicas, gradients, and the rules that join them.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::ParamId;
use burn::tensor::{Device, Tensor};
use zero_comm::{CommError, Communicator, WindowKey, panic_message};
use zero_core::{
    Bucket, Bytes, DType, Layout, Parameter, ParameterIndex, Partition, Rank, StateBytes, ZeroConfig,
};
use zero_offload::{HostPool, PoolOptions};

use crate::ZeroError;
use crate::error::During;
use crate::gradients::{Contributions, GradientStore};
use crate::host::{HostTensor, distinct_bytes, tensor_from_buffer};
use crate::owned::OwnedGradients;
use crate::report::MemoryReport;
use crate::shared::Shared;
use crate::uses::Uses;

/// Everything that stays when the model's own values move; shared by the model's parameters and the optimizer.
pub(crate) struct Engine {
    pub(crate) config: ZeroConfig,
    pub(crate) comm: Arc<dyn Communicator>,
    /// Where parameters live, without autodiff.
    pub(crate) device: Device,
    pub(crate) layout: Layout,
    pub(crate) bucket_labels: Vec<String>,
    pub(crate) ids: HashMap<ParamId, ParameterIndex>,
    pub(crate) uses: Arc<Uses>,
    /// Gathered parameters; what is alive in it is what is gathered.
    pub(crate) gathered: HostPool,
    /// Gradient buckets and what else a step needs for a moment.
    pub(crate) scratch: HostPool,
    /// What the module stores in place of each parameter: one NaN.
    pub(crate) stand_ins: Vec<Tensor<1>>,
    held: Mutex<Vec<Held>>,
    /// The last gathered copy of each parameter, while somebody holds it.
    shared: Mutex<Vec<Shared>>,
    /// Counts changes of parameters.
    version: AtomicU64,
    gradients: Mutex<GradientStore>,
    phase: Mutex<Phase>,
    after_backward: Mutex<StateBytes>,
    optimizer_bytes: AtomicU64,
}

/// One parameter as this rank holds it.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// What this rank updates, `f32`; a view of `whole` where there is one.
    pub(crate) shard: Tensor<1>,
    /// The whole parameter, where it stays gathered between steps.
    pub(crate) whole: Option<Tensor<1>>,
}

/// What the engine is in the middle of.
#[derive(Debug, Default)]
struct Phase {
    in_backward: bool,
    /// A gradient that should not have come; told once, by the next fallible call.
    misuse: Option<ZeroError>,
    /// A failed operation between ranks; final.
    failure: Option<ZeroError>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("stage", &self.config.stage)
            .field("comm", &self.comm)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in the middle of backward is answered by discarding; the values themselves are never half written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(crate) fn new(
        config: ZeroConfig,
        comm: Arc<dyn Communicator>,
        device: Device,
        layout: Layout,
        ids: HashMap<ParamId, ParameterIndex>,
        held: Vec<Held>,
    ) -> Self {
        let names = |index: &ParameterIndex| layout.parameters()[index.index()].name();
        let bucket_labels = layout
            .buckets()
            .iter()
            .map(|bucket| match bucket.parameters() {
                [only] => format!("gradient of `{}`", names(only)),
                [first, .., last] => format!("gradients of `{}` to `{}`", names(first), names(last)),
                [] => String::from("gradients of nothing"),
            })
            .collect();
        // What a layer takes at once, and one bucket on its way with its reduced part, need not be allocated again.
        let retain = |numel| HostPool::new(PoolOptions { retain: Bytes::of(numel, DType::F32) });
        let largest_bucket = layout.buckets().iter().map(Bucket::numel).max().unwrap_or(0);
        Self {
            uses: Uses::new(layout.parameters().len()),
            gathered: retain(layout.largest_unit()),
            scratch: retain(largest_bucket.saturating_mul(2)),
            gradients: Mutex::new(GradientStore::new(layout.parameters().len(), layout.buckets().len())),
            stand_ins: held.iter().map(|_| Tensor::full([1], f32::NAN, &device)).collect(),
            shared: Mutex::new(vec![Shared::default(); held.len()]),
            version: AtomicU64::new(0),
            held: Mutex::new(held),
            phase: Mutex::default(),
            after_backward: Mutex::default(),
            optimizer_bytes: AtomicU64::new(0),
            bucket_labels,
            config,
            comm,
            device,
            layout,
            ids,
        }
    }

    pub(crate) fn world(&self) -> usize {
        self.comm.world_size().get()
    }

    /// Whether gradients leave for their owners while backward runs.
    pub(crate) fn reduces_in_backward(&self) -> bool {
        self.config.stage.shards_gradients() && self.world() > 1
    }

    /// Whether shards are read by other ranks.
    fn has_windows(&self) -> bool {
        self.config.stage.shards_optimizer() && self.world() > 1
    }

    pub(crate) fn parameter(&self, index: ParameterIndex) -> &Parameter {
        &self.layout.parameters()[index.index()]
    }

    pub(crate) fn shape(&self, index: ParameterIndex) -> Vec<usize> {
        self.parameter(index).shape().to_vec()
    }

    /// The elements of `parameter` that this rank updates.
    pub(crate) fn owned(&self, index: ParameterIndex) -> Range<usize> {
        owned(&self.config, self.comm.rank(), self.parameter(index).partition())
    }

    pub(crate) fn held(&self, index: ParameterIndex) -> Held {
        lock(&self.held)[index.index()].clone()
    }

    /// The first failure of the engine, if it failed.
    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        let mut phase = lock(&self.phase);
        if let Some(failure) = &phase.failure {
            return Err(failure.clone());
        }
        phase.misuse.take().map_or(Ok(()), Err)
    }

    /// Keeps the first failure of an operation between ranks: without the others nothing can go on, and they cannot
    /// without this one.
    fn fail<T>(&self, result: Result<T, ZeroError>) -> Result<T, ZeroError> {
        result.inspect_err(|error| {
            if matches!(error, ZeroError::Communication { .. }) {
                lock(&self.phase).failure.get_or_insert_with(|| error.clone());
                self.comm.abort(&error.to_string());
            }
        })
    }

    /// The whole parameter, flat. Without the other ranks it is NaN, and the failure is kept for the next fallible
    /// call: `Param::val` has no error to give.
    pub(crate) fn whole_or_nan(&self, index: ParameterIndex) -> Tensor<1> {
        let whole = match &lock(&self.phase).failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        };
        whole
            .and_then(|()| {
                let name = self.parameter(index).name();
                let gathered = self.whole(index).during(|| format!("gathering parameter `{name}`"));
                self.fail(gathered)
            })
            .unwrap_or_else(|_| Tensor::full([self.parameter(index).numel()], f32::NAN, &self.device))
    }

    fn whole(&self, index: ParameterIndex) -> Result<Tensor<1>, CommError> {
        if let Some(whole) = self.held(index).whole {
            return Ok(whole);
        }
        if let Some(whole) = lock(&self.shared)[index.index()].get() {
            return Ok(whole);
        }
        let whole = self.gather(index, &self.gathered)?;
        lock(&self.shared)[index.index()] = Shared::new(&whole);
        Ok(whole)
    }

    /// Counts up whenever parameters change: what was computed under another version does not fit.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Notes that a parameter's value was set in the module, where it would be lost; told by the next fallible call.
    pub(crate) fn report_change(&self, index: ParameterIndex) {
        self.note(ZeroError::ModelChanged { name: self.parameter(index).name().to_owned() });
    }

    fn note(&self, misuse: ZeroError) {
        lock(&self.phase).misuse.get_or_insert(misuse);
    }

    /// Reads every rank's shard into one new buffer of `pool`.
    fn gather(&self, index: ParameterIndex, pool: &HostPool) -> Result<Tensor<1>, CommError> {
        const F32: usize = size_of::<f32>();
        let parameter = self.parameter(index);
        let mut buffer = pool.take(parameter.numel() * F32);
        for (rank, range) in parameter.partition().ranges() {
            if !range.is_empty() {
                let into = &mut buffer[range.start * F32..range.end * F32];
                self.comm.read(rank, window(index), 0, into, parameter.name())?;
            }
        }
        Ok(tensor_from_buffer(buffer, &self.device))
    }

    /// Takes in a gradient from a tape of `version`. Errors wait for the end of backward, which can return them.
    pub(crate) fn receive_gradient(&self, index: ParameterIndex, version: u64, gradient: Tensor<1>) {
        let name = || self.parameter(index).name().to_owned();
        if !lock(&self.phase).in_backward {
            self.note(ZeroError::StrayGradient { name: name() });
        } else if !self.parameter(index).trainable() {
            self.note(ZeroError::Unfrozen { name: name() });
        } else if version != self.version() {
            self.note(ZeroError::StaleLoss { name: name() });
        } else {
            lock(&self.gradients).receive(self, index, gradient);
        }
    }

    /// Runs `backward` on the tape and settles its gradients with the other ranks, whatever happens in it.
    pub(crate) fn backward(&self, weight: f64, loss: f64, run: impl FnOnce()) -> Result<(), ZeroError> {
        self.check()?;
        lock(&self.gradients).begin_backward();
        lock(&self.phase).in_backward = true;
        let panic = catch_unwind(AssertUnwindSafe(run)).err();
        // A gather inside of backward, or a gradient that should not have come, has failed without a word.
        let silent = {
            lock(&self.phase).in_backward = false;
            self.check().err()
        };

        let mut gradients = lock(&self.gradients);
        let failed = panic.is_some() || silent.is_some();
        let settled = gradients.end_backward(self, failed).during(|| String::from("reducing gradients"));
        let error = match (self.fail(settled), silent) {
            (Ok(None), _) => None,
            (Err(error), _) | (Ok(_), Some(error)) => Some(error),
            (Ok(Some(rank)), None) => {
                let own = panic.filter(|_| rank == self.comm.rank());
                let message =
                    own.map_or_else(|| String::from("see its own error"), |panic| panic_message(&*panic));
                Some(ZeroError::BackwardFailed { rank, message })
            }
        };
        if let Some(error) = error {
            gradients.discard();
            return Err(error);
        }
        gradients.commit(weight, loss);
        *lock(&self.after_backward) = StateBytes {
            parameters: self.parameter_bytes(),
            gradients: gradients.bytes(),
            optimizer: Bytes::ZERO,
        };
        Ok(())
    }

    /// What all ranks brought since the last step.
    pub(crate) fn contributions(&self, lr: f64) -> Result<Contributions, ZeroError> {
        let contributions = lock(&self.gradients).contributions(self, lr);
        self.fail(contributions.during(|| String::from("agreeing on the step")))
    }

    /// Moves the reduced gradients out, with the sum of their squares over all ranks.
    pub(crate) fn take_gradients(&self) -> Result<(OwnedGradients, f64), ZeroError> {
        let mut store = lock(&self.gradients);
        let taken = store.take(self).and_then(|gradients| {
            let sum_of_squares = gradients.sum_of_squares(self)?;
            Ok((gradients, sum_of_squares))
        });
        store.discard();
        self.fail(taken.during(|| String::from("reducing gradients")))
    }

    /// Puts updated shards in place and makes every rank see them.
    pub(crate) fn replace_shards(&self, updated: Vec<(ParameterIndex, Tensor<1>)>) -> Result<(), ZeroError> {
        {
            let mut held = lock(&self.held);
            for (index, shard) in &updated {
                held[index.index()].shard = shard.clone();
            }
        }
        self.version.fetch_add(1, Ordering::AcqRel);
        lock(&self.shared).fill(Shared::default());
        let indices: Vec<_> = updated.into_iter().map(|(index, _)| index).collect();
        let published = self.publish(&indices);
        self.fail(published.during(|| String::from("publishing updated parameters")))
    }

    /// Exposes the shards of `indices` and renews the replicas made of them.
    pub(crate) fn publish(&self, indices: &[ParameterIndex]) -> Result<(), CommError> {
        if !self.has_windows() {
            let mut held = lock(&self.held);
            for index in indices {
                let held = &mut held[index.index()];
                held.whole = Some(held.shard.clone());
            }
            return Ok(());
        }
        for &index in indices {
            self.comm.expose(window(index), Arc::new(HostTensor::new(self.held(index).shard)))?;
        }
        self.comm.fence("updated parameters")?;
        for &index in indices {
            if self.stays_whole(index) {
                let whole = self.gather(index, &self.scratch)?;
                self.hold_whole(index, whole)?;
            }
        }
        Ok(())
    }

    /// Keeps `whole`, with the shard as a view of it.
    fn hold_whole(&self, index: ParameterIndex, whole: Tensor<1>) -> Result<(), CommError> {
        let owned = self.owned(index);
        let shard = match owned.is_empty() {
            true => Tensor::empty([0], &self.device),
            false => whole.clone().slice([owned]),
        };
        // The window has to follow the shard, or the memory of both would stay.
        self.comm.expose(window(index), Arc::new(HostTensor::new(shard.clone())))?;
        lock(&self.held)[index.index()] = Held { shard, whole: Some(whole) };
        Ok(())
    }

    fn stays_whole(&self, index: ParameterIndex) -> bool {
        !self.config.stage.shards_parameters() || self.parameter(index).persistent()
    }

    /// Counts state that an optimizer of this engine took or, on its end, gave back.
    pub(crate) fn count_optimizer_bytes(&self, taken: u64, given_back: u64) {
        self.optimizer_bytes.fetch_add(taken, Ordering::AcqRel);
        self.optimizer_bytes.fetch_sub(given_back, Ordering::AcqRel);
    }

    fn parameter_bytes(&self) -> Bytes {
        let held = lock(&self.held);
        Bytes::new(distinct_bytes(held.iter().flat_map(|held| held.whole.iter().chain([&held.shard]))))
    }

    pub(crate) fn report(&self) -> MemoryReport {
        let optimizer = Bytes::new(self.optimizer_bytes.load(Ordering::Acquire));
        MemoryReport {
            state: StateBytes { optimizer, ..*lock(&self.after_backward) },
            gathered: self.gathered.live(),
            gathered_peak: self.gathered.peak(),
            idle: self.gathered.idle() + self.scratch.idle(),
        }
    }
}

/// The elements of a parameter that `rank` updates: all of it where the optimizer is not sharded.
pub(crate) fn owned(config: &ZeroConfig, rank: Rank, partition: Partition) -> Range<usize> {
    if config.stage.shards_optimizer() { partition.range(rank) } else { 0..partition.numel() }
}

fn window(index: ParameterIndex) -> WindowKey {
    WindowKey::new(index.index() as u64)
}
