//! The keys of a configuration: the one table that reading, writing and documentation share.

use std::num::NonZeroUsize;

use super::value::Value;
use super::{ConfigError, ZeroConfig};
use crate::{Bytes, Stage};

/// One key of a configuration.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// The unit of the value, as the documentation shows it.
    pub(super) unit: &'static str,
    /// What it is, as the documentation shows it.
    pub(super) what: &'static str,
    /// The value, unless it is not set.
    pub(super) get: fn(&ZeroConfig) -> Option<Value>,
    /// Takes a value from a file, with the key's name for messages.
    pub(super) set: fn(&mut ZeroConfig, Value, &'static str) -> Result<(), ConfigError>,
}

/// Every key, in the order of the documentation.
pub(super) const KEYS: [Key; 7] = [
    Key {
        name: "stage",
        unit: "0, 1, 2 or 3",
        what: "What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.",
        get: |config| Some(Value::Integer(config.stage.number().into())),
        set: |config, value, key| {
            let number = integer(value, key)?;
            config.stage = u8::try_from(number)
                .ok()
                .and_then(|number| Stage::try_from(number).ok())
                .ok_or_else(|| out_of_range(key, number, "0, 1, 2 or 3"))?;
            Ok(())
        },
    },
    Key {
        name: "bucket_bytes",
        unit: "bytes",
        what: "The most f32 gradients that are reduced together. A larger parameter is reduced alone.",
        get: |config| Some(Value::Integer(config.bucket_bytes.get().into())),
        set: |config, value, key| {
            config.bucket_bytes = Bytes::new(unsigned(value, key)?);
            Ok(())
        },
    },
    Key {
        name: "persistence_threshold",
        unit: "elements",
        what: "At stage 3, parameters of at most this size stay gathered; 0 for none. Without effect, and so \
               refused, at other stages.",
        get: |config| Some(Value::Integer(config.persistence_threshold as i128)),
        set: |config, value, key| {
            config.persistence_threshold = unsigned(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "alignment",
        unit: "elements",
        what: "Shards begin at multiples of this.",
        get: |config| Some(Value::Integer(config.alignment.get() as i128)),
        set: |config, value, key| {
            config.alignment = NonZeroUsize::new(unsigned(value, key)?)
                .ok_or_else(|| out_of_range(key, 0, "at least 1, which asks for nothing"))?;
            Ok(())
        },
    },
    Key {
        name: "clip_norm",
        unit: "L2 norm",
        what: "Gradients with a larger global norm are scaled down to it. Not set: they stay as they are.",
        get: |config| config.clip_norm.map(Value::Float),
        set: |config, value, key| {
            // JSON has a way to say "not set".
            config.clip_norm = if value == Value::Nothing { None } else { Some(float(value, key)?) };
            Ok(())
        },
    },
    Key {
        name: "seed",
        unit: "number",
        what: "Where initial values come from.",
        get: |config| Some(Value::Integer(config.seed.into())),
        set: |config, value, key| {
            config.seed = unsigned(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "deadline_seconds",
        unit: "seconds",
        what: "The longest a rank waits for another before the operation fails.",
        get: |config| Some(Value::Float(config.deadline_seconds)),
        set: |config, value, key| {
            config.deadline_seconds = float(value, key)?;
            Ok(())
        },
    },
];

fn integer(value: Value, key: &'static str) -> Result<i128, ConfigError> {
    match value {
        Value::Integer(number) => Ok(number),
        other => Err(ConfigError::WrongType { key, expected: "an integer", found: other.describe() }),
    }
}

fn unsigned<T: TryFrom<i128>>(value: Value, key: &'static str) -> Result<T, ConfigError> {
    let number = integer(value, key)?;
    T::try_from(number).map_err(|_| out_of_range(key, number, "at least 0 and at most 9223372036854775807"))
}

/// A float, or an integer that stands for one.
fn float(value: Value, key: &'static str) -> Result<f64, ConfigError> {
    match value {
        Value::Float(number) => Ok(number),
        Value::Integer(number) => Ok(number as f64),
        other => Err(ConfigError::WrongType { key, expected: "a number", found: other.describe() }),
    }
}

fn out_of_range(key: &'static str, found: i128, allowed: &'static str) -> ConfigError {
    ConfigError::OutOfRange { key, found: found.to_string(), allowed }
}
