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
use crate::engine::Engine;
use crate::gather::{GatherOps, Source};
use crate::host::same_storage;

/// Makes `Param::val` give the gathered parameter.
#[derive(Module, Debug)]
pub(crate) struct Sharded {
    #[module(skip)]
    source: Source,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "zero";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        Tensor::from_dispatch(<Dispatch as GatherOps>::gather(base.into_dispatch(), self.source.clone()))
    }
}

/// Gives each parameter its stand-in, the gather as its value, and the way into records.
pub(crate) struct Attach<'a> {
    pub(crate) engine: &'a Arc<Engine>,
    pub(crate) device: &'a Device,
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
        let stand_in = Param::initialized(param.id, stand_in::<D>(self.engine, parameter, self.device))
            // A record gets the whole parameter.
            .save_mapper(move |_| saved.engine.master_or_nan(parameter).reshape::<D, _>(shape.clone()))
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
    let stand_in = match device.gradient_checkpointing_strategy() {
        Some(strategy) => stand_in.with_gradient_checkpointing_strategy(strategy),
        None => stand_in,
    };
    stand_in.set_require_grad(engine.parameter(parameter).trainable())
}

/// A whole model on its own: no engine behind its values or its records.
pub(crate) fn unshard<M: Module>(model: &M, engine: &Engine) -> M {
    struct Detach<'a>(&'a Engine);
    impl ModuleMapper for Detach<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let Some(&parameter) = self.0.ids.get(&param.id) else { return param };
            // Says what `train` makes of it.
            let trainable = self.0.parameter(parameter).trainable();
            let whole = match self.0.is_mixed() {
                true => self.0.master_or_nan(parameter).reshape::<D, _>(Shape::from(self.0.shape(parameter))),
                false => param.val(),
            };
            Param::initialized(param.id, whole).set_require_grad(trainable)
        }
    }
    model.valid().materialize().map(&mut Detach(engine))
}

/// Refuses a model that is not the engine's, or in which parameters were changed behind the engine's back: values are
/// the engine's, so such a change would be lost without a word.
pub(crate) fn check_model<M: Module>(model: &M, engine: &Engine) -> Result<(), ZeroError> {
    let mut check = Check { engine, path: Vec::new(), visited: None, sharded: HashSet::new(), error: None };
    model.visit(&mut check);
    let mut parameters = engine.layout.parameters().iter();
    let missing = parameters.find(|parameter| !check.sharded.contains(&parameter.index()));
    match (missing, check.error) {
        // Nothing of the model is the engine's: what is in it does not matter.
        (Some(missing), error) if check.sharded.is_empty() || error.is_none() => {
            Err(ZeroError::ForeignModel { name: missing.name().to_owned() })
        }
        (_, Some(error)) => Err(error),
        (_, None) => Ok(()),
    }
}

struct Check<'a> {
    engine: &'a Engine,
    path: Vec<String>,
    /// The parameter visited last: its reparameterization is entered next, if it has one.
    visited: Option<ParameterIndex>,
    sharded: HashSet<ParameterIndex>,
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
        let changed = match self.visited {
            Some(parameter) => !is_stand_in(param, self.engine, parameter),
            // A frozen newcomer, or a layer's own state, is no concern of the engine's. To ask an uninitialised one would
            // initialise it.
            None => !param.is_initialized() || param.is_require_grad(),
        };
        if changed {
            self.error.get_or_insert_with(|| ZeroError::ModelChanged { name: self.path.join(".") });
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
