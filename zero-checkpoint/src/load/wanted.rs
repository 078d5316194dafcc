//! What a rank asks of a checkpoint, and what it got.

use std::ops::Range;

use zero_core::{Bytes, ParameterSpec};

use crate::bytes::Target;
use crate::load::difference::Allow;

/// What a rank asks for: every parameter of its model, and which interval of each it holds.
#[derive(Debug, Default)]
pub struct Wanted<'a> {
    /// Every parameter; on all ranks the same ones.
    pub parameters: Vec<WantedParameter<'a>>,
}

/// A parameter and where its elements go.
#[derive(Debug)]
pub struct WantedParameter<'a> {
    /// What the model says about it.
    pub spec: ParameterSpec,
    /// The elements that this rank holds, counted in row-major order; there may be none.
    pub range: Range<usize>,
    /// Where its values go.
    pub values: Target<'a>,
    /// Its optimizer states, of the same elements.
    pub states: Vec<WantedState<'a>>,
}

/// An optimizer state and where its elements go.
#[derive(Debug)]
pub struct WantedState<'a> {
    /// Its name.
    pub name: String,
    /// Where its elements go.
    pub target: Target<'a>,
}

/// How to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadOptions {
    /// Which differences between checkpoint and model are no error.
    pub allow: Allow,
    /// Whether optimizer state is loaded. If not, what is saved and what is asked for of it does not matter.
    pub optimizer: bool,
    /// What may be buffered, in bytes: at least two chunks of the checkpoint; more than 32 MiB is not used.
    pub buffer: Bytes,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { allow: Allow::default(), optimizer: true, buffer: Bytes::new(16 << 20) }
    }
}

/// What a load did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// What became of each wanted parameter, in their order.
    pub parameters: Vec<LoadedParameter>,
    /// How many bytes this rank read from the storage.
    pub bytes_read: u64,
}

/// What became of a wanted parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedParameter {
    /// Its name.
    pub name: String,
    /// Whether its values were loaded; if not, its target was left alone.
    pub values: bool,
    /// Whether each of its states was loaded, in their order; the targets of others were left alone.
    pub states: Vec<bool>,
    /// How often an optimizer had updated it; 0 if it was not loaded, or optimizer state was not asked for.
    pub updates: u64,
    /// The name of its group in the checkpoint.
    pub group: Option<String>,
}
