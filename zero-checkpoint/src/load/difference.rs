//! Where a checkpoint and a model do not go together.

use std::collections::HashMap;
use std::fmt;

use zero_core::DType;

use crate::load::wanted::{LoadOptions, WantedParameter};
use crate::manifest::{Manifest, ParameterRecord, WeightLayout, paths};

/// A difference between a checkpoint and the model that it is loaded into.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// The model has a parameter that the checkpoint has not.
    MissingParameter {
        /// Its name.
        name: String,
    },
    /// The checkpoint has a parameter that the model has not.
    UnexpectedParameter {
        /// Its name.
        name: String,
    },
    /// The model's optimizer has a state that the checkpoint has not.
    MissingState {
        /// The parameter.
        parameter: String,
        /// The name of the state.
        state: String,
    },
    /// The checkpoint has a state that the model's optimizer has not.
    UnexpectedState {
        /// The parameter.
        parameter: String,
        /// The name of the state.
        state: String,
    },
    /// A parameter has another shape.
    Shape {
        /// The parameter.
        name: String,
        /// Its shape in the checkpoint.
        saved: Vec<usize>,
        /// Its shape in the model.
        wanted: Vec<usize>,
    },
    /// A parameter or a state has elements of another type.
    DType {
        /// The parameter.
        name: String,
        /// `values`, the name of a state, or `model`, for what the model declares.
        what: String,
        /// The type in the checkpoint.
        saved: DType,
        /// The type that is asked for.
        wanted: DType,
    },
    /// A parameter's elements are laid out otherwise. To load one as the other, write the checkpoint as plain weights first.
    Layout {
        /// The parameter.
        name: String,
        /// Its layout in the checkpoint.
        saved: WeightLayout,
        /// Its layout in the model.
        wanted: WeightLayout,
    },
    /// A parameter is tied to others, under other paths.
    Aliases {
        /// The parameter.
        name: String,
        /// All its paths in the checkpoint.
        saved: Vec<String>,
        /// All its paths in the model.
        wanted: Vec<String>,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingParameter { name } => write!(f, "parameter `{name}` is missing in the checkpoint"),
            Self::UnexpectedParameter { name } => write!(f, "parameter `{name}` is not in the model"),
            Self::MissingState { parameter, state } => {
                write!(f, "state `{state}` of parameter `{parameter}` is missing in the checkpoint")
            }
            Self::UnexpectedState { parameter, state } => {
                write!(f, "state `{state}` of parameter `{parameter}` is not in the model's optimizer")
            }
            Self::Shape { name, saved, wanted } => {
                write!(f, "parameter `{name}` has shape {saved:?} in the checkpoint, {wanted:?} in the model")
            }
            Self::DType { name, what, saved, wanted } => {
                write!(f, "{what} of parameter `{name}`: {saved} in the checkpoint, {wanted} asked for")
            }
            Self::Layout { name, saved, wanted } => {
                write!(f, "parameter `{name}` is laid out {saved} in the checkpoint, {wanted} in the model")
            }
            Self::Aliases { name, saved, wanted } => write!(
                f,
                "parameter `{name}` has the paths {} in the checkpoint, {} in the model",
                saved.join(", "),
                wanted.join(", ")
            ),
        }
    }
}

/// Which differences are no error; by default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Allow {
    /// Parameters and states that the checkpoint has not start fresh: their targets are left alone.
    pub missing: bool,
    /// Parameters and states that the model has not are passed over.
    pub unexpected: bool,
    /// Parameters of another shape start fresh, their states too.
    pub shape: bool,
    /// Elements of other floating-point types are converted, to the nearest value, ties to even.
    pub dtype: bool,
    /// Parameters may be tied otherwise: each path gets what the checkpoint has under it.
    pub aliases: bool,
    /// Parameters may be in other groups. For who knows of groups: a load by itself does not look at them.
    pub groups: bool,
}

impl Allow {
    pub(crate) fn allows(self, difference: &Difference) -> bool {
        match difference {
            Difference::MissingParameter { .. } | Difference::MissingState { .. } => self.missing,
            Difference::UnexpectedParameter { .. } | Difference::UnexpectedState { .. } => self.unexpected,
            Difference::Shape { .. } => self.shape,
            Difference::DType { what, .. } if what == MODEL => self.dtype,
            Difference::DType { saved, wanted, .. } => {
                // An integer has no nearest float that it could be told by.
                self.dtype && !saved.is_integer() && !wanted.is_integer()
            }
            Difference::Aliases { .. } => self.aliases,
            Difference::Layout { .. } => false,
        }
    }
}

const MODEL: &str = "model";

/// For each wanted parameter its record, if it is to be loaded; or the differences that are not allowed.
pub(crate) fn matches<'m>(
    manifest: &'m Manifest,
    wanted: &[WantedParameter<'_>],
    options: &LoadOptions,
) -> Result<Vec<Option<&'m ParameterRecord>>, Vec<Difference>> {
    let mut by_path = HashMap::new();
    for (index, record) in manifest.parameters.iter().enumerate() {
        for path in record.paths() {
            by_path.insert(path, index);
        }
    }
    let mut differences = Vec::new();
    let mut used = vec![false; manifest.parameters.len()];
    let mut records = Vec::with_capacity(wanted.len());
    for parameter in wanted {
        let name = &parameter.spec.name;
        let mut paths = paths(name, &parameter.spec.aliases);
        let Some(index) = paths.find_map(|path| by_path.get(path).copied()) else {
            differences.push(Difference::MissingParameter { name: name.clone() });
            records.push(None);
            continue;
        };
        used[index] = true;
        let record = &manifest.parameters[index];
        compare(record, parameter, options, &mut differences);
        records.push(Some(record).filter(|record| record.shape == parameter.spec.shape));
    }
    let unused = manifest.parameters.iter().zip(used).filter(|(_, used)| !used);
    differences
        .extend(unused.map(|(record, _)| Difference::UnexpectedParameter { name: record.name.clone() }));
    differences.retain(|difference| !options.allow.allows(difference));
    if differences.is_empty() { Ok(records) } else { Err(differences) }
}

fn compare(
    record: &ParameterRecord,
    wanted: &WantedParameter<'_>,
    options: &LoadOptions,
    differences: &mut Vec<Difference>,
) {
    let name = &wanted.spec.name;
    if record.shape != wanted.spec.shape {
        let (saved, wanted) = (record.shape.clone(), wanted.spec.shape.clone());
        differences.push(Difference::Shape { name: name.clone(), saved, wanted });
        // Nothing of it is loaded.
        return;
    }
    if record.layout != wanted.layout {
        let (saved, wanted) = (record.layout, wanted.layout);
        differences.push(Difference::Layout { name: name.clone(), saved, wanted });
    }
    let (mut saved, mut asked): (Vec<_>, Vec<_>) =
        (record.paths().collect(), paths(name, &wanted.spec.aliases).collect());
    saved.sort_unstable();
    asked.sort_unstable();
    if saved != asked {
        let [saved, wanted] = [saved, asked].map(|paths| paths.into_iter().map(str::to_owned).collect());
        differences.push(Difference::Aliases { name: name.clone(), saved, wanted });
    }
    let mut dtype = |what: &str, saved: DType, wanted: DType| {
        if saved != wanted {
            differences.push(Difference::DType { name: name.clone(), what: what.to_owned(), saved, wanted });
        }
    };
    dtype(MODEL, record.dtype, wanted.spec.dtype);
    dtype("values", record.values.dtype, wanted.values.dtype());
    if !options.optimizer {
        return;
    }
    for state in &wanted.states {
        if let Some(saved) = record.states.get(&state.name) {
            dtype(&state.name, saved.dtype, state.target.dtype());
        }
    }
    for state in wanted.states.iter().filter(|state| !record.states.contains_key(&state.name)) {
        let (parameter, state) = (name.clone(), state.name.clone());
        differences.push(Difference::MissingState { parameter, state });
    }
    for state in record.states.keys().filter(|name| !wanted.states.iter().any(|state| state.name == **name)) {
        let (parameter, state) = (name.clone(), state.clone());
        differences.push(Difference::UnexpectedState { parameter, state });
    }
}
