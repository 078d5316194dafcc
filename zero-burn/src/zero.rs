//! The value that owns everything: one rank's handle to one sharded model.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use zero_comm::{Communicator, CommunicatorExt, ReduceOp};
use zero_core::{Layout, PlacementPlan, ZeroConfig};

use crate::ZeroError;
use crate::base::Base;
use crate::engine::{Engine, lock};
use crate::error::During;
use crate::host::{is_supported, tensor_dtype};
use crate::optimizer::ZeroOptimizer;
use crate::queues::Queues;
use crate::report::MemoryReport;
use crate::rule::ShardOptimizer;
use crate::slot::Slot;
use crate::statistics::{Activity, Statistics, TraceEvent};
use crate::{shard, succession};

/// One rank's ZeRO engine for one model.
///
/// Calls that say so are collective: every rank has to make them, in the same order. All others are local and may be
/// made by any rank at any time, from any thread (while a step of [`Fused`](crate::Fused) changes shards, they wait); a forward pass is local, so ranks may run different ones.
#[derive(Debug)]
pub struct Zero {
    pub(crate) base: Arc<Base>,
    device: Device,
    pub(crate) slot: Arc<Slot>,
    // Two threads of one rank must not shard at once.
    sharding: Mutex<()>,
}

impl Zero {
    /// An engine on `device` for this rank of `comm`. Collective.
    ///
    /// A device that has autodiff keeps its gradient-checkpointing strategy. To one that lacks it, autodiff is added:
    /// at stage 3 with balanced checkpointing, for only then does Burn's tape let go of a gathered parameter that a
    /// layer looks at through a view (as `Linear` does for some inputs of three dimensions); else without.
    ///
    /// The engine talks over a group of its own, so several engines can live on one communicator; the configuration's
    /// deadline holds for every wait in it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Config`] for a configuration that cannot work, [`ZeroError::UnsupportedDevice`], [`ZeroError::UnsupportedType`],
    /// [`ZeroError::NoThread`], [`ZeroError::Communication`].
    pub fn new(config: ZeroConfig, comm: &Arc<dyn Communicator>, device: Device) -> Result<Self, ZeroError> {
        config.validate()?;
        // Burn has no way to say which devices gathers work on: on others, they panic.
        let probe = Tensor::<1>::empty([0], &device.clone().inner());
        if !is_supported(&probe) {
            return Err(ZeroError::UnsupportedDevice { device: format!("{device:?}") });
        }
        let dtype = config.precision.compute;
        if !probe.device().supports_dtype(tensor_dtype(dtype)) {
            return Err(ZeroError::UnsupportedType { device: format!("{device:?}"), dtype });
        }
        let group = comm
            .split(Some(0), comm.rank().index() as u64, "zero engine")
            .during(|| String::from("forming the engine's group"))?;
        // Every rank named a color, so every rank is in the group.
        let comm = group.unwrap_or_else(|| comm.clone());
        comm.set_deadline(config.deadline());
        let queues = Queues::new(&config, &comm)?;
        let gathers = config.stage.shards_parameters() && comm.world_size().get() > 1;
        let device = match device.is_autodiff() {
            false if gathers => device.autodiff().gradient_checkpointing(),
            _ => device.autodiff(),
        };
        let base = Base::new(config, queues, comm, device.clone().inner())
            .during(|| String::from("finding out whether devices reach each other"))?;
        Ok(Self { base: Arc::new(base), device, slot: Arc::default(), sharding: Mutex::new(()) })
    }

    /// The configuration.
    pub fn config(&self) -> &ZeroConfig {
        &self.base.config
    }

    /// The engine's own group of ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.base.comm
    }

    /// The device that inputs must be on, with autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Builds the model with `build` and shards it over the ranks. Collective.
    ///
    /// Initial values are drawn on rank 0 from the configuration's seed, parameter by parameter in the module's order:
    /// they are those of [`materialize`](crate::materialize) with the same seed, at every world size and stage. Until
    /// the replicas of stages 1 and 2 are made, no rank holds more than its shards and one whole parameter.
    ///
    /// The model behaves as before, and its layers need no change: `Param::val` gives whole parameters, shapes are those
    /// of whole parameters, and so are records. (A `ModuleVisitor` sees what the module stores, which is NaN: visit what
    /// [`unshard`](Self::unshard) gives.) What the module itself stores takes no memory; a value that is set in it
    /// (`map`, `load_record`) would be lost, and is refused by the next step at the latest. A clone is another handle
    /// to the same parameters, not a snapshot: only [`unshard`](Self::unshard) copies.
    ///
    /// Run the model with `model.valid()` where no backward follows: at stage 3 a tape may keep gathered parameters.
    /// Engines of one process build their models one after another; nothing else in the process may draw from Burn's
    /// generator meanwhile, which on the CPU is one for all.
    ///
    /// # Errors
    ///
    /// [`ZeroError::AlreadySharded`], [`ZeroError::RanksDiffer`], [`ZeroError::UnsupportedParameter`],
    /// [`ZeroError::Layout`], [`ZeroError::GeneratorBusy`], [`ZeroError::Offload`] and [`ZeroError::Placement`] for a disk,
    /// [`ZeroError::Communication`]. All but the first fail the
    /// engine's communicator, and with it the world: the other ranks wait for this one.
    pub fn shard<M: Module>(&self, build: impl FnOnce(&Device) -> M) -> Result<M, ZeroError> {
        let _guard = lock(&self.sharding);
        if self.slot.get().is_ok() {
            return Err(ZeroError::AlreadySharded);
        }
        let (model, engine) = shard::shard(&self.base, &self.device, build)?;
        self.slot.set(engine);
        Ok(model)
    }

    /// Stops training the parameters whose module path matches `pattern`, in which `*` stands for any characters and
    /// `?` for one. Collective; gives the model to go on with.
    ///
    /// They keep their values, have no gradient, do not count in the norm, and take no part in reductions. Their
    /// optimizer state is kept for when they are [unfrozen](Self::unfreeze); [`layout`](Self::layout) and plans made of it
    /// know nothing of it. A tied parameter goes by the first of its paths. Parameters that the module alone keeps from
    /// training (`no_grad`) stay so, unless they match.
    ///
    /// Optimizers go on as they are. The model that was given, and clones of it, are no use any more: they give NaN, and
    /// the next call says so. Where the call is refused, they are still good: pass a clone to keep one.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::AdamWConfig, tensor::{Device, Tensor}};
    /// # use zero_burn::{LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
    /// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
    /// # let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
    /// let model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
    /// let mut optimizer = zero.optimizer(AdamWConfig::new().build())?;
    /// let mut model = zero.freeze(model, "*bias")?;
    /// zero.backward(model.forward(Tensor::<2>::ones([2, 8], zero.device())).mean())?;
    /// optimizer.step(1e-3, &mut model)?; // the weight alone
    /// let model = zero.unfreeze(model, "*")?;
    /// # drop(model);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`ZeroError::GradientsPending`] between a backward and its step, [`ZeroError::UpdatePending`],
    /// [`ZeroError::Offload`] without room for gradients on a disk, [`ZeroError::NoSuchParameter`],
    /// [`ZeroError::ForeignModel`], [`ZeroError::ModelChanged`] and [`ZeroError::Replaced`] as by
    /// [`ZeroOptimizer::step`], with [`ZeroError::RefusedElsewhere`] on the other ranks: nothing has changed.
    /// [`ZeroError::RanksDiffer`] where another rank gives another
    /// pattern, which fails the engine, and [`ZeroError::Communication`].
    pub fn freeze<M: Module>(&self, model: M, pattern: &str) -> Result<M, ZeroError> {
        self.set_trainable(model, pattern, false)
    }

    /// Trains the parameters whose module path matches `pattern`, be they frozen by [`freeze`](Self::freeze) or since the
    /// model was sharded. Collective; gives the model to go on with. As `freeze` in all else.
    ///
    /// Optimizer state from before they were frozen is used again as it was.
    ///
    /// # Errors
    ///
    /// Those of [`freeze`](Self::freeze).
    pub fn unfreeze<M: Module>(&self, model: M, pattern: &str) -> Result<M, ZeroError> {
        self.set_trainable(model, pattern, true)
    }

    fn set_trainable<M: Module>(&self, model: M, pattern: &str, trainable: bool) -> Result<M, ZeroError> {
        let _guard = lock(&self.sharding);
        let (model, engine) =
            succession::set_trainable(&self.engine()?, &self.device, model, pattern, trainable)?;
        self.slot.set(engine);
        Ok(model)
    }

    /// Adds parameters: `add` makes a larger model of `model`, of the same type or around it, and what is new in it is
    /// sharded. Collective; gives the model to go on with.
    ///
    /// `add` moves the old parameters as they are, and leaves none out; their paths may change. Values, optimizer state
    /// and parameter group stay theirs. The new ones come last in the [`layout`](Self::layout), and go to the first
    /// group whose pattern matches. Initial values are drawn on rank 0, from the configuration's seed plus the number of
    /// parameters so far: those of [`materialize`](crate::materialize) with that seed, for what is new alone.
    ///
    /// What becomes of the model that was given is told at [`freeze`](Self::freeze).
    ///
    /// ```
    /// # use burn::{nn::{Linear, LinearConfig}, tensor::Device};
    /// # use zero_burn::{LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
    /// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), ZeroError> {
    /// # let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
    /// let model: Vec<Linear> = zero.shard(|device| vec![LinearConfig::new(8, 8).init(device)])?;
    /// let model = zero.extend(model, |mut layers, device| {
    ///     layers.push(LinearConfig::new(8, 8).init(device));
    ///     layers
    /// })?;
    /// # assert_eq!(model.len(), 2);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`ZeroError::GradientsPending`] between a backward and its step, [`ZeroError::UpdatePending`],
    /// [`ZeroError::ParametersLost`],
    /// [`ZeroError::ForeignModel`], [`ZeroError::ModelChanged`] and [`ZeroError::Replaced`] for `model`, with
    /// [`ZeroError::RefusedElsewhere`] on the other ranks: nothing has changed. The others are those of [`shard`](Self::shard), for what `add` gives, and fail the engine as there.
    pub fn extend<M: Module, N: Module>(
        &self,
        model: M,
        add: impl FnOnce(M, &Device) -> N,
    ) -> Result<N, ZeroError> {
        let _guard = lock(&self.sharding);
        let (model, engine) = succession::extend(&self.engine()?, &self.device, model, add)?;
        self.slot.set(engine);
        Ok(model)
    }

    /// An optimizer for the sharded model: Burn's `AdamWConfig::new().build()`, or any other element-wise one.
    ///
    /// Burn's `build` leaves out the configuration's `grad_clipping`, which goes parameter by parameter; the engine's
    /// `clip_norm` goes by the norm over all of them.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotElementwise`] for an optimizer that needs whole matrices (it is tried on a small one),
    /// [`ZeroError::NotOffloadable`], [`ZeroError::Offload`] without room on a disk, [`ZeroError::Workers`],
    /// [`ZeroError::NotSharded`].
    pub fn optimizer<O: ShardOptimizer>(&self, optimizer: O) -> Result<ZeroOptimizer<O>, ZeroError> {
        ZeroOptimizer::new(Arc::clone(&self.slot), optimizer)
    }

    /// Computes the gradients of `loss` (one element) and starts them on their way. Collective.
    ///
    /// The step takes the mean over all backwards since the last one, on all ranks.
    ///
    /// # Errors
    ///
    /// As [`backward_weighted`](Self::backward_weighted).
    pub fn backward<const D: usize>(&self, loss: Tensor<D>) -> Result<(), ZeroError> {
        self.backward_weighted(loss, 1.0)
    }

    /// As [`backward`](Self::backward), with a weight for this loss in the step's mean: the number of rows behind it,
    /// where ranks or micro-batches have unequal numbers of them. Collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], on this rank alone. [`ZeroError::LossNotScalar`], [`ZeroError::LossUntracked`],
    /// [`ZeroError::InvalidWeight`] and any [pending misuse](Self::check), before anything is computed;
    /// [`ZeroError::StaleLoss`], [`ZeroError::Unfrozen`] and [`ZeroError::BackwardFailed`], if backward panics. Whatever
    /// it is on one rank, the others return [`ZeroError::BackwardFailed`]; the gradients since the last step are dropped
    /// everywhere, and the engine is ready for the next try. [`ZeroError::Communication`].
    ///
    /// A loss that depends on the models of two engines gives each its gradients only if that engine's `backward` runs;
    /// detach what the other one is not to learn from.
    pub fn backward_weighted<const D: usize>(&self, loss: Tensor<D>, weight: f64) -> Result<(), ZeroError> {
        let engine = self.engine()?;
        let scale = engine.loss_scale();
        if let Err(refusal) = check_loss(&loss, weight, scale) {
            return engine.backward(0.0, 0.0, Err::<fn(), _>(refusal));
        }
        let value = loss.clone().inner().into_data().iter::<f64>().next().unwrap_or(f64::NAN);
        let run = move || {
            let loss = if scale == 1.0 { loss } else { loss.mul_scalar(scale) };
            drop(loss.backward());
        };
        engine.backward(weight, value, Ok(run))
    }

    /// Takes part in a backward of the other ranks without a loss of its own: for a rank that has no rows this time.
    /// Collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], any [pending misuse](Self::check), [`ZeroError::BackwardFailed`] when backward fails on
    /// another rank, [`ZeroError::Communication`].
    pub fn skip_backward(&self) -> Result<(), ZeroError> {
        self.engine()?.backward(0.0, 0.0, Ok(|| {}))
    }

    /// What the loss is multiplied by in the next backward. The same on all ranks. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn loss_scale(&self) -> Result<f64, ZeroError> {
        Ok(self.engine()?.loss_scale())
    }

    /// What this rank did since the engine began. Local; [`StepOutcome`](crate::StepOutcome) has that of each step.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn statistics(&self) -> Result<Statistics, ZeroError> {
        Ok(self.engine()?.statistics())
    }

    /// Starts or ends to keep [`TraceEvent`]s, which takes memory until they are taken. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn set_tracing(&self, is_tracing: bool) -> Result<(), ZeroError> {
        self.engine()?.recorder.set_tracing(is_tracing);
        Ok(())
    }

    /// The events so far, moved out. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn take_trace(&self) -> Result<Vec<TraceEvent>, ZeroError> {
        Ok(self.engine()?.recorder.take_events())
    }

    /// Runs `compute`, a forward pass for example, and notes it as [`Activity::Compute`] of that name. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], before anything runs.
    pub fn trace_compute<T>(&self, name: &str, compute: impl FnOnce() -> T) -> Result<T, ZeroError> {
        Ok(self.engine()?.recorder.during(Activity::Compute, name, 0, compute))
    }

    /// What [`TraceEvent::start`] would be for an event that begins now. Local; after a barrier, this is how the
    /// clocks of ranks are compared.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn trace_clock(&self) -> Result<Duration, ZeroError> {
        Ok(self.engine()?.recorder.clock())
    }

    /// The first failure that no call could return so far: a *pending misuse* ([`ZeroError::ModelChanged`],
    /// [`ZeroError::StrayGradient`], [`ZeroError::Replaced`], or [`ZeroError::UpdatePending`] for a record), which is told once,
    /// or a lost rank. Local.
    ///
    /// A forward pass that cannot reach another rank's shard computes with NaN, for `Param::val` has no error to give.
    /// `backward`, `step` and `unshard` return that failure; call this after an evaluation.
    ///
    /// # Errors
    ///
    /// That failure, [`ZeroError::NotSharded`].
    pub fn check(&self) -> Result<(), ZeroError> {
        self.engine()?.check()
    }

    /// Where state is kept and how long an update should take, if the configuration leaves a tier to the engine
    /// (`tier = "auto"`): it measures memory and disk when the model is sharded. The same on all ranks. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn placement(&self) -> Result<Option<PlacementPlan>, ZeroError> {
        Ok(self.engine()?.placement().cloned())
    }

    /// How the model is laid out over the ranks, as of now: [`freeze`](Self::freeze) and its like make another one.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn layout(&self) -> Result<Arc<Layout>, ZeroError> {
        Ok(Arc::clone(&self.engine()?.layout))
    }

    /// What this rank holds, measured. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn memory(&self) -> Result<MemoryReport, ZeroError> {
        Ok(self.engine()?.report())
    }

    /// The largest of all ranks' [`memory`](Self::memory), category by category. Collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], [`ZeroError::Communication`].
    pub fn memory_of_largest_rank(&self) -> Result<MemoryReport, ZeroError> {
        let engine = self.engine()?;
        let mut values = engine.report().to_array();
        let compared = engine.comm.all_reduce(&mut values, ReduceOp::Max, "memory report");
        engine.fail(compared.during(|| String::from("comparing memory between ranks")))?;
        Ok(MemoryReport::from_array(values))
    }

    /// Lets [`MemoryReport::gathered_peak`] start over from what is gathered now. Local.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`].
    pub fn reset_gathered_peak(&self) -> Result<(), ZeroError> {
        self.engine()?.gathers.reset_peak();
        Ok(())
    }

    pub(crate) fn engine(&self) -> Result<Arc<Engine>, ZeroError> {
        self.slot.get()
    }
}

fn check_loss<const D: usize>(loss: &Tensor<D>, weight: f64, scale: f64) -> Result<(), ZeroError> {
    if loss.shape().num_elements() != 1 {
        return Err(ZeroError::LossNotScalar { shape: loss.shape().to_vec() });
    }
    if !loss.is_tracked() {
        return Err(ZeroError::LossUntracked);
    }
    // Gradients are divided by the product, in `f32`.
    if !(1e-20..=1e20).contains(&weight) || !(1e-35..=1e35).contains(&(weight * scale)) {
        return Err(ZeroError::InvalidWeight { weight, scale });
    }
    Ok(())
}
