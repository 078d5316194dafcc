//! What a sharded module stores of its parameters: a stand-in each, of the parameter's shape and without memory.
//!
//! Values are the engine's. The stand-in is a leaf of autodiff for the gather to hang on, tells layers that ask for a
//! shape the true one, never goes stale, and is NaN for whoever reads it past `Param::val`.

use std::collections::HashSet;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Shape, Tensor};
use zero_core::ParameterIndex;

use crate::ZeroError;
use crate::engine::{Engine, Standing};
use crate::gather::{GatherOps, Source};
use crate::host::{HostTensor, same_storage};

/// Makes `Param::val` give the gathered parameter.
#[derive(Module, Debug)]
pub(crate) struct Sharded {
    #[module(skip)]
    source: Source,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if self.source.engine.standing() == Standing::Leaving {
            return base;
        }
        Tensor::from_dispatch(<Dispatch as GatherOps>::gather(base.into_dispatch(), self.source.clone()))
    }
}

/// Gives each parameter its stand-in, the gather as its value, and the way into records.
pub(crate) struct Attach<'a> {
    pub(crate) engine: &'a Arc<Engine>,
    pub(crate) device: &'a Device,
    /// Trainable ones that the module alone keeps from training (`no_grad`).
    pub(crate) held_back: HashSet<ParameterIndex>,
}

impl Reparameterizer for Attach<'_> {
    type Reparam = Sharded;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Sharded>) {
        let Some(&parameter) = self.engine.ids.get(&param.id) else { return (param, None) };
        let source = Source { engine: self.engine.clone(), parameter };
        let (saved, loaded) = (source.clone(), source.clone());
        let shape = Shape::from(self.engine.shape(parameter));
        let stand_in = stand_in::<D>(self.engine, parameter, self.device);
        let graded = self.engine.parameter(parameter).trainable() && !self.held_back.contains(&parameter);
        let stand_in = Param::initialized(param.id, stand_in.set_require_grad(graded))
            // A record gets the whole parameter.
            .save_mapper(move |_| {
                saved.engine.note_unless_current();
                saved.engine.master_or_nan(parameter).reshape::<D, _>(shape.clone())
            })
            .load_mapper(move |value| {
                loaded.engine.report_change(parameter);
                value
            });
        (stand_in, Some(Sharded { source }))
    }
}

fn stand_in<const D: usize>(engine: &Engine, parameter: ParameterIndex, device: &Device) -> Tensor<D> {
    let shape = engine.shape(parameter);
    let stand_in = match shape.contains(&0) {
        true => Tensor::<D>::empty(Shape::from(shape), &engine.device),
        false => engine.stand_ins[parameter.index()].clone().reshape([1; D]).expand(Shape::from(shape)),
    };
    let stand_in = Tensor::from_inner(stand_in);
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => stand_in.with_gradient_checkpointing_strategy(strategy),
        None => stand_in,
    }
}

/// Takes a model off its engine, which is on its way out: what is left are the stand-ins.
pub(crate) fn detach<M: Module>(model: M, engine: &Engine) -> M {
    engine.set_standing(Standing::Leaving);
    let model = model.materialize();
    engine.set_standing(Standing::Replaced);
    model
}

/// A whole model on its own: no engine behind its values or its records. They are from `master` where those are not what
/// layers compute with.
pub(crate) fn unshard<M: Module>(
    model: &M,
    engine: &Engine,
    master: impl FnMut(ParameterIndex) -> Result<Tensor<1>, ZeroError>,
) -> Result<M, ZeroError> {
    let mut detach = Detach { engine, master, error: None };
    let whole = model.valid().materialize().map(&mut detach);
    detach.error.map_or(Ok(whole), Err)
}

struct Detach<'a, F> {
    engine: &'a Engine,
    master: F,
    /// The first.
    error: Option<ZeroError>,
}

impl<F: FnMut(ParameterIndex) -> Result<Tensor<1>, ZeroError>> ModuleMapper for Detach<'_, F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&parameter) = self.engine.ids.get(&param.id) else { return param };
        // Says what `train` makes of it.
        let trainable = self.engine.parameter(parameter).trainable();
        let whole = match self.engine.is_mixed() && self.error.is_none() {
            false => param.val(),
            true => match (self.master)(parameter) {
                Ok(master) => master.reshape::<D, _>(Shape::from(self.engine.shape(parameter))),
                Err(error) => {
                    self.error = Some(error);
                    param.val()
                }
            },
        };
        Param::initialized(param.id, whole).set_require_grad(trainable)
    }
}

/// Refuses a model that is not the engine's, or in which parameters were changed behind the engine's back: values are
/// the engine's, so such a change would be lost without a word.
///
/// Gives the trainable parameters that the module alone keeps from training.
pub(crate) fn check_model<M: Module>(
    model: &M,
    engine: &Engine,
) -> Result<HashSet<ParameterIndex>, ZeroError> {
    check(model, engine, false)
}

/// As [`check_model`], for a model that may have parameters that the engine does not know.
pub(crate) fn check_extended<M: Module>(
    model: &M,
    engine: &Engine,
) -> Result<HashSet<ParameterIndex>, ZeroError> {
    check(model, engine, true)
}

fn check<M: Module>(
    model: &M,
    engine: &Engine,
    newcomers: bool,
) -> Result<HashSet<ParameterIndex>, ZeroError> {
    let mut check = Check {
        engine,
        newcomers,
        path: Vec::new(),
        visited: None,
        sharded: HashSet::new(),
        held_back: HashSet::new(),
        error: None,
    };
    model.visit(&mut check);
    let mut parameters = engine.layout.parameters().iter();
    let missing = parameters.find(|parameter| !check.sharded.contains(&parameter.index()));
    match (missing, check.error) {
        // Nothing of the model is the engine's: what is in it does not matter.
        (Some(missing), error) if check.sharded.is_empty() || error.is_none() => {
            Err(ZeroError::ForeignModel { name: missing.name().to_owned() })
        }
        (_, Some(error)) => Err(error),
        (_, None) => Ok(check.held_back),
    }
}

struct Check<'a> {
    engine: &'a Engine,
    /// Whether parameters that the engine does not know may be there, and trainable.
    newcomers: bool,
    path: Vec<String>,
    /// The parameter visited last: its reparameterization is entered next, if it has one.
    visited: Option<ParameterIndex>,
    sharded: HashSet<ParameterIndex>,
    held_back: HashSet<ParameterIndex>,
    error: Option<ZeroError>,
}

impl ModuleVisitor for Check<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let visited = self.visited.take();
        if container_type == "Reparameterization" && name == Sharded::NAME {
            self.sharded.extend(visited);
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visited = self.engine.ids.get(&param.id).copied();
        let error = match self.visited {
            Some(parameter) if is_stand_in(param, self.engine, parameter) => {
                if self.engine.parameter(parameter).trainable() && !param.is_require_grad() {
                    self.held_back.insert(parameter);
                }
                None
            }
            Some(_) if is_old_stand_in(param) => Some(ZeroError::Replaced),
            Some(_) => Some(ZeroError::ModelChanged { name: self.path.join(".") }),
            // A frozen newcomer, or a layer's own state, is no concern of the engine's. To ask an uninitialised one would
            // initialise it.
            None if self.newcomers || (param.is_initialized() && !param.is_require_grad()) => None,
            None => Some(ZeroError::ModelChanged { name: self.path.join(".") }),
        };
        if let Some(error) = error {
            self.error.get_or_insert(error);
        }
    }
}

/// Whether `param` still stores the stand-in it was given. Can be told in host memory only.
fn is_stand_in<const D: usize>(param: &Param<Tensor<D>>, engine: &Engine, parameter: ParameterIndex) -> bool {
    let given = engine.parameter(parameter);
    if param.shape().to_vec() != given.shape() {
        return false;
    }
    given.numel() == 0 || same_storage(param.base().inner(), engine.stand_ins[parameter.index()].clone())
}

/// Whether `param` stores the stand-in of an earlier engine: one NaN for all of its elements.
fn is_old_stand_in<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let numel = param.shape().num_elements();
    if numel == 0 {
        return false;
    }
    let first = param.base().inner().slice(std::array::from_fn::<_, D, _>(|_| 0..1)).reshape([1]);
    let is_nan = first.clone().into_data().iter::<f32>().all(f32::is_nan);
    is_nan && HostTensor::in_place(first).is_some_and(|host| host.allocation().len() == size_of::<f32>())
}
