//! From a module to its shards: initial values drawn once, in order, and dealt out parameter by parameter.
//!
//! Rank 0 alone draws, so that values depend on the seed and the model, not on the number of ranks: in-process
//! ranks even share one random generator. At any moment it holds its shards and one whole parameter.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Tensor};
use zero_comm::{CommError, Communicator, CommunicatorExt};
use zero_core::{Layout, Parameter, ParameterIndex, ParameterSpec, Precision, Rank, ZeroConfig};

use crate::ZeroError;
use crate::census::Census;
use crate::engine::Engine;
use crate::error::During;
use crate::held::{Held, owned};
use crate::host::HostTensor;
use crate::materialize::generator;
use crate::queues::Queues;
use crate::stand_in::Attach;

/// Builds the model on every rank and shards it.
pub(crate) fn shard<M: Module>(
    config: &ZeroConfig,
    comm: &Arc<dyn Communicator>,
    queues: Queues,
    device: &Device,
    build: impl FnOnce(&Device) -> M,
) -> Result<(M, Arc<Engine>), ZeroError> {
    let root = comm.rank() == Rank::ROOT;
    let abort = |error: ZeroError| {
        // The others wait for this rank's part in what follows.
        comm.abort(&error.to_string());
        error
    };
    let mut drawing = None;
    let (model, mut census) = if root {
        // After the others: what their constructors draw must not come between the seed and ours.
        comm.barrier("before rank 0 builds the model").during(building)?;
        drawing = Some(generator(config).map_err(abort)?);
        device.seed(config.seed);
        let model = build(device);
        let census = Census::of(&model, device).map_err(abort)?;
        (model.map(&mut DropAliases::default()), census)
    } else {
        let model = {
            let _drawing = generator(config).map_err(abort)?;
            // Only parameters are dealt out by rank 0: whatever else is drawn has to be the same by itself.
            device.seed(config.seed);
            build(device)
        };
        let census = Census::of(&model, device).map_err(abort)?;
        comm.barrier("before rank 0 builds the model").during(building)?;
        (model, census)
    };
    agree(config, comm.as_ref(), &census.specs).map_err(abort)?;

    let inner = device.clone().inner();
    let lay_out = |specs| {
        Layout::new(specs, comm.world_size(), config.layout_options()).map_err(|error| abort(error.into()))
    };
    // Which parameters are trainable is not known yet; partitions do not depend on it.
    let partitions = lay_out(census.specs.clone())?;
    let dealer = Dealer { config, comm: comm.as_ref(), device: &inner, layout: &partitions };
    let (model, held) = if root {
        let mut dealing =
            Dealing { dealer, census: &mut census, done: HashSet::new(), held: Vec::new(), error: None };
        let model = model.map(&mut dealing);
        let Dealing { held, error, .. } = dealing;
        match error {
            Some(error) => return Err(abort(error)),
            None => (model, held),
        }
    } else {
        let held = partitions.parameters().iter().map(|parameter| dealer.receive(parameter));
        let held = held.collect::<Result<_, _>>().during(|| String::from("receiving initial values"))?;
        (model, held)
    };
    drop(drawing);
    share_trainable(comm.as_ref(), &mut census.specs).during(building)?;

    let layout = lay_out(census.specs)?;
    let ids = census.positions.iter().map(|(&id, &position)| (id, ParameterIndex::new(position))).collect();
    let engine = Arc::new(Engine::new(config.clone(), queues, comm.clone(), inner, layout, ids, held));
    let all: Vec<_> = engine.layout.parameters().iter().map(|parameter| parameter.index()).collect();
    engine.publish(&all).during(|| String::from("publishing initial parameters"))?;
    let model = model.apply_reparameterization(Attach { engine: &engine, device });
    Ok((model, engine))
}

fn building() -> String {
    String::from("building the model")
}

/// Refuses models and configurations that differ between ranks, naming the first difference.
fn agree(config: &ZeroConfig, comm: &dyn Communicator, specs: &[ParameterSpec]) -> Result<(), ZeroError> {
    // Every key is named, so that a new one cannot be forgotten. How long a rank waits, and what it gathers ahead and
    // keeps, is its own affair.
    let ZeroConfig {
        stage,
        bucket_bytes,
        reduce_gradients: _,
        overlap,
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
    } = config;
    let Precision { compute, reduce: _, accumulate, optimizer_state } = precision;
    let settings = [
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
    ];
    let describe = |spec: &ParameterSpec| {
        format!("parameter {} {:?} {}", spec.name, spec.shape, spec.aliases.join(" ")).trim_end().to_owned()
    };
    let mine: Vec<String> = settings.into_iter().chain(specs.iter().map(describe)).collect();
    let text = mine.join("\n").into_bytes();
    let roots = comm.broadcast_bytes(text, Rank::ROOT, "configuration and parameters").during(building)?;
    let roots = String::from_utf8_lossy(&roots).into_owned();
    let roots: Vec<&str> = roots.lines().collect();
    let line = |lines: &[&str], at: usize| lines.get(at).map_or("nothing more", |line| line).to_owned();
    let mine: Vec<&str> = mine.iter().map(String::as_str).collect();
    let lines = mine.len().max(roots.len());
    match (0..lines).find(|&at| mine.get(at) != roots.get(at)) {
        None => Ok(()),
        Some(at) => Err(ZeroError::RanksDiffer {
            rank: comm.rank(),
            here: line(&mine, at),
            on_root: line(&roots, at),
        }),
    }
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
    config: &'a ZeroConfig,
    comm: &'a dyn Communicator,
    device: &'a Device,
    layout: &'a Layout,
}

impl Dealer<'_> {
    /// Rank 0's side: keeps its own part of `whole`.
    fn deal(&self, parameter: &Parameter, whole: Tensor<1>) -> Result<Held, CommError> {
        let partition = parameter.partition();
        if self.comm.world_size().get() == 1 || !self.config.stage.shards_optimizer() {
            let mut values = HostTensor::new(whole).as_slice().to_vec();
            self.comm.broadcast(&mut values, Rank::ROOT, parameter.name())?;
            return Ok(self.held(values));
        }
        let values = HostTensor::new(whole);
        let mut own = vec![0.0_f32; partition.len(Rank::ROOT)];
        let counts: Vec<usize> = partition.ranges().map(|(_, range)| range.len()).collect();
        let mut received = vec![0; counts.len()];
        received[0] = own.len();
        self.comm.all_to_all_uneven(values.as_slice(), &counts, &mut own, &received, parameter.name())?;
        Ok(self.held(own))
    }

    /// The other ranks' side.
    fn receive(&self, parameter: &Parameter) -> Result<Held, CommError> {
        let partition = parameter.partition();
        let mut values = vec![0.0_f32; owned(self.config.stage, self.comm.rank(), partition).len()];
        if !self.config.stage.shards_optimizer() {
            self.comm.broadcast(&mut values, Rank::ROOT, parameter.name())?;
            return Ok(self.held(values));
        }
        let world = self.comm.world_size().get();
        let mut received = vec![0; world];
        received[0] = values.len();
        self.comm.all_to_all_uneven(&[], &vec![0; world], &mut values, &received, parameter.name())?;
        Ok(self.held(values))
    }

    fn held(&self, values: Vec<f32>) -> Held {
        let shape = [values.len()];
        Held::new(Tensor::from_data(burn::tensor::TensorData::new(values, shape), self.device))
    }
}

/// Takes the value out of all but the first of tied parameters, which would keep it alive when the first is sharded.
#[derive(Default)]
struct DropAliases(HashSet<ParamId>);

impl ModuleMapper for DropAliases {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.0.insert(param.id) { param } else { placeholder(param.id, &param.lazy_device()) }
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
        match self.dealer.deal(&self.dealer.layout.parameters()[position], value.inner().reshape([numel])) {
            Ok(held) => self.held.push(held),
            Err(error) => {
                let name = spec.name.clone();
                self.error = Err::<(), _>(error).during(|| format!("dealing out `{name}`")).err();
            }
        }
        placeholder(id, self.dealer.device)
    }
}
