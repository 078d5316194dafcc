//! What a checkpoint tells besides where numbers lie.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zero_core::{DType, Stage};

use crate::digest::Digest;

/// What a save records of the training as a whole; that of [`Rank::ROOT`](zero_core::Rank::ROOT) is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The number of steps taken; equal on all ranks, and what the checkpoint is called by.
    pub step: u64,
    /// The ranks by axis, if there is more to say than their number.
    pub mesh: Vec<MeshAxis>,
    /// What is sharded.
    pub stage: Stage,
    /// Element types of training by what they are for.
    pub dtypes: BTreeMap<String, DType>,
    /// The groups that parameters belong to.
    pub groups: Vec<ParameterGroup>,
    /// What else training needs to go on.
    pub training: TrainingState,
    /// Where the checkpoint comes from.
    pub registry: Registry,
}

impl Facts {
    /// The facts of a step, and nothing else.
    pub fn new(step: u64, stage: Stage) -> Self {
        Self {
            step,
            mesh: Vec::new(),
            stage,
            dtypes: BTreeMap::new(),
            groups: Vec::new(),
            training: TrainingState::default(),
            registry: Registry::default(),
        }
    }
}

/// An axis of the mesh of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshAxis {
    /// What it is for: `shard`, `replicate`, ...
    pub name: String,
    /// How many ranks there are along it.
    pub size: usize,
}

/// Parameters with hyper-parameters of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterGroup {
    /// What parameters name it by.
    pub name: String,
    /// Its hyper-parameters. Numbers come back to the bit, but JSON has none that are not finite.
    pub hyper_parameters: Map<String, Value>,
}

/// What training needs to go on, besides tensors; what is in it, whoever trains decides. Numbers come back to the bit, but
/// JSON has none that are not finite.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Of the optimizer, besides its tensors.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub optimizer: Value,
    /// Of the learning rate.
    pub schedule: Value,
    /// Of the loss scale.
    pub loss_scale: Value,
    /// Of random numbers that all ranks draw alike.
    pub rng: Value,
    /// How far the data has been read.
    pub data: Value,
}

/// What a registry of models wants to know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registry {
    /// The model, if it has a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelIdentity>,
    /// The revision of the code that trained it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code_revision: Option<String>,
    /// What it was trained by.
    #[serde(default)]
    pub config: Value,
    /// The hash of `config`, as compact JSON with sorted keys; filled in by a save.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<Digest>,
    /// The checkpoint that training went on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Versions of what it was trained with; a save adds this crate's.
    #[serde(default)]
    pub frameworks: BTreeMap<String, String>,
    /// Whatever its user wants to say.
    #[serde(default)]
    pub tags: BTreeMap<String, String>,
}

impl Registry {
    /// With what a save fills in.
    pub(crate) fn completed(mut self) -> Self {
        if !self.config.is_null() {
            self.config_hash = Some(Digest::of(sorted(&self.config).to_string().as_bytes()));
        }
        let (name, version) = (env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION"));
        self.frameworks.insert(name.to_owned(), version.to_owned());
        self
    }
}

/// The same value with sorted keys, whatever order serde_json keeps in this build.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields: BTreeMap<&String, Value> =
                fields.iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(fields.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        Value::Array(values) => values.iter().map(sorted).collect(),
        other => other.clone(),
    }
}

/// A model and which one of its kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelIdentity {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}
