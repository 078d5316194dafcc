//! What a rank brings to a save.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_core::{DType, ParameterSpec};

use crate::bytes::Data;
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::manifest::{Facts, ParameterRecord, TensorRecord, WeightLayout, is_state_name, numel};

/// What a rank brings to a save: every parameter, in one order on all ranks, with this rank's interval of it.
#[derive(Clone, Debug)]
pub struct Contents<'a> {
    /// What is recorded of the training as a whole.
    pub facts: Facts,
    /// What this rank has for itself, such as its random numbers.
    pub rank_state: Value,
    /// Every parameter.
    pub parameters: Vec<SavedParameter<'a>>,
}

/// A parameter with what this rank holds of it.
#[derive(Clone, Debug)]
pub struct SavedParameter<'a> {
    /// What the model says about it; equal on all ranks.
    pub spec: ParameterSpec,
    /// How its elements are laid out; equal on all ranks.
    pub layout: WeightLayout,
    /// The name of its group, one of [`Facts::groups`]; equal on all ranks.
    pub group: Option<String>,
    /// How often an optimizer has updated it; equal on all ranks.
    pub updates: u64,
    /// Which elements this rank holds.
    pub held: Held,
    /// Its values.
    pub values: Data<'a>,
    /// Its optimizer states, of the same elements. All ranks name the same ones.
    pub states: Vec<SavedState<'a>>,
}

/// An optimizer state of a parameter.
#[derive(Clone, Debug)]
pub struct SavedState<'a> {
    /// Its name: letters, digits and `_`.
    pub name: String,
    /// Its elements.
    pub data: Data<'a>,
}

/// Which elements of a parameter a rank holds, counted in row-major order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    /// These, and no other rank does; there may be none. A rank that holds a copy of what another one saves says so too.
    Part(Range<usize>),
    /// All, and so does every rank. Each writes a part.
    Replica,
}

/// A parameter as ranks tell each other of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Declared {
    pub(crate) spec: ParameterSpec,
    pub(crate) layout: WeightLayout,
    pub(crate) group: Option<String>,
    pub(crate) updates: u64,
    pub(crate) replica: bool,
    pub(crate) values: DType,
    pub(crate) states: Vec<(String, DType)>,
}

impl Declared {
    pub(crate) fn of(parameter: &SavedParameter<'_>) -> Self {
        let mut states: Vec<_> =
            parameter.states.iter().map(|state| (state.name.clone(), state.data.dtype())).collect();
        states.sort_by(|a, b| a.0.cmp(&b.0));
        Self {
            spec: parameter.spec.clone(),
            layout: parameter.layout,
            group: parameter.group.clone(),
            updates: parameter.updates,
            replica: parameter.held == Held::Replica,
            values: parameter.values.dtype(),
            states,
        }
    }

    /// As a manifest has it, before anything is written.
    pub(crate) fn record(&self) -> ParameterRecord {
        let tensor = |dtype| TensorRecord { dtype, pieces: Vec::new() };
        ParameterRecord {
            name: self.spec.name.clone(),
            shape: self.spec.shape.clone(),
            dtype: self.spec.dtype,
            trainable: self.spec.trainable,
            aliases: self.spec.aliases.clone(),
            group: self.group.clone(),
            layout: self.layout,
            updates: self.updates,
            values: tensor(self.values),
            states: self.states.iter().map(|(name, dtype)| (name.clone(), tensor(*dtype))).collect(),
        }
    }

    pub(crate) fn digest(&self) -> Digest {
        Digest::of(&serde_json::to_vec(self).unwrap_or_default())
    }
}

impl SavedParameter<'_> {
    /// The number of elements of the whole.
    pub(crate) fn numel(&self) -> Option<usize> {
        numel(&self.spec.shape)
    }

    /// Checks what this rank can tell alone.
    pub(crate) fn check(&self) -> Result<(), CheckpointError> {
        let refused =
            |reason: String| Err(CheckpointError::Contents { parameter: self.spec.name.clone(), reason });
        let Some(numel) = self.numel() else {
            return refused(format!("its shape {:?} has too many elements", self.spec.shape));
        };
        let held = match &self.held {
            Held::Replica => 0..numel,
            Held::Part(range) if range.start <= range.end && range.end <= numel => range.clone(),
            Held::Part(range) => {
                let (start, end) = (range.start, range.end);
                return refused(format!("this rank holds {start}..{end} of its {numel} elements"));
            }
        };
        if let Some(state) = self.states.iter().find(|state| !is_state_name(&state.name)) {
            return refused(format!(
                "the state `{}` must be called by letters, digits and `_`",
                state.name.escape_default()
            ));
        }
        let mut names: Vec<_> = self.states.iter().map(|state| &state.name).collect();
        names.sort();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused(format!("it has two states called `{}`", pair[0]));
        }
        let states = self.states.iter().map(|state| (state.name.as_str(), &state.data));
        for (name, data) in std::iter::once(("values", &self.values)).chain(states) {
            let expected = held.len().checked_mul(data.dtype().size());
            if data.len().is_some_and(|len| Some(len) != expected) {
                return refused(format!(
                    "its {name} have {} bytes for {} elements of {}",
                    data.len().unwrap_or_default(),
                    held.len(),
                    data.dtype()
                ));
            }
        }
        Ok(())
    }
}
