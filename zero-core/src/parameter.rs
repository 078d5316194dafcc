//! Parameters: what a model says about one, and what a layout adds.

use serde::{Deserialize, Serialize};

use crate::{DType, Partition};

/// What a model says about one of its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterSpec {
    /// The module path, its components joined by dots: `blocks.0.fc1.weight`.
    pub name: String,
    /// The extent of each dim; empty for a scalar, which has one element.
    pub shape: Vec<usize>,
    /// The element type the model declares.
    pub dtype: DType,
    /// Whether the parameter has a gradient; frozen if not.
    pub trainable: bool,
    /// Further module paths of the same parameter, when it is tied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
}

/// The position of a parameter in its [`Layout`](crate::Layout), counted from 0 in model order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ParameterIndex(usize);

impl ParameterIndex {
    /// The parameter at `index`.
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// The position, counted from 0.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// One parameter of a [`Layout`](crate::Layout), with its partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    spec: ParameterSpec,
    partition: Partition,
    index: ParameterIndex,
    persistent: bool,
}

impl Parameter {
    pub(crate) fn new(
        spec: ParameterSpec,
        partition: Partition,
        index: ParameterIndex,
        persistent: bool,
    ) -> Self {
        Self { spec, partition, index, persistent }
    }

    /// What the model says about it.
    pub fn spec(&self) -> &ParameterSpec {
        &self.spec
    }

    /// The module path.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The extent of each dim; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.spec.shape
    }

    /// The element type the model declares.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Whether it has a gradient; frozen if not.
    pub fn trainable(&self) -> bool {
        self.spec.trainable
    }

    /// Further module paths of the same parameter.
    pub fn aliases(&self) -> &[String] {
        &self.spec.aliases
    }

    /// The number of elements of the whole parameter.
    pub fn numel(&self) -> usize {
        self.partition.numel()
    }

    /// Who owns which of its elements, counted in row-major order.
    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// Its position in the layout.
    pub fn index(&self) -> ParameterIndex {
        self.index
    }

    /// Whether it stays gathered at stage 3, being too small to be worth a gather.
    pub fn persistent(&self) -> bool {
        self.persistent
    }

    /// The path of the module it belongs to: its name without the last component; empty at the root.
    pub fn module(&self) -> &str {
        self.spec.name.rsplit_once('.').map_or("", |(module, _)| module)
    }
}
