//! Parameters needed together.

use std::collections::HashMap;

use crate::{Parameter, ParameterIndex};

/// The parameters of one module, which needs them together: while it works, all of them are gathered.
///
/// A tied parameter belongs to the module of its name, not to those of its aliases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    name: String,
    parameters: Vec<ParameterIndex>,
    numel: usize,
}

impl Unit {
    /// The units of `parameters`, in order of their first parameter; the module's parameters need not be
    /// neighbours.
    pub(crate) fn of_modules(parameters: &[Parameter]) -> Vec<Self> {
        let mut units: Vec<Self> = Vec::new();
        let mut positions = HashMap::new();
        for parameter in parameters {
            let position = *positions.entry(parameter.module()).or_insert_with(|| {
                units.push(Self { name: parameter.module().to_owned(), parameters: Vec::new(), numel: 0 });
                units.len() - 1
            });
            units[position].parameters.push(parameter.index());
            units[position].numel += parameter.numel();
        }
        units
    }

    /// The path of the module; empty for parameters at the root of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its parameters, in model order.
    pub fn parameters(&self) -> &[ParameterIndex] {
        &self.parameters
    }

    /// The number of elements of all its parameters, whole.
    pub fn numel(&self) -> usize {
        self.numel
    }
}
