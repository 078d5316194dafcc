//! From a module to its shards: initial values drawn once, in order, and dealt out parameter by parameter.
//!
//! Rank 0 alone draws, so that values depend on the seed and the model, not on the number of ranks: in-process
//! ranks even share one random generator. At any moment it holds its shards and one whole parameter.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};
use zero_comm::{CommError, Communicator, CommunicatorExt, panic_message};
use zero_core::{Layout, Offload, Parameter, ParameterIndex, ParameterSpec, Precision, Rank, ZeroConfig};

use crate::ZeroError;
use crate::agreement::agree;
use crate::base::Base;
use crate::census::Census;
use crate::engine::{Engine, lock};
use crate::error::During;
use crate::held::{Held, owned};
use crate::host::HostTensor;
use crate::materialize::generator;
use crate::stand_in::Attach;

/// Builds the model on every rank and shards it.
pub(crate) fn shard<M: Module>(
    base: &Arc<Base>,
    device: &Device,
    build: impl FnOnce(&Device) -> M,
) -> Result<(M, Arc<Engine>), ZeroError> {
    let built = build_and_deal(base, device, base.config.seed, None, settings(&base.config), build)?;
    let (model, engine) = built.take_up(base, None)?;
    let attach = Attach { engine: &engine, device, held_back: HashSet::new() };
    Ok((model.apply_reparameterization(attach), engine))
}

/// A model whose new parameters have been dealt out.
pub(crate) struct Dealt<M> {
    model: M,
    census: Census,
    /// Of the new parameters.
    held: Vec<Held>,
}

impl<M> Dealt<M> {
    /// Makes the engine of the model, which shows the new parameters to all ranks. Collective.
    pub(crate) fn take_up(
        self,
        base: &Arc<Base>,
        previous: Option<&Engine>,
    ) -> Result<(M, Arc<Engine>), ZeroError> {
        let Self { model, census: Census { specs, positions, known, linear, running_state, .. }, held } =
            self;
        let new: Vec<_> = (known..specs.len()).map(ParameterIndex::new).collect();
        let layout = lay_out(base, specs)?;
        let ids = positions.into_iter().map(|(id, position)| (id, ParameterIndex::new(position))).collect();
        let is_placed = base.masters_on_disk().is_some();
        let build = || {
            base.place(&layout)?;
            base.open_masters()?;
            let held = new.iter().zip(held).map(|(index, held)| match is_placed {
                true => Ok(held),
                false => base.put(&layout.parameters()[index.index()], held),
            });
            let held: Vec<_> = held.collect::<Result<_, ZeroError>>()?;
            lock(&base.held).extend(held);
            lock(&base.linear).extend(&linear[known..]);
            *lock(&base.running_state) = running_state;
            Engine::new(Arc::clone(base), layout, ids, previous)
        };
        let engine = build().inspect_err(|error: &ZeroError| base.comm.abort(&error.to_string()))?;
        let engine = Arc::new(engine);
        engine.publish(&new).during(|| String::from("publishing initial parameters"))?;
        Ok((model, engine))
    }
}

/// Builds a model on every rank and deals out the parameters that `engine`, if there is one, does not know. `what` has
/// to be the same on all ranks.
pub(crate) fn build_and_deal<M: Module>(
    base: &Base,
    device: &Device,
    seed: u64,
    engine: Option<&Engine>,
    mut what: Vec<String>,
    build: impl FnOnce(&Device) -> M,
) -> Result<Dealt<M>, ZeroError> {
    let (config, comm) = (&base.config, base.comm.as_ref());
    let root = comm.rank() == Rank::ROOT;
    let abort = |error: ZeroError| {
        // The others wait for this rank's part in what follows.
        comm.abort(&error.to_string());
        error
    };
    let build = |device: &Device| {
        // The others wait for this rank, even if somebody catches the panic.
        let built = catch_unwind(AssertUnwindSafe(|| build(device)));
        built.unwrap_or_else(|panic| {
            comm.abort(&format!("building the model panicked: {}", panic_message(&*panic)));
            resume_unwind(panic)
        })
    };
    let mut drawing = None;
    let (model, mut census) = if root {
        // After the others: what their constructors draw must not come between the seed and ours.
        comm.barrier("before rank 0 builds the model").during(building)?;
        drawing = Some(generator(config).map_err(abort)?);
        device.seed(seed);
        let model = build(device);
        let census = Census::of(&model, device, engine).map_err(abort)?;
        (model, census)
    } else {
        let model = {
            let _drawing = generator(config).map_err(abort)?;
            // Only parameters are dealt out by rank 0: whatever else is drawn has to be the same by itself.
            device.seed(seed);
            build(device)
        };
        let census = Census::of(&model, device, engine).map_err(abort)?;
        comm.barrier("before rank 0 builds the model").during(building)?;
        (model, census)
    };
    what.extend(census.specs.iter().map(describe));
    agree(comm, &what)?;
    if let Some(engine) = engine {
        let lost =
            census.specs.iter().zip(engine.layout.parameters()).filter(|(spec, _)| spec.name.is_empty());
        let names: Vec<_> = lost.map(|(_, parameter)| parameter.name().to_owned()).collect();
        if !names.is_empty() {
            return Err(ZeroError::ParametersLost { names });
        }
    }

    base.open_masters().map_err(abort)?;
    // Which parameters are trainable is not known yet; partitions do not depend on it.
    let partitions = lay_out(base, census.specs.clone())?;
    let dealer = Dealer { base, device: &base.device, layout: &partitions };
    let (model, held) = if root {
        let model = model.map(&mut DropAliases {
            known: census.known,
            positions: &census.positions,
            done: HashSet::new(),
        });
        let mut dealing =
            Dealing { dealer, census: &mut census, done: HashSet::new(), held: Vec::new(), error: None };
        let model = model.map(&mut dealing);
        let Dealing { held, error, .. } = dealing;
        match error {
            Some(error) => return Err(abort(error)),
            None => (model, held),
        }
    } else {
        let new = partitions.parameters().iter().skip(census.known);
        let held = new.map(|parameter| {
            let held = dealer.receive(parameter).during(|| String::from("receiving initial values"))?;
            base.put(parameter, held).map_err(abort)
        });
        (model, held.collect::<Result<_, ZeroError>>()?)
    };
    drop(drawing);
    share_trainable(comm, &mut census.specs).during(building)?;
    Ok(Dealt { model, census, held })
}

/// The layout of `specs`. What cannot be laid out fails the communicator.
pub(crate) fn lay_out(base: &Base, specs: Vec<ParameterSpec>) -> Result<Layout, ZeroError> {
    Layout::new(specs, base.comm.world_size(), base.config.layout_options()).map_err(|error| {
        let error = ZeroError::from(error);
        base.comm.abort(&error.to_string());
        error
    })
}

fn building() -> String {
    String::from("building the model")
}

/// The configuration as far as it has to be the same on all ranks.
fn settings(config: &ZeroConfig) -> Vec<String> {
    // Every key is named, so that a new one cannot be forgotten. How long a rank waits, and what it gathers ahead and
    // keeps, is its own affair.
    let ZeroConfig {
        stage,
        bucket_bytes,
        reduce_gradients: _,
        overlap,
        device_transport: _,
        persistence_threshold,
        lookahead_bytes: _,
        live_bytes: _,
        reuse_bytes: _,
        alignment,
        clip_norm,
        seed,
        deadline_seconds: _,
        precision,
        loss_scale: _,
        offload,
    } = config;
    let Offload {
        optimizer,
        gradients,
        parameters,
        delayed_update,
        exact_steps,
        buffer_bytes: _,
        block_bytes: _,
        depth: _,
    } = offload;
    let Precision { compute, reduce: _, accumulate, optimizer_state } = precision;
    vec![
        stage.to_string(),
        format!("bucket_bytes = {}", bucket_bytes.get()),
        format!("persistence_threshold = {persistence_threshold}"),
        format!("alignment = {alignment}"),
        clip_norm.map_or_else(|| String::from("no clip_norm"), |limit| format!("clip_norm = {limit}")),
        format!("seed = {seed}"),
        format!("reduce_gradients = {:?}", config.reduce_gradients()),
        format!("overlap = {overlap}"),
        format!("precision.compute = {compute}"),
        format!("precision.reduce = {}", precision.reduce()),
        format!("precision.accumulate = {accumulate}"),
        format!("precision.optimizer_state = {optimizer_state}"),
        format!("loss_scale = {:?}", config.loss_scaling()),
        format!("offload.optimizer.tier = {}", optimizer.tier),
        format!("offload.gradients.tier = {}", gradients.tier),
        format!("offload.parameters.tier = {}", parameters.tier),
        format!("offload.parameters.fraction {} 0", if parameters.fraction > 0.0 { ">" } else { "=" }),
        format!("offload.delayed_update = {delayed_update}, exact_steps = {exact_steps}"),
    ]
}

fn describe(spec: &ParameterSpec) -> String {
    format!("parameter {} {:?} {}", spec.name, spec.shape, spec.aliases.join(" ")).trim_end().to_owned()
}

/// Only rank 0 has initialised its parameters, and with them knows which are trainable.
fn share_trainable(comm: &dyn Communicator, specs: &mut [ParameterSpec]) -> Result<(), CommError> {
    let mut trainable: Vec<u8> = specs.iter().map(|spec| u8::from(spec.trainable)).collect();
    comm.broadcast(&mut trainable, Rank::ROOT, "which parameters are trainable")?;
    for (spec, trainable) in specs.iter_mut().zip(trainable) {
        spec.trainable = trainable != 0;
    }
    Ok(())
}

/// Moves initial values from rank 0 to their owners.
#[derive(Clone, Copy)]
struct Dealer<'a> {
    base: &'a Base,
    device: &'a Device,
    layout: &'a Layout,
}

impl Dealer<'_> {
    /// Rank 0's side: keeps its own part of `whole`.
    fn deal(&self, parameter: &Parameter, whole: Tensor<1>) -> Result<Held, CommError> {
        let partition = parameter.partition();
        if self.base.comm.world_size().get() == 1 || !self.base.config.stage.shards_optimizer() {
            let mut values = HostTensor::new(whole).as_slice().to_vec();
            self.base.comm.broadcast(&mut values, Rank::ROOT, parameter.name())?;
            return Ok(self.held(values));
        }
        let values = HostTensor::new(whole);
        let mut own = vec![0.0_f32; partition.len(Rank::ROOT)];
        let counts: Vec<usize> = partition.ranges().map(|(_, range)| range.len()).collect();
        let mut received = vec![0; counts.len()];
        received[0] = own.len();
        self.base.comm.all_to_all_uneven(
            values.as_slice(),
            &counts,
            &mut own,
            &received,
            parameter.name(),
        )?;
        Ok(self.held(own))
    }

    /// The other ranks' side.
    fn receive(&self, parameter: &Parameter) -> Result<Held, CommError> {
        let partition = parameter.partition();
        let mut values = vec![0.0_f32; owned(self.base.config.stage, self.base.comm.rank(), partition).len()];
        if !self.base.config.stage.shards_optimizer() {
            self.base.comm.broadcast(&mut values, Rank::ROOT, parameter.name())?;
            return Ok(self.held(values));
        }
        let world = self.base.comm.world_size().get();
        let mut received = vec![0; world];
        received[0] = values.len();
        self.base.comm.all_to_all_uneven(&[], &vec![0; world], &mut values, &received, parameter.name())?;
        Ok(self.held(values))
    }

    fn held(&self, values: Vec<f32>) -> Held {
        let shape = [values.len()];
        Held::new(Tensor::from_data(burn::tensor::TensorData::new(values, shape), &self.base.home))
    }
}

/// Takes the value out of all but the first of tied parameters, which would keep it alive when the first is sharded.
struct DropAliases<'a> {
    /// How many parameters have been sharded before.
    known: usize,
    positions: &'a HashMap<ParamId, usize>,
    done: HashSet<ParamId>,
}

impl ModuleMapper for DropAliases<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_new = self.positions.get(&param.id).is_some_and(|position| *position >= self.known);
        if !is_new || self.done.insert(param.id) {
            param
        } else {
            placeholder(param.id, &param.lazy_device())
        }
    }
}

/// Keeps a parameter's place until its stand-in is attached.
fn placeholder<const D: usize>(id: ParamId, device: &Device) -> Param<Tensor<D>> {
    Param::initialized(id, Tensor::zeros([0; D], device))
}

/// Walks rank 0's model, initialising one parameter at a time.
struct Dealing<'a> {
    dealer: Dealer<'a>,
    census: &'a mut Census,
    done: HashSet<ParamId>,
    held: Vec<Held>,
    error: Option<ZeroError>,
}

impl ModuleMapper for Dealing<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&position) = self.census.positions.get(&param.id) else { return param };
        if position < self.census.known {
            return param;
        }
        let id = param.id;
        if self.error.is_some() || !self.done.insert(id) {
            return placeholder(id, self.dealer.device);
        }
        let (_, value, _) = param.consume();
        let spec = &mut self.census.specs[position];
        spec.trainable = value.is_require_grad();
        let shape = value.shape().to_vec();
        let refusal = if value.dtype() != DType::F32 {
            Some(format!("it is {:?}; shards are f32 master weights, build the model in f32", value.dtype()))
        } else if shape != spec.shape {
            Some(format!("its initial value has shape {shape:?}, but it was declared with {:?}", spec.shape))
        } else {
            None
        };
        if let Some(reason) = refusal {
            self.error = Some(ZeroError::UnsupportedParameter { name: spec.name.clone(), reason });
            return placeholder(id, self.dealer.device);
        }
        let numel = value.shape().num_elements();
        let parameter = &self.dealer.layout.parameters()[position];
        let dealt = self.dealer.deal(parameter, value.inner().reshape([numel]));
        let dealt = dealt.during(|| format!("dealing out `{}`", parameter.name()));
        match dealt.and_then(|held| self.dealer.base.put(parameter, held)) {
            Ok(held) => self.held.push(held),
            Err(error) => self.error = Some(error),
        }
        placeholder(id, self.dealer.device)
    }
}
