//! What a checkpoint says about itself.

mod facts;
mod file;
mod validate;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use zero_core::{DType, ParameterSpec, Stage};

use crate::digest::Digest;

pub use facts::{Facts, MeshAxis, ModelIdentity, ParameterGroup, Registry, TrainingState};
pub(crate) use file::{MAX_BYTES, NAME};
pub(crate) use validate::{is_state_name, numel};

/// The manifest of a checkpoint: everything but the numbers themselves, and where those lie.
///
/// Coordinates are logical: elements of a parameter are counted in row-major order of its shape, whatever buffers they
/// came from. One that was read has been validated: names are unique, pieces cover each tensor exactly once and lie within
/// their files, file names stay within the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`Manifest::FORMAT`].
    pub format: String,
    /// The version of the format.
    pub format_version: u32,
    /// The number of steps taken.
    pub step: u64,
    /// The ranks that saved, by axis; their product is the world size.
    pub mesh: Vec<MeshAxis>,
    /// What was sharded.
    pub stage: Stage,
    /// Element types of training by what they are for: `compute`, `reduce`, `accumulate`, ...
    pub dtypes: BTreeMap<String, DType>,
    /// The groups that parameters belong to, with their hyper-parameters.
    pub groups: Vec<ParameterGroup>,
    /// Every parameter, in model order.
    pub parameters: Vec<ParameterRecord>,
    /// The length of the parts that files are hashed by, in bytes; the last of each file is shorter.
    pub chunk_bytes: u64,
    /// Every file but the manifest.
    pub files: Vec<FileRecord>,
    /// What else training needs to go on.
    pub training: TrainingState,
    /// What each rank has for itself, in rank order.
    pub ranks: Vec<serde_json::Value>,
    /// Where the checkpoint comes from.
    pub registry: Registry,
}

impl Manifest {
    /// What [`format`](Self::format) says.
    pub const FORMAT: &'static str = "zero-checkpoint";
    /// The version that this crate writes, and the newest that it reads.
    pub const VERSION: u32 = 1;

    /// The number of ranks that saved.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The parameter at a path, its name or an alias.
    pub fn parameter(&self, path: &str) -> Option<&ParameterRecord> {
        self.parameters.iter().find(|known| known.paths().any(|known| known == path))
    }

    /// A parameter's group, if it is in one.
    pub fn group_of(&self, parameter: &ParameterRecord) -> Option<&ParameterGroup> {
        let name = parameter.group.as_ref()?;
        self.groups.iter().find(|group| group.name == *name)
    }

    /// The number of elements of all parameters.
    pub fn numel(&self) -> usize {
        self.parameters.iter().map(ParameterRecord::numel).sum()
    }

    /// The length of all files but the manifest, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// A parameter of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterRecord {
    /// The module path.
    pub name: String,
    /// The extent of each dim; empty for a scalar.
    pub shape: Vec<usize>,
    /// The element type that the model declares.
    pub dtype: DType,
    /// Whether it has a gradient.
    pub trainable: bool,
    /// Further paths of the same parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The name of its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How its elements are laid out, compared with PyTorch.
    #[serde(default)]
    pub layout: WeightLayout,
    /// How often an optimizer has updated it.
    pub updates: u64,
    /// Its values: the masters.
    pub values: TensorRecord,
    /// Its optimizer states by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub states: BTreeMap<String, TensorRecord>,
}

impl ParameterRecord {
    /// What a model says about it.
    pub fn spec(&self) -> ParameterSpec {
        ParameterSpec {
            name: self.name.clone(),
            shape: self.shape.clone(),
            dtype: self.dtype,
            trainable: self.trainable,
            aliases: self.aliases.clone(),
        }
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        // Not too many: validation multiplied the same numbers.
        numel(&self.shape).unwrap_or(usize::MAX)
    }

    /// All its paths: its name first, then its aliases.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        paths(&self.name, &self.aliases)
    }

    /// Its values, under no name, and its states, each under its own.
    pub fn tensors(&self) -> impl Iterator<Item = (Option<&str>, &TensorRecord)> {
        let states = self.states.iter().map(|(name, state)| (Some(name.as_str()), state));
        std::iter::once((None, &self.values)).chain(states)
    }
}

/// Where a tensor's elements lie. It has as many as its parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// The type of an element.
    pub dtype: DType,
    /// In element order, without gap or overlap; none for an empty tensor.
    pub pieces: Vec<Piece>,
}

/// A run of a tensor's elements in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The first element.
    pub start: usize,
    /// The one after the last.
    pub end: usize,
    /// The position of the file in [`Manifest::files`].
    pub file: usize,
    /// Where the first element lies, in bytes from the beginning of the file.
    pub offset: u64,
}

impl Piece {
    /// The elements.
    pub fn range(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// [`Digest::of_chunks`].
    pub hash: Digest,
    /// The hashes of its chunks.
    pub chunks: Vec<Digest>,
}

/// How a parameter's elements are laid out, compared with what PyTorch calls by the same name. Names alone do not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// As in PyTorch.
    #[default]
    Plain,
    /// The weight of a linear layer as Burn has it, `[in, out]`: PyTorch has its transpose.
    InOut,
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "as in PyTorch",
            Self::InOut => "as [in, out]",
        })
    }
}

/// All paths of a parameter: its name first, then its aliases.
pub(crate) fn paths<'p>(name: &'p str, aliases: &'p [String]) -> impl Iterator<Item = &'p str> {
    std::iter::once(name).chain(aliases.iter().map(String::as_str))
}

/// The name of a tensor in a safetensors file: of a parameter's values or of a state, of all elements or of a part.
pub(crate) fn tensor_name(
    parameter: &str,
    state: Option<&str>,
    range: &Range<usize>,
    numel: usize,
) -> String {
    let whole = match state {
        None => format!("model.{parameter}"),
        Some(state) => format!("optimizer.{parameter}.{state}"),
    };
    if *range == (0..numel) { whole } else { format!("{whole}[{}:{}]", range.start, range.end) }
}
