//! From a checkpoint, or published weights, to the shards and states of this rank.

use std::cell::RefCell;

use serde_json::{Map, Value};
use zero_checkpoint::{
    BoxError, Checkpoint, Coordinator, LoadOptions, LoadReport, Manifest, PublishedWeights, Target, Wanted,
    WantedParameter, WantedState, WriteBytes,
};
use zero_core::{DType, LossScale, Parameter, ParameterIndex};

use crate::ZeroError;
use crate::contents::rate_from;
use crate::engine::Engine;
use crate::exclusive::Exclusive;
use crate::floats::burn_dtype;
use crate::held::Updated;
use crate::kept::{Kept, pieces};
use crate::optimizer::ZeroOptimizer;
use crate::progress::{Progress, loss_scale};
use crate::rule::{Host, ShardOptimizer};

/// Tensors of a state, by name and type.
type Tensors = Vec<(String, DType)>;

/// What becomes of this rank's shards.
type Shards = Vec<(ParameterIndex, Updated)>;

/// Loads `checkpoint`, which all ranks have opened, on all ranks or on none. `host` has the ranks of this host.
pub(crate) fn restore<O: ShardOptimizer>(
    engine: &Engine,
    optimizer: &mut ZeroOptimizer<O>,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    host: &dyn Coordinator,
) -> Result<LoadReport, ZeroError> {
    let plan = engine.together(Plan::new(engine, optimizer, checkpoint, options, host))?;
    let report = replace(engine, || plan.load(engine, optimizer, checkpoint, options, host))?;
    if options.optimizer {
        plan.end(engine, optimizer, checkpoint.manifest());
    }
    Ok(report)
}

/// Puts what `load` makes of this rank's shards in place, once all ranks have theirs; nobody sees shards meanwhile. A rank
/// that fails ends the engine on all.
fn replace(
    engine: &Engine,
    load: impl FnOnce() -> Result<(LoadReport, Shards), ZeroError>,
) -> Result<LoadReport, ZeroError> {
    let _updating = engine.phase.begin_update();
    let (report, shards) = engine.together(load()).inspect_err(|error| engine.break_off(error))?;
    engine.replace_shards(shards, &[])?;
    Ok(report)
}

/// What is to be loaded, known to be there and to go together with the model.
struct Plan {
    /// Of the optimizer's states, by parameter; none where they begin anew.
    tensors: Vec<Tensors>,
    /// Whether all of them are loaded, by parameter.
    is_complete: Vec<bool>,
    /// How often each parameter was updated.
    updates: Vec<u64>,
    progress: Progress,
    scale: Option<LossScale>,
}

impl Plan {
    fn new<O: ShardOptimizer>(
        engine: &Engine,
        optimizer: &ZeroOptimizer<O>,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        host: &dyn Coordinator,
    ) -> Result<Self, ZeroError> {
        let parameters = engine.layout.parameters().len();
        let mut plan = Self {
            tensors: vec![Tensors::new(); parameters],
            is_complete: vec![true; parameters],
            updates: vec![0; parameters],
            progress: Progress::default(),
            scale: None,
        };
        let planned = match options.optimizer {
            true => plan.look_for_states(engine, optimizer, checkpoint.manifest(), options),
            false => Ok(()),
        };
        // The ranks of the host take part even if this one has failed.
        let checked = checkpoint.load(nothing(engine, &plan.tensors), options, host);
        planned?;
        plan.settle(engine, optimizer, &checked?)?;
        Ok(plan)
    }

    /// Looks for states, and for what else the optimizer needs.
    fn look_for_states<O: ShardOptimizer>(
        &mut self,
        engine: &Engine,
        optimizer: &ZeroOptimizer<O>,
        manifest: &Manifest,
        options: &LoadOptions,
    ) -> Result<(), ZeroError> {
        self.progress = Progress::from_json(&manifest.training.optimizer)?;
        self.scale = loss_scale(engine, &manifest.training.loss_scale)?;
        let kept = optimizer.groups.iter().map(|group| group.optimizer.tensors(Host(engine)));
        let kept: Vec<_> = kept.collect::<Result<_, _>>()?;
        for (index, parameter) in engine.layout.parameters().iter().enumerate() {
            let spec = parameter.spec();
            let mut paths = std::iter::once(&spec.name).chain(&spec.aliases);
            let Some(saved) = paths.find_map(|path| manifest.parameter(path)) else { continue };
            let group = optimizer.group_of[index];
            let (now, before) = (&optimizer.groups[group].pattern, saved.group.as_ref());
            if let Some(before) = before.filter(|before| *before != now && !options.allow.groups) {
                let name = parameter.name();
                return Err(ZeroError::OddCheckpoint {
                    reason: format!(
                        "`{name}` was in the group `{before}`, and is in `{now}` now; make the same groups, or allow \
                         others (`Allow::groups`)"
                    ),
                });
            }
            if saved.updates > 0 || !saved.states.is_empty() {
                self.tensors[index].clone_from(&kept[group]);
            }
        }
        Ok(())
    }

    /// Knows now what will be loaded: what the checkpoint has not begins anew.
    fn settle<O: ShardOptimizer>(
        &mut self,
        engine: &Engine,
        optimizer: &ZeroOptimizer<O>,
        found: &LoadReport,
    ) -> Result<(), ZeroError> {
        for (index, parameter) in engine.layout.parameters().iter().enumerate() {
            let (states, tensors) = (&found.parameters[index].states, &mut self.tensors[index]);
            if tensors.is_empty() || states.contains(&true) {
                self.updates[index] = found.parameters[index].updates;
            } else {
                tensors.clear();
            }
            self.is_complete[index] = !states.contains(&false);
            // No rank has a state of a parameter without elements.
            if !tensors.is_empty() && parameter.numel() > 0 {
                let rule = &optimizer.groups[optimizer.group_of[index]].optimizer;
                rule.check_scalars(Host(engine), self.scalars(parameter)).map_err(|reason| {
                    let name = parameter.name();
                    ZeroError::OddCheckpoint { reason: format!("the optimizer state of `{name}`: {reason}") }
                })?;
            }
        }
        Ok(())
    }

    fn scalars(&self, parameter: &Parameter) -> Option<&Map<String, Value>> {
        self.progress.scalars.get(parameter.name())
    }

    /// Loads shards, where nobody sees them yet, and states.
    fn load<O: ShardOptimizer>(
        &self,
        engine: &Engine,
        optimizer: &mut ZeroOptimizer<O>,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        host: &dyn Coordinator,
    ) -> Result<(LoadReport, Shards), ZeroError> {
        let mut shards = Taken::new(engine);
        let (states, failed) = match self.blanks(engine, optimizer) {
            Ok(states) => (states, None),
            // What is asked for then has no place to go to, which all ranks of the host are told.
            Err(error) => (engine.layout.parameters().iter().map(|_| None).collect(), Some(error)),
        };
        let mut values = shards.values(engine);
        let mut state_tensors: Vec<Vec<_>> = states
            .iter()
            .zip(&self.tensors)
            .map(|(state, tensors)| {
                (0..tensors.len()).map(|tensor| StateTensor { state: state.as_ref(), tensor }).collect()
            })
            .collect();
        let mut wanted = wanted(engine, &mut values);
        for ((parameter, states), tensors) in
            wanted.parameters.iter_mut().zip(&mut state_tensors).zip(&self.tensors)
        {
            parameter.states.extend(states.iter_mut().zip(tensors).map(|(state, (name, dtype))| {
                WantedState { name: name.clone(), target: Target::elsewhere(*dtype, state) }
            }));
        }
        let loaded = checkpoint.load(wanted, options, host);
        if let Some(error) = failed {
            return Err(error);
        }
        let report = loaded?;
        drop((values, state_tensors));
        if options.optimizer {
            let states = states.into_iter().map(|state| state.map(RefCell::into_inner));
            self.take_up(engine, optimizer, states)?;
        }
        Ok((report, shards.end(engine)?))
    }

    /// States to be filled, where this rank has elements whose states are loaded.
    fn blanks<O: ShardOptimizer>(
        &self,
        engine: &Engine,
        optimizer: &mut ZeroOptimizer<O>,
    ) -> Result<Vec<Option<RefCell<O::State>>>, ZeroError> {
        let parameters = engine.layout.parameters().iter().zip(&self.tensors);
        let blanks = parameters.map(|(parameter, tensors)| {
            let index = parameter.index();
            if tensors.is_empty() || engine.holdings.owned(index).is_empty() {
                return Ok(None);
            }
            // What is there is of use where all of it is written anew; else it gives its room back first.
            let old = optimizer.states[index.index()].take().filter(|_| self.is_complete[index.index()]);
            let rule = &optimizer.groups[optimizer.group_of[index.index()]].optimizer;
            Ok(Some(RefCell::new(rule.blank(Host(engine), index, old, self.scalars(parameter))?)))
        });
        blanks.collect()
    }

    /// Gives the optimizer its states; what is not loaded begins anew.
    fn take_up<O: ShardOptimizer>(
        &self,
        engine: &Engine,
        optimizer: &mut ZeroOptimizer<O>,
        states: impl Iterator<Item = Option<O::State>>,
    ) -> Result<(), ZeroError> {
        for (index, state) in states.enumerate() {
            optimizer.states[index] = match state {
                Some(state) => Some(state),
                None => {
                    // As above.
                    optimizer.states[index] = None;
                    let rule = &optimizer.groups[optimizer.group_of[index]].optimizer;
                    rule.begin(Host(engine), ParameterIndex::new(index))?
                }
            };
        }
        Ok(())
    }

    /// Gives the optimizer and the engine what is no tensor.
    fn end<O: ShardOptimizer>(self, engine: &Engine, optimizer: &mut ZeroOptimizer<O>, manifest: &Manifest) {
        (optimizer.step, optimizer.skipped) = (self.progress.steps, self.progress.skipped);
        optimizer.updates = self.updates;
        optimizer.count_states();
        for group in &mut optimizer.groups {
            let saved = manifest.groups.iter().find(|saved| saved.name == group.pattern);
            if let Some(rate) = saved.and_then(|saved| rate_from(&saved.hyper_parameters)) {
                group.rate = rate;
            }
        }
        if let Some(scale) = self.scale {
            engine.set_loss_scale(scale);
        }
    }
}

/// Loads weights that somebody has published, on all ranks or on none.
pub(crate) fn restore_published(
    engine: &Engine,
    weights: &PublishedWeights,
    options: &LoadOptions,
) -> Result<LoadReport, ZeroError> {
    let none = vec![Tensors::new(); engine.layout.parameters().len()];
    engine.together(weights.load(nothing(engine, &none), options).map_err(ZeroError::from))?;
    replace(engine, || {
        let mut shards = Taken::new(engine);
        let report = weights.load(wanted(engine, &mut shards.values(engine)), options)?;
        Ok((report, shards.end(engine)?))
    })
}

/// Asks for every parameter, and for these tensors of its state, but for no element: to see whether all are there and fit.
fn nothing(engine: &Engine, tensors: &[Tensors]) -> Wanted<'static> {
    let none = |dtype| Target::bytes(dtype, &mut []);
    let parameters = engine.layout.parameters().iter().zip(tensors);
    let wanted = parameters.map(|(parameter, tensors)| WantedParameter {
        spec: parameter.spec().clone(),
        layout: engine.weight_layout(parameter.index()),
        range: 0..0,
        values: none(DType::F32),
        states: tensors
            .iter()
            .map(|(name, dtype)| WantedState { name: name.clone(), target: none(*dtype) })
            .collect(),
    });
    Wanted { parameters: wanted.collect() }
}

/// Asks for what this rank holds of every parameter.
fn wanted<'a>(engine: &Engine, values: &'a mut [Values<'_>]) -> Wanted<'a> {
    let parameters = engine.layout.parameters().iter().zip(values);
    let wanted = parameters.map(|(parameter, values)| WantedParameter {
        spec: parameter.spec().clone(),
        layout: engine.weight_layout(parameter.index()),
        range: engine.holdings.owned(parameter.index()),
        values: Target::elsewhere(DType::F32, values),
        states: Vec::new(),
    });
    Wanted { parameters: wanted.collect() }
}

/// All shards of this rank, moved out to be written to.
struct Taken(Vec<Exclusive>);

impl Taken {
    fn new(engine: &Engine) -> Self {
        let parameters = engine.layout.parameters().iter();
        let shards = parameters.map(|parameter| engine.holdings.take_shard(parameter.index()));
        Self(shards.map(Exclusive::new).collect())
    }

    /// Where the values of each go.
    fn values<'a>(&'a mut self, engine: &'a Engine) -> Vec<Values<'a>> {
        let shards = self.0.iter_mut().zip(engine.layout.parameters());
        let values = shards.map(|(shard, parameter)| Values {
            engine,
            parameter: parameter.index(),
            in_memory: bytemuck::cast_slice_mut(shard.values()),
        });
        values.collect()
    }

    /// What becomes of them.
    fn end(self, engine: &Engine) -> Result<Shards, ZeroError> {
        let shards = self.0.into_iter().zip(engine.layout.parameters()).map(|(shard, parameter)| {
            let shard = shard.into_tensor(&engine.home);
            let copy = match engine.masters_on_disk() {
                Some(_) => Some(engine.with_disk(parameter.index(), shard.clone())?),
                None => None,
            };
            let copy = copy.map(|all| all.cast(burn_dtype(engine.config.precision.compute)));
            Ok((parameter.index(), Updated { shard, copy }))
        });
        shards.collect()
    }
}

/// Where this rank's master weights of a parameter go: into memory, and the rest to a disk.
struct Values<'a> {
    engine: &'a Engine,
    parameter: ParameterIndex,
    in_memory: &'a mut [u8],
}

impl WriteBytes for Values<'_> {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError> {
        let lengths = [self.in_memory.len() as u64, u64::MAX / 2];
        for piece in pieces(lengths, offset, bytes.len()) {
            let from = &bytes[piece.bytes];
            match (piece.place, self.engine.masters_on_disk()) {
                (1, Some(masters)) => masters.write(self.parameter, piece.offset, from)?,
                _ => self.in_memory[piece.offset as usize..][..from.len()].copy_from_slice(from),
            }
        }
        Ok(())
    }
}

/// Where one tensor of a state goes; nowhere if this rank has no elements.
struct StateTensor<'a, S> {
    state: Option<&'a RefCell<S>>,
    tensor: usize,
}

impl<S: Kept> WriteBytes for StateTensor<'_, S> {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError> {
        match self.state {
            Some(state) => state.borrow_mut().write(self.tensor, offset, bytes),
            None => Err("there is no place for it".into()),
        }
    }
}
