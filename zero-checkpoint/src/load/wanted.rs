//! What a rank asks of a checkpoint, and what it got.

use std::ops::Range;

use zero_core::{Bytes, ParameterSpec};

use crate::bytes::Target;
use crate::error::CheckpointError;
use crate::load::difference::Allow;
use crate::manifest::{ParameterRecord, WeightLayout, numel};

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
    /// How its elements are laid out.
    pub layout: WeightLayout,
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

impl LoadedParameter {
    pub(crate) fn none(parameter: &WantedParameter<'_>) -> Self {
        let states = vec![false; parameter.states.len()];
        Self { name: parameter.spec.name.clone(), values: false, states, updates: 0, group: None }
    }

    pub(crate) fn fill(
        &mut self,
        parameter: &WantedParameter<'_>,
        record: &ParameterRecord,
        options: &LoadOptions,
    ) {
        self.values = true;
        self.group = record.group.clone();
        if options.optimizer {
            let is_saved = |name: &String| record.states.contains_key(name);
            self.states = parameter.states.iter().map(|state| is_saved(&state.name)).collect();
            self.updates = record.updates;
        }
    }
}

impl WantedParameter<'_> {
    /// Checks what can be told without a checkpoint.
    pub(crate) fn check(&self) -> Result<(), CheckpointError> {
        let refused =
            |reason: String| Err(CheckpointError::Wanted { parameter: self.spec.name.clone(), reason });
        let range = &self.range;
        let numel = numel(&self.spec.shape);
        if range.start > range.end || numel.is_none_or(|numel| range.end > numel) {
            return refused(format!(
                "it has shape {:?}, but elements {}..{} are asked for",
                self.spec.shape, range.start, range.end
            ));
        }
        let states = self.states.iter().map(|state| (state.name.as_str(), &state.target));
        for (what, target) in std::iter::once(("values", &self.values)).chain(states) {
            let expected = range.len().checked_mul(target.dtype().size());
            if target.len().is_some_and(|len| Some(len) != expected) {
                return refused(format!(
                    "there are {} bytes for the {what} of {} elements of {}",
                    target.len().unwrap_or_default(),
                    range.len(),
                    target.dtype()
                ));
            }
        }
        Ok(())
    }
}
