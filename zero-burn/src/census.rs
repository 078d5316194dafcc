//! What a module consists of: parameters by path, in traversal order, each once.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Device, Tensor};
use zero_core::{DType, ParameterSpec};

use crate::ZeroError;
use crate::engine::Engine;
use crate::stand_in::Sharded;

/// The parameters of a module, none of them initialised by looking. Those of an engine come first, in its order.
#[derive(Debug, Default)]
pub(crate) struct Census {
    /// In traversal order; `trainable` is not known before initialisation and stands as `true`. One of the engine that
    /// was not found has no name.
    pub(crate) specs: Vec<ParameterSpec>,
    /// Position in `specs` by id; a tied parameter has one id at several paths.
    pub(crate) positions: HashMap<ParamId, usize>,
    /// How many are the engine's.
    pub(crate) known: usize,
    /// Whether a parameter is the weight of a `Linear`, by position; those of the engine are not looked at.
    pub(crate) linear: Vec<bool>,
    /// Paths of state of layers that is no parameter.
    pub(crate) running_state: Vec<String>,
    path: Vec<String>,
    /// The types of the modules that `path` leads through.
    containers: Vec<String>,
    /// State that layers keep for themselves (running statistics): visited like parameters, but not parameters.
    buffers: HashSet<ParamId>,
    device: Device,
    /// The path of the parameter visited last, if it is stored in another layout than it is used in.
    mapped: Option<String>,
    error: Option<ZeroError>,
}

impl Census {
    /// Counts `module`, whose parameters must be on `device` or `engine`'s.
    pub(crate) fn of<M: Module>(
        module: &M,
        device: &Device,
        engine: Option<&Engine>,
    ) -> Result<Self, ZeroError> {
        let mut census = Self { buffers: buffers(module), device: device.clone(), ..Self::default() };
        if let Some(engine) = engine {
            let specs = engine.layout.parameters().iter().map(|parameter| parameter.spec().clone());
            census.specs =
                specs.map(|spec| ParameterSpec { name: String::new(), aliases: vec![], ..spec }).collect();
            census.positions = engine.ids.iter().map(|(&id, index)| (id, index.index())).collect();
            census.known = census.specs.len();
            census.linear = vec![false; census.known];
        }
        module.visit(&mut census);
        census.refuse_mapped(false);
        match census.error.take() {
            Some(error) => Err(error),
            None => Ok(census),
        }
    }

    fn refuse(&mut self, reason: impl Into<String>) {
        self.refuse_at(self.path.join("."), reason);
    }

    fn refuse_at(&mut self, name: String, reason: impl Into<String>) {
        self.error.get_or_insert(ZeroError::UnsupportedParameter { name, reason: reason.into() });
    }
}

impl Census {
    /// Refuses the parameter visited last if mappers showed in it: another engine's, or those of a layout.
    fn refuse_mapped(&mut self, is_sharded: bool) {
        let reason = match is_sharded {
            true => "another engine has it; `unshard` the model first",
            false => {
                "it is stored in another layout than it is used in (`LinearLayout::Col` is); use the usual one"
            }
        };
        if let Some(name) = self.mapped.take() {
            self.refuse_at(name, reason);
        }
    }
}

impl ModuleVisitor for Census {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.refuse_mapped(container_type == "Reparameterization" && name == Sharded::NAME);
        if container_type == "Reparameterization" && name != Sharded::NAME {
            self.refuse(format!(
                "it already carries the reparameterization `{name}`; materialize it, or shard the model first"
            ));
        }
        self.path.push(name.to_owned());
        self.containers.push(container_type.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.buffers.contains(&param.id) {
            self.running_state.push(self.path.join("."));
            return;
        }
        self.refuse_mapped(false);
        let path = self.path.join(".");
        if let Some(&position) = self.positions.get(&param.id) {
            let spec = &mut self.specs[position];
            if spec.name.is_empty() {
                spec.name = path
            } else {
                spec.aliases.push(path)
            }
            return;
        }
        if D == 0 {
            self.refuse("it has no dimension to shard along; give a scalar the shape [1]");
        }
        // The only sign of them that can be seen from here without initialising the parameter.
        let shown = format!("{param:?}");
        if shown.contains("load: true") || shown.contains("save: true") {
            self.mapped = Some(path.clone());
        }
        let device = param.lazy_device();
        if self.device != device || self.device.is_autodiff() != device.is_autodiff() {
            self.refuse("it is not on the device that was passed to the model's constructor");
        }
        let [container, name] = [&self.containers, &self.path].map(|path| path.last().map(String::as_str));
        self.linear.push((container, name, D) == (Some("Struct:Linear"), Some("weight"), 2));
        self.positions.insert(param.id, self.specs.len());
        self.specs.push(ParameterSpec {
            name: path,
            shape: param.lazy_shape().to_vec(),
            dtype: DType::F32,
            trainable: true,
            aliases: Vec::new(),
        });
    }
}

/// Layers show their running state to visitors as a parameter without gradient. What tells it from a frozen
/// parameter is that nothing can make it require one.
fn buffers<M: Module>(module: &M) -> HashSet<ParamId> {
    let mut still = Ungraded::default();
    module.visit(&mut still);
    if still.0.is_empty() {
        return still.0;
    }
    let tried = module.clone().map(&mut Unfreeze(&still.0));
    let mut buffers = Ungraded::default();
    tried.visit(&mut buffers);
    buffers.0
}

/// Whether a layer that is trained has running state.
pub(crate) fn has_running_state<M: Module>(module: &M) -> bool {
    /// Of those on a device without autodiff, none can require a gradient.
    struct WithoutAutodiff(HashSet<ParamId>);

    impl ModuleVisitor for WithoutAutodiff {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !param.base().is_autodiff() {
                self.0.insert(param.id);
            }
        }
    }

    let found = buffers(module);
    if found.is_empty() {
        return false;
    }
    let mut without = WithoutAutodiff(HashSet::new());
    module.visit(&mut without);
    !found.is_subset(&without.0)
}

/// Initialised float values that do not require a gradient. Running state is always initialised.
#[derive(Default)]
struct Ungraded(HashSet<ParamId>);

impl ModuleVisitor for Ungraded {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_initialized() && !param.is_require_grad() {
            self.0.insert(param.id);
        }
    }
}

struct Unfreeze<'a>(&'a HashSet<ParamId>);

impl ModuleMapper for Unfreeze<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.contains(&param.id) {
            true => param.set_require_grad(true),
            false => param,
        }
    }
}
