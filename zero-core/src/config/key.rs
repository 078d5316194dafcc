//! The keys of a configuration: the one table that reading, writing and documentation share.

mod offload;

use std::num::{NonZeroU32, NonZeroUsize};

use super::value::Value;
use super::{ConfigError, ZeroConfig};
use crate::{AtMinScale, Bytes, DType, DynamicLossScale, LossScaling, Precision, ReduceGradients, Stage};

/// One key of a configuration.
pub(super) struct Key {
    /// Its name, after those of its tables with a point each.
    pub(super) name: &'static str,
    /// The unit of the value, as the documentation shows it.
    pub(super) unit: &'static str,
    /// What it is, as the documentation shows it.
    pub(super) what: &'static str,
    /// The value, unless it is not set.
    pub(super) get: fn(&ZeroConfig) -> Option<Value>,
    /// Takes a value from a file, with the key's name for messages. Keys are set in the order of [`all`].
    pub(super) set: fn(&mut ZeroConfig, Value, &'static str) -> Result<(), ConfigError>,
}

/// The keys that ask for something at stage 3 alone.
const OF_STAGE_THREE: [&str; 4] = ["persistence_threshold", "lookahead_bytes", "live_bytes", "reuse_bytes"];

impl Key {
    /// Whether it asks for something that its stage does not do. Not set, or 0 where there is no need to unset it,
    /// asks for nothing.
    pub(super) fn is_idle(&self, config: &ZeroConfig) -> bool {
        let asks = || !matches!((self.get)(config), None | Some(Value::Integer(0)));
        OF_STAGE_THREE.contains(&self.name) && !config.stage.shards_parameters() && asks()
    }
}

/// Every key, in the order of the documentation; those of a table one after another, its inner tables last.
pub(super) fn all() -> impl Iterator<Item = &'static Key> {
    [KEYS, offload::KEYS, offload::OPTIMIZER, offload::GRADIENTS, offload::PARAMETERS].into_iter().flatten()
}

static KEYS: &[Key] = &[
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
        get: |config| Some(bytes_of(config.bucket_bytes)),
        set: |config, value, key| {
            config.bucket_bytes = bytes(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "reduce_gradients",
        unit: "`\"every-backward\"` or `\"at-step\"`",
        what: "When ranks sum up their gradients, if a step takes several backwards. Not set: every backward at \
               stages 2 and 3, at the step at stages 0 and 1.",
        get: |config| config.reduce_gradients.map(|when| text_of(when.name())),
        set: |config, value, key| {
            let choices = [ReduceGradients::EveryBackward, ReduceGradients::AtStep];
            config.reduce_gradients = unless_null(value, |value| {
                choice(value, key, &choices.map(|choice| (choice.name(), choice)))
            })?;
            Ok(())
        },
    },
    Key {
        name: "overlap",
        unit: "boolean",
        what: "Whether ranks communicate beside computing; false waits for each exchange where it begins. \
               Results are the same.",
        get: |config| Some(Value::Bool(config.overlap)),
        set: |config, value, key| {
            config.overlap = boolean(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "device_transport",
        unit: "boolean",
        what: "Whether ranks take parameters and gradients from each other's devices, where these can; false \
               takes all of it through host memory. Processes that do so keep copies of their shards on the device \
               for that.",
        get: |config| Some(Value::Bool(config.device_transport)),
        set: |config, value, key| {
            config.device_transport = boolean(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "persistence_threshold",
        unit: "elements",
        what: "At stage 3, parameters of at most this size stay gathered; 0 for none. Without effect, and so \
               refused, at other stages, as are the three keys below.",
        get: |config| Some(Value::Integer(config.persistence_threshold as i128)),
        set: |config, value, key| {
            config.persistence_threshold = unsigned(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "lookahead_bytes",
        unit: "bytes",
        what: "At stage 3, the most bytes of parameters that are gathered before they are needed; 0 for none. \
               Without effect if `overlap` is false.",
        get: |config| Some(bytes_of(config.lookahead_bytes)),
        set: |config, value, key| {
            config.lookahead_bytes = bytes(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "live_bytes",
        unit: "bytes",
        what: "At stage 3, the most bytes that gathered parameters take, those gathered early and those kept \
               included; only what layers need at one time can exceed it. Not set: no limit.",
        get: |config| config.live_bytes.map(bytes_of),
        set: |config, value, key| {
            config.live_bytes = unless_null(value, |value| bytes(value, key))?;
            Ok(())
        },
    },
    Key {
        name: "reuse_bytes",
        unit: "bytes",
        what: "At stage 3, a gathered parameter is kept if fewer bytes of parameters than this are needed \
               before its next use.",
        get: |config| Some(bytes_of(config.reuse_bytes)),
        set: |config, value, key| {
            config.reuse_bytes = bytes(value, key)?;
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
        what: "Gradients with a larger global norm are scaled down to it. Not set, or 0: they stay as they are.",
        get: |config| config.clip_norm.map(Value::Float),
        set: |config, value, key| {
            config.clip_norm = unless_null(value, |value| float(value, key))?.filter(|norm| *norm != 0.0);
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
    Key {
        name: "precision.compute",
        unit: "`\"f32\"`, `\"bf16\"` or `\"f16\"`",
        what: "What layers compute in. Master weights are f32 in any case.",
        get: |config| Some(text_of(config.precision.compute.name())),
        set: |config, value, key| {
            config.precision.compute = dtype(value, key, Precision::COMPUTE)?;
            Ok(())
        },
    },
    Key {
        name: "precision.reduce",
        unit: "as `precision.compute`",
        what: "What gradients travel in between ranks; sums are taken in f32. Not set: `precision.compute`.",
        get: |config| config.precision.reduce.map(|dtype| text_of(dtype.name())),
        set: |config, value, key| {
            config.precision.reduce = unless_null(value, |value| dtype(value, key, Precision::COMPUTE))?;
            Ok(())
        },
    },
    Key {
        name: "precision.accumulate",
        unit: "as `precision.compute`",
        what: "What the gradients of several backwards are summed up in until the step.",
        get: |config| Some(text_of(config.precision.accumulate.name())),
        set: |config, value, key| {
            config.precision.accumulate = dtype(value, key, Precision::COMPUTE)?;
            Ok(())
        },
    },
    Key {
        name: "precision.optimizer_state",
        unit: "`\"f32\"` or `\"bf16\"`",
        what: "What the optimizer keeps its state in.",
        get: |config| Some(text_of(config.precision.optimizer_state.name())),
        set: |config, value, key| {
            config.precision.optimizer_state = dtype(value, key, Precision::STATES)?;
            Ok(())
        },
    },
    Key {
        name: MODE,
        unit: "`\"static\"` or `\"dynamic\"`",
        what: "How the loss is scaled so that small gradients survive 16 bits. Not set: dynamic if \
               `precision.compute` is `\"f16\"`, else not at all.",
        get: |config| {
            config.loss_scale.map(|scaling| match scaling {
                LossScaling::Static { .. } => text_of("static"),
                LossScaling::Dynamic(_) => text_of("dynamic"),
            })
        },
        set: |config, value, key| {
            // Static without a scale is refused after all keys are set.
            let choices = [
                ("static", LossScaling::NONE),
                ("dynamic", LossScaling::Dynamic(DynamicLossScale::default())),
            ];
            config.loss_scale = unless_null(value, |value| choice(value, key, &choices))?;
            Ok(())
        },
    },
    Key {
        name: SCALE,
        unit: "factor",
        what: "Static: the scale.",
        get: |config| match config.loss_scale {
            Some(LossScaling::Static { scale }) => Some(Value::Float(scale)),
            _ => None,
        },
        set: |config, value, key| match &mut config.loss_scale {
            Some(LossScaling::Static { scale }) => {
                *scale = float(value, key)?;
                Ok(())
            }
            _ => Err(ConfigError::KeyNeeds { key, needs: "loss_scale.mode = \"static\"" }),
        },
    },
    Key {
        name: "loss_scale.initial_scale",
        unit: "factor",
        what: "Dynamic: the first scale; 65536 if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Float(dynamic.initial_scale)),
        set: |config, value, key| {
            dynamic(config, key)?.initial_scale = float(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.factor",
        unit: "factor",
        what: "Dynamic: what the scale is multiplied or divided by; 2 if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Float(dynamic.factor)),
        set: |config, value, key| {
            dynamic(config, key)?.factor = float(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.window",
        unit: "steps",
        what: "Dynamic: steps without overflow until the scale grows; 1000 if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Integer(dynamic.window.get().into())),
        set: |config, value, key| {
            dynamic(config, key)?.window = count(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.hysteresis",
        unit: "overflows",
        what: "Dynamic: the scale falls with this many overflows; 2 if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Integer(dynamic.hysteresis.get().into())),
        set: |config, value, key| {
            dynamic(config, key)?.hysteresis = count(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.consecutive_hysteresis",
        unit: "boolean",
        what: "Dynamic: whether one step without overflow forgives earlier overflows, or only growth does; \
               false if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Bool(dynamic.consecutive_hysteresis)),
        set: |config, value, key| {
            dynamic(config, key)?.consecutive_hysteresis = boolean(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.min_scale",
        unit: "factor",
        what: "Dynamic: the scale does not fall below this; 1 if not set.",
        get: |config| dynamic_of(config).map(|dynamic| Value::Float(dynamic.min_scale)),
        set: |config, value, key| {
            dynamic(config, key)?.min_scale = float(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "loss_scale.at_min",
        unit: "`\"error\"` or `\"skip\"`",
        what: "Dynamic: whether an overflow at the minimum is an error or one more skipped step; an error if \
               not set.",
        get: |config| {
            dynamic_of(config).map(|dynamic| match dynamic.at_min {
                AtMinScale::Error => text_of("error"),
                AtMinScale::Skip => text_of("skip"),
            })
        },
        set: |config, value, key| {
            let choices = [("error", AtMinScale::Error), ("skip", AtMinScale::Skip)];
            dynamic(config, key)?.at_min = choice(value, key, &choices)?;
            Ok(())
        },
    },
];

/// The key that the others of its table need.
const MODE: &str = "loss_scale.mode";
/// The key that a static mode needs.
pub(super) const SCALE: &str = "loss_scale.scale";

/// The table called `name`, after those it is in with a point each, if there is one.
pub(super) fn table(name: &str) -> Option<&'static str> {
    all().find_map(|key| {
        let table = key.name.get(..name.len())?;
        (table == name && key.name[name.len()..].starts_with('.')).then_some(table)
    })
}

/// The error about a key called `name` with those of its tables.
pub(super) fn unknown(name: &str) -> ConfigError {
    let tables = name.rmatch_indices('.').map(|(point, _)| &name[..point]);
    let prefix = tables.into_iter().find_map(table).map_or(String::new(), |table| format!("{table}."));
    let within = all().filter_map(|key| key.name.strip_prefix(&prefix)?.split('.').next());
    let mut known: Vec<_> = within.collect();
    known.dedup();
    ConfigError::unknown_key(&prefix, &name[prefix.len()..], &known)
}

fn dynamic_of(config: &ZeroConfig) -> Option<DynamicLossScale> {
    match config.loss_scale {
        Some(LossScaling::Dynamic(dynamic)) => Some(dynamic),
        _ => None,
    }
}

fn dynamic<'a>(
    config: &'a mut ZeroConfig,
    key: &'static str,
) -> Result<&'a mut DynamicLossScale, ConfigError> {
    match &mut config.loss_scale {
        Some(LossScaling::Dynamic(dynamic)) => Ok(dynamic),
        _ => Err(ConfigError::KeyNeeds { key, needs: "loss_scale.mode = \"dynamic\"" }),
    }
}

/// JSON has a way to say "not set".
fn unless_null<T>(
    value: Value,
    read: impl FnOnce(Value) -> Result<T, ConfigError>,
) -> Result<Option<T>, ConfigError> {
    if value == Value::Nothing { Ok(None) } else { read(value).map(Some) }
}

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

fn bytes(value: Value, key: &'static str) -> Result<Bytes, ConfigError> {
    unsigned(value, key).map(Bytes::new)
}

fn count(value: Value, key: &'static str) -> Result<NonZeroU32, ConfigError> {
    let number = integer(value, key)?;
    u32::try_from(number)
        .ok()
        .and_then(NonZeroU32::new)
        .ok_or_else(|| out_of_range(key, number, "at least 1 and at most 4294967295"))
}

fn text(value: Value, key: &'static str) -> Result<String, ConfigError> {
    match value {
        Value::Text(text) => Ok(text),
        other => Err(ConfigError::WrongType { key, expected: "a string", found: other.describe() }),
    }
}

fn boolean(value: Value, key: &'static str) -> Result<bool, ConfigError> {
    match value {
        Value::Bool(value) => Ok(value),
        other => Err(ConfigError::WrongType { key, expected: "true or false", found: other.describe() }),
    }
}

/// A float, or an integer that stands for one.
fn float(value: Value, key: &'static str) -> Result<f64, ConfigError> {
    match value {
        Value::Float(number) => Ok(number),
        Value::Integer(number) => Ok(number as f64),
        other => Err(ConfigError::WrongType { key, expected: "a number", found: other.describe() }),
    }
}

/// One of a few words.
fn choice<T: Copy>(value: Value, key: &'static str, choices: &[(&'static str, T)]) -> Result<T, ConfigError> {
    match &value {
        Value::Text(word) => choices.iter().find(|(name, _)| name == word).map(|(_, choice)| *choice),
        _ => None,
    }
    .ok_or_else(|| ConfigError::Choice {
        key,
        found: value.describe(),
        allowed: ConfigError::list(choices.iter().map(|(name, _)| *name)),
    })
}

fn dtype(value: Value, key: &'static str, allowed: &[DType]) -> Result<DType, ConfigError> {
    let choices: Vec<_> = allowed.iter().map(|dtype| (dtype.name(), *dtype)).collect();
    choice(value, key, &choices)
}

fn bytes_of(bytes: Bytes) -> Value {
    Value::Integer(bytes.get().into())
}

fn text_of(text: &str) -> Value {
    Value::Text(text.to_owned())
}

fn out_of_range(key: &'static str, found: i128, allowed: &'static str) -> ConfigError {
    ConfigError::OutOfRange { key, found: found.to_string(), allowed }
}
