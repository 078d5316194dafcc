//! A configuration file before its keys are understood.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::value::Value;

/// The entries of a file's table in order, repeated keys included, whatever the format of the file.
///
/// A map would drop all but the last of several equal keys, and JSON parsers do not refuse them.
pub(super) struct Document(Vec<(String, Value)>);

impl Document {
    pub(super) fn entries(self) -> impl Iterator<Item = (String, Value)> {
        self.0.into_iter()
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

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Document(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
