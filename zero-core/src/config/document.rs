//! A configuration file before its keys are understood.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::ConfigError;
use super::key::{self, KEYS};
use super::value::{self, Value};

/// The entries of a file's table in order, repeated keys included, whatever the format of the file.
pub(super) struct Document(Vec<(String, Value)>);

impl Document {
    /// The values by the positions of their keys in [`KEYS`]; unknown and repeated keys are refused.
    ///
    /// A key of an inner table is found by either spelling: `{"precision": {"compute": "bf16"}}` or
    /// `{"precision.compute": "bf16"}`.
    pub(super) fn resolve(self) -> Result<BTreeMap<usize, Value>, ConfigError> {
        let mut found = BTreeMap::new();
        let mut tables = Vec::new();
        for (name, value) in self.0 {
            let Some(table) = key::table(&name) else {
                place(&mut found, &name, value)?;
                continue;
            };
            if tables.contains(&table) {
                return Err(ConfigError::DuplicateKey { key: table });
            }
            tables.push(table);
            match value {
                Value::Table(entries) => entries
                    .into_iter()
                    .try_for_each(|(name, value)| place(&mut found, &format!("{table}.{name}"), value))?,
                Value::Nothing => {}
                other => {
                    let found = other.describe();
                    return Err(ConfigError::WrongType { key: table, expected: "a table", found });
                }
            }
        }
        Ok(found)
    }
}

fn place(found: &mut BTreeMap<usize, Value>, name: &str, value: Value) -> Result<(), ConfigError> {
    let position = KEYS.iter().position(|key| key.name == name).ok_or_else(|| key::unknown(name))?;
    match found.insert(position, value) {
        None => Ok(()),
        Some(_) => Err(ConfigError::DuplicateKey { key: KEYS[position].name }),
    }
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Document;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of keys and values")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Document, A::Error> {
                value::entries(map).map(Document)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
