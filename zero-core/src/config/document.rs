//! A configuration file before its keys are understood.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::ConfigError;
use super::key::{self, Key};
use super::value::{self, Value};

/// The entries of a file's table in order, repeated keys included, whatever the format of the file.
pub(super) struct Document(Vec<(String, Value)>);

impl Document {
    /// The values by the positions of their keys in [`key::all`]; unknown and repeated keys are refused.
    ///
    /// A key of an inner table is found by either spelling: `{"precision": {"compute": "bf16"}}` or
    /// `{"precision.compute": "bf16"}`.
    pub(super) fn resolve(self) -> Result<BTreeMap<usize, (&'static Key, Value)>, ConfigError> {
        let mut found = Found::default();
        found.table("", self.0)?;
        Ok(found.values)
    }
}

#[derive(Default)]
struct Found {
    values: BTreeMap<usize, (&'static Key, Value)>,
    tables: Vec<&'static str>,
}

impl Found {
    /// The entries of the table called `prefix`, with a point unless it is the root.
    fn table(&mut self, prefix: &str, entries: Vec<(String, Value)>) -> Result<(), ConfigError> {
        for (name, value) in entries {
            let name = format!("{prefix}{name}");
            let Some(table) = key::table(&name) else {
                self.key(&name, value)?;
                continue;
            };
            if self.tables.contains(&table) {
                return Err(ConfigError::DuplicateKey { key: table });
            }
            self.tables.push(table);
            match value {
                Value::Table(entries) => self.table(&format!("{table}."), entries)?,
                Value::Nothing => {}
                other => {
                    let found = other.describe();
                    return Err(ConfigError::WrongType { key: table, expected: "a table", found });
                }
            }
        }
        Ok(())
    }

    fn key(&mut self, name: &str, value: Value) -> Result<(), ConfigError> {
        let known = key::all().enumerate().find(|(_, key)| key.name == name);
        let (position, key) = known.ok_or_else(|| key::unknown(name))?;
        match self.values.insert(position, (key, value)) {
            None => Ok(()),
            Some(_) => Err(ConfigError::DuplicateKey { key: key.name }),
        }
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
