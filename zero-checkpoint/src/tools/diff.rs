//! What two checkpoints differ in.

use std::fmt;

use serde::Serialize;
use zero_core::DType;

use crate::error::CheckpointError;
use crate::load::{Checkpoint, convert};
use crate::manifest::{ParameterRecord, TensorRecord};
use crate::tools::Progress;
use crate::tools::verified::VerifiedReader;

/// Elements that are compared at once.
const BATCH: usize = 64 << 10;

/// A difference between two checkpoints, the first and the second.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Change {
    /// A parameter, or one of its states, is in one of them only.
    OnlyIn {
        /// 1 or 2.
        checkpoint: u8,
        /// The parameter.
        parameter: String,
        /// The state, if it is one.
        state: Option<String>,
    },
    /// A fact differs.
    Fact {
        /// The parameter, if it is about one.
        parameter: Option<String>,
        /// What differs.
        what: &'static str,
        /// In the first.
        first: String,
        /// In the second.
        second: String,
    },
    /// Elements differ.
    Elements {
        /// The parameter.
        parameter: String,
        /// The state, if it is one.
        state: Option<String>,
        /// How many differ in at least one bit.
        different: usize,
        /// How many there are.
        numel: usize,
        /// The largest distance between two of them; `None` if one is not a number, or they are integers.
        max_distance: Option<f64>,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of =
            |state: &Option<String>| state.as_ref().map(|state| format!("{state} of ")).unwrap_or_default();
        match self {
            Self::OnlyIn { checkpoint, parameter, state } => {
                write!(f, "{}{parameter}: only in checkpoint {checkpoint}", of(state))
            }
            Self::Fact { parameter: Some(parameter), what, first, second } => {
                write!(f, "{parameter}: {what} {first} | {second}")
            }
            Self::Fact { parameter: None, what, first, second } => write!(f, "{what}: {first} | {second}"),
            Self::Elements { parameter, state, different, numel, max_distance } => {
                write!(f, "{}{parameter}: {different} of {numel} elements differ", of(state))?;
                match max_distance {
                    Some(distance) => write!(f, ", by {distance:e} at most"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// All that two checkpoints differ in: parameters, facts, elements. Both are read and checked as far as they have the same
/// tensors.
///
/// # Errors
///
/// What is wrong with either's files.
pub fn diff(
    first: &Checkpoint,
    second: &Checkpoint,
    progress: Progress<'_>,
) -> Result<Vec<Change>, CheckpointError> {
    let mut changes = Vec::new();
    facts(first, second, &mut changes);
    let mut readers = (VerifiedReader::new(first)?, VerifiedReader::new(second)?);
    let only = |checkpoint, parameter: &ParameterRecord, state: Option<&str>| Change::OnlyIn {
        checkpoint,
        parameter: parameter.name.clone(),
        state: state.map(str::to_owned),
    };
    for ours in &first.manifest().parameters {
        let Some(theirs) = second.manifest().parameter(&ours.name) else {
            changes.push(only(1, ours, None));
            continue;
        };
        parameter_facts(ours, theirs, &mut changes);
        if ours.shape != theirs.shape {
            continue;
        }
        for (state, tensor) in ours.tensors() {
            let other = match state {
                None => Some(&theirs.values),
                Some(state) => theirs.states.get(state),
            };
            match other {
                None => changes.push(only(1, ours, state)),
                Some(other) => {
                    let compared = elements(&mut readers, (tensor, other), ours.numel(), progress)?;
                    changes.extend(compared.map(|(different, max_distance)| Change::Elements {
                        parameter: ours.name.clone(),
                        state: state.map(str::to_owned),
                        different,
                        numel: ours.numel(),
                        max_distance,
                    }));
                }
            }
        }
        let added = theirs.states.keys().filter(|state| !ours.states.contains_key(*state));
        changes.extend(added.map(|state| only(2, theirs, Some(state))));
    }
    let added = second
        .manifest()
        .parameters
        .iter()
        .filter(|theirs| first.manifest().parameter(&theirs.name).is_none());
    changes.extend(added.map(|theirs| only(2, theirs, None)));
    Ok(changes)
}

fn facts(first: &Checkpoint, second: &Checkpoint, changes: &mut Vec<Change>) {
    let mut fact = |what, first: String, second: String| {
        if first != second {
            changes.push(Change::Fact { parameter: None, what, first, second });
        }
    };
    let (first, second) = (first.manifest(), second.manifest());
    fact("step", first.step.to_string(), second.step.to_string());
    fact("stage", first.stage.to_string(), second.stage.to_string());
    fact("mesh", json(&first.mesh), json(&second.mesh));
    fact("dtypes", json(&first.dtypes), json(&second.dtypes));
    fact("groups", json(&first.groups), json(&second.groups));
    fact("training", json(&first.training), json(&second.training));
    fact("registry", json(&first.registry), json(&second.registry));
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn parameter_facts(first: &ParameterRecord, second: &ParameterRecord, changes: &mut Vec<Change>) {
    let mut fact = |what, ours: String, theirs: String| {
        if ours != theirs {
            changes.push(Change::Fact {
                parameter: Some(first.name.clone()),
                what,
                first: ours,
                second: theirs,
            });
        }
    };
    fact("shape", format!("{:?}", first.shape), format!("{:?}", second.shape));
    fact("dtype", first.dtype.to_string(), second.dtype.to_string());
    fact("trainable", first.trainable.to_string(), second.trainable.to_string());
    fact("aliases", first.aliases.join(", "), second.aliases.join(", "));
    fact("group", first.group.clone().unwrap_or_default(), second.group.clone().unwrap_or_default());
    fact("layout", first.layout.to_string(), second.layout.to_string());
    fact("updates", first.updates.to_string(), second.updates.to_string());
}

/// How many elements differ, and by how much; `None` if none does.
fn elements(
    readers: &mut (VerifiedReader<'_>, VerifiedReader<'_>),
    tensors: (&TensorRecord, &TensorRecord),
    numel: usize,
    progress: Progress<'_>,
) -> Result<Option<(usize, Option<f64>)>, CheckpointError> {
    let (first, second) = tensors;
    let (mut ours, mut theirs) = (vec![0; BATCH * first.dtype.size()], vec![0; BATCH * second.dtype.size()]);
    let (mut different, mut distance) = (0, Some(0.0f64));
    for start in (0..numel).step_by(BATCH) {
        let range = start..numel.min(start + BATCH);
        let ours = &mut ours[..range.len() * first.dtype.size()];
        let theirs = &mut theirs[..range.len() * second.dtype.size()];
        let before = readers.0.bytes_read + readers.1.bytes_read;
        readers.0.read(first, range.clone(), ours)?;
        readers.1.read(second, range, theirs)?;
        progress(readers.0.bytes_read + readers.1.bytes_read - before);
        if first.dtype == second.dtype {
            if ours == theirs {
                continue;
            }
            let size = first.dtype.size();
            different +=
                ours.chunks(size).zip(theirs.chunks(size)).filter(|(ours, theirs)| ours != theirs).count();
        }
        let (ours, theirs) = (floats(ours, first.dtype), floats(theirs, second.dtype));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            if first.dtype != second.dtype && ours != theirs {
                different += 1;
            }
            // Equal infinities have no distance.
            let apart = if ours == theirs { 0.0 } else { (ours - theirs).abs() };
            distance = distance.filter(|_| !apart.is_nan()).map(|most| most.max(apart));
        }
        if first.dtype.is_integer() || second.dtype.is_integer() {
            distance = None;
        }
    }
    Ok((different > 0).then_some((different, distance)))
}

/// The elements as f64; none if they are integers.
fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
    let mut wide = Vec::with_capacity(bytes.len() / dtype.size() * 8);
    convert(bytes, dtype, DType::F64, &mut wide);
    wide.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect()
}
