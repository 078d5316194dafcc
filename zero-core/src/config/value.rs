//! One value of a configuration file.

use std::fmt::{self, Write};

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value of any type, so that one of a wrong type can be named in the message about it.
///
/// Displays as TOML writes it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Nothing,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    Array(Vec<Self>),
    /// Its entries in order, repeated keys included.
    Table(Vec<(String, Self)>),
}

impl Value {
    /// The type with an article, and the value where that fits into a sentence.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Nothing => "null".into(),
            Self::Bool(_) => format!("the boolean {self}"),
            Self::Integer(_) => format!("the integer {self}"),
            Self::Float(_) => format!("the float {self}"),
            Self::Text(text) if text.chars().count() <= 40 => format!("the string {self}"),
            Self::Text(_) => "a long string".into(),
            Self::Array(_) => "an array".into(),
            Self::Table(_) => "a table".into(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("null"),
            Self::Bool(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            // `NaN` in Rust, `nan` in TOML.
            Self::Float(value) if value.is_nan() => f.write_str("nan"),
            // Debug, because it keeps the point or the exponent that makes it a float.
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Text(value) => text(value, f),
            Self::Array(values) => {
                let values: Vec<_> = values.iter().map(Self::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Self::Table(_) => f.write_str("{..}"),
        }
    }
}

/// A string as TOML writes it; Rust escapes other characters, and in another way.
fn text(value: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_char('"')?;
    for c in value.chars() {
        match c {
            '"' | '\\' => write!(f, "\\{c}")?,
            // Those are of the basic plane, which four digits name.
            c if c.is_control() => write!(f, "\\u{:04X}", u32::from(c))?,
            c => f.write_char(c)?,
        }
    }
    f.write_char('"')
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bool(value) => serializer.serialize_bool(*value),
            // Formats know 64 bits, and every number of a configuration fits into them with or without sign.
            Self::Integer(value) => match u64::try_from(*value) {
                Ok(value) => serializer.serialize_u64(value),
                Err(_) => serializer.serialize_i128(*value),
            },
            Self::Float(value) => serializer.serialize_f64(*value),
            Self::Text(value) => serializer.serialize_str(value),
            Self::Table(entries) => serializer.collect_map(entries.iter().map(|(key, value)| (key, value))),
            Self::Array(values) => serializer.collect_seq(values),
            Self::Nothing => serializer.serialize_unit(),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }

            fn visit_unit<E: Error>(self) -> Result<Value, E> {
                Ok(Value::Nothing)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Integer(value.into()))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Integer(value.into()))
            }

            fn visit_i128<E: Error>(self, value: i128) -> Result<Value, E> {
                Ok(Value::Integer(value))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
                Ok(Value::Float(value))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
                Ok(Value::Text(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Value::Array(values))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Value, A::Error> {
                entries(map).map(Value::Table)
            }
        }

        deserializer.deserialize_any(Any)
    }
}

/// The entries of a table in order, repeated keys included.
///
/// A map would drop all but the last of several equal keys, and JSON parsers do not refuse them.
pub(super) fn entries<'de, A: MapAccess<'de>>(mut map: A) -> Result<Vec<(String, Value)>, A::Error> {
    let mut entries = Vec::new();
    while let Some(entry) = map.next_entry()? {
        entries.push(entry);
    }
    Ok(entries)
}
