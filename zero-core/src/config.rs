//! What a user chooses.

mod document;
mod error;
mod key;
pub(crate) mod value;

use std::num::NonZeroUsize;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    Bytes, DType, DynamicLossScale, LayoutOptions, LookAheadOptions, LossScaling, Offload, Precision,
    ReduceGradients, Stage,
};
use document::Document;
pub use error::ConfigError;
use key::{Key, SCALE};
use value::Value;

/// Everything a user chooses about sharded training.
///
/// Every key has a default, so that an empty file is a configuration; unknown keys, values of a wrong type
/// and combinations that cannot work are refused with the reason. `docs/configuration.md` lists keys and
/// defaults.
///
/// ```
/// use zero_core::{Stage, ZeroConfig};
///
/// let config = ZeroConfig::from_toml("stage = 2\nclip_norm = 1.0")?;
/// assert_eq!((config.stage, config.clip_norm), (Stage::Two, Some(1.0)));
///
/// let error = ZeroConfig::from_toml("stgae = 2").unwrap_err();
/// assert_eq!(error.to_string(), "unknown key `stgae`; did you mean `stage`?");
/// # Ok::<(), zero_core::ConfigError>(())
/// ```
///
/// An application embeds it as a section of its own file, with the same messages:
///
/// ```
/// #[derive(serde::Deserialize)]
/// struct Job {
///     steps: usize,
///     #[serde(default)]
///     zero: zero_core::ZeroConfig,
/// }
///
/// let error = toml::from_str::<Job>("steps = 10\n[zero]\nclip_norm = -1.0").err().unwrap();
/// assert!(error.message().starts_with("clip_norm is -1"));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: Stage,
    /// The most bytes of f32 gradients that are reduced together.
    pub bucket_bytes: Bytes,
    /// When ranks sum up their gradients; `None` for what suits the stage, see
    /// [`reduce_gradients`](Self::reduce_gradients()).
    pub reduce_gradients: Option<ReduceGradients>,
    /// Whether ranks communicate beside computing. Results do not depend on it.
    pub overlap: bool,
    /// Whether ranks take parameters and gradients from each other's devices, where these can. Processes that do so keep copies
    /// of their shards on the device for that.
    pub device_transport: bool,
    /// Parameters of at most this many elements stay gathered at stage 3; 0 for none.
    pub persistence_threshold: usize,
    /// The most bytes of parameters that are gathered at stage 3 before they are needed, with `overlap`; 0 for
    /// none.
    pub lookahead_bytes: Bytes,
    /// The most bytes that gathered parameters take at stage 3, those gathered early and those kept included;
    /// `None` for no limit. What layers need at one time can exceed it.
    pub live_bytes: Option<Bytes>,
    /// At stage 3, a gathered parameter is kept if fewer bytes of parameters than this are needed before its
    /// next use.
    pub reuse_bytes: Bytes,
    /// Shards begin at multiples of this, in elements.
    pub alignment: NonZeroUsize,
    /// The largest global L2 norm a gradient keeps; `None`, which in a file is 0 too, leaves gradients as they
    /// are.
    pub clip_norm: Option<f64>,
    /// Where initial values come from.
    pub seed: u64,
    /// The longest a rank waits for another, in seconds.
    pub deadline_seconds: f64,
    /// The element types of training.
    pub precision: Precision,
    /// How the loss is scaled; `None` for what suits the precision, see
    /// [`loss_scaling`](Self::loss_scaling).
    pub loss_scale: Option<LossScaling>,
    /// What is kept on the host or on a disk.
    pub offload: Offload,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        let layout = LayoutOptions::default();
        Self {
            stage: Stage::Three,
            bucket_bytes: layout.bucket_bytes,
            reduce_gradients: None,
            overlap: true,
            device_transport: true,
            persistence_threshold: 10_000,
            lookahead_bytes: Bytes::new(64 * 1024 * 1024),
            live_bytes: None,
            reuse_bytes: Bytes::ZERO,
            alignment: layout.alignment,
            clip_norm: None,
            seed: 0,
            deadline_seconds: 300.0,
            precision: Precision::default(),
            loss_scale: None,
            offload: Offload::default(),
        }
    }
}

impl ZeroConfig {
    /// Reads TOML text.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Toml`] for text that is not TOML, a repeated key included; otherwise as
    /// [`from_toml_table`](Self::from_toml_table).
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let document = toml::from_str::<Document>(text).map_err(|source| {
            let before = source.span().and_then(|span| text.get(..span.start)).unwrap_or("");
            ConfigError::Toml { line: before.matches('\n').count() + 1, source: Box::new(source) }
        })?;
        Self::read(document)
    }

    /// Reads a table of an application's TOML document, such as its `[zero]` section.
    ///
    /// # Errors
    ///
    /// A [`ConfigError`] that names the key: unknown, of a wrong type, out of range, or in a combination that
    /// cannot work.
    pub fn from_toml_table(table: toml::Table) -> Result<Self, ConfigError> {
        let document = table
            .try_into::<Document>()
            .map_err(|source| ConfigError::Toml { line: 1, source: Box::new(source) })?;
        Self::read(document)
    }

    /// Reads JSON text: one object.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Json`] for text that is not a JSON object, [`ConfigError::DuplicateKey`] for a repeated
    /// key; otherwise as [`from_toml_table`](Self::from_toml_table).
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::read(serde_json::from_str(text)?)
    }

    /// The configuration as TOML, which reads back as the same value if it is [valid](Self::validate).
    ///
    /// A key that is not set, or would be refused for having no effect, is left out. Keys of tables are written
    /// with the table's name, so that the text can stand below a header of an application's document.
    pub fn to_toml(&self) -> String {
        self.entries().map(|(name, value)| format!("{name} = {value}\n")).collect()
    }

    /// Every key that is set and has an effect, with its value as TOML writes it.
    ///
    /// ```
    /// use zero_core::ZeroConfig;
    ///
    /// let config = ZeroConfig::from_toml("precision.compute = \"bf16\"")?;
    /// let compute = config.entries().find(|(key, _)| *key == "precision.compute");
    /// assert_eq!(compute, Some(("precision.compute", "\"bf16\"".into())));
    /// # Ok::<(), zero_core::ConfigError>(())
    /// ```
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.values().map(|(name, value)| (name, value.to_string()))
    }

    /// Whether the values can work, alone and together. Everything that reads a configuration has asked
    /// already.
    ///
    /// # Errors
    ///
    /// The [`ConfigError`] of the first value that cannot.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (key, number) in [
            ("bucket_bytes", self.bucket_bytes.get()),
            ("persistence_threshold", self.persistence_threshold as u64),
            ("lookahead_bytes", self.lookahead_bytes.get()),
            ("live_bytes", self.live_bytes.map_or(0, Bytes::get)),
            ("reuse_bytes", self.reuse_bytes.get()),
            ("alignment", self.alignment.get() as u64),
            ("seed", self.seed),
            ("offload.buffer_bytes", self.offload.buffer_bytes.get()),
            ("offload.exact_steps", self.offload.exact_steps),
        ] {
            if i64::try_from(number).is_err() {
                return Err(ConfigError::OutOfRange {
                    key,
                    found: number.to_string(),
                    allowed: "at most 9223372036854775807, the largest integer TOML can hold",
                });
            }
        }
        if self.bucket_bytes.get() < DType::F32.size() as u64 {
            return Err(ConfigError::BucketTooSmall { bytes: self.bucket_bytes.get() });
        }
        // The defaults have to be legal at every stage, so that `stage = 1` alone is a configuration.
        let default = Self::default();
        self.refuse_idle(|key| (key.get)(self) != (key.get)(&default))?;
        self.precision.validate()?;
        self.loss_scaling().validate()?;
        self.offload.validate(self)?;
        match self.clip_norm {
            Some(norm) if !(norm.is_finite() && norm > 0.0) => Err(ConfigError::ClipNorm { norm }),
            _ => Ok(()),
        }?;
        match Duration::try_from_secs_f64(self.deadline_seconds) {
            Ok(deadline) if !deadline.is_zero() => Ok(()),
            _ => Err(ConfigError::Deadline { seconds: self.deadline_seconds }),
        }
    }

    /// What a [`Layout`](crate::Layout) takes from the configuration.
    pub fn layout_options(&self) -> LayoutOptions {
        LayoutOptions {
            alignment: self.alignment,
            bucket_bytes: self.bucket_bytes,
            persistence_threshold: self.persistence_threshold,
        }
    }

    /// What a [`LookAhead`](crate::LookAhead) takes from the configuration; without overlap nothing is fetched
    /// ahead.
    pub fn lookahead_options(&self) -> LookAheadOptions {
        LookAheadOptions {
            lookahead_bytes: if self.overlap { self.lookahead_bytes } else { Bytes::ZERO },
            live_bytes: self.live_bytes,
            reuse_bytes: self.reuse_bytes,
        }
    }

    /// When ranks sum up their gradients: as configured, or else what the stage does by default.
    pub fn reduce_gradients(&self) -> ReduceGradients {
        self.reduce_gradients.unwrap_or(ReduceGradients::of_stage(self.stage))
    }

    /// How the loss is scaled: as configured, or else dynamically if layers compute in f16, whose range would
    /// lose small gradients, and not at all if they do not.
    pub fn loss_scaling(&self) -> LossScaling {
        self.loss_scale.unwrap_or(match self.precision.compute {
            DType::F16 => LossScaling::Dynamic(DynamicLossScale::default()),
            _ => LossScaling::NONE,
        })
    }

    /// The longest a rank waits for another. Seconds that are no duration, which
    /// [`validate`](Self::validate) refuses, become the nearest one, and not a number becomes zero.
    pub fn deadline(&self) -> Duration {
        let nearest = if self.deadline_seconds > 0.0 { Duration::MAX } else { Duration::ZERO };
        Duration::try_from_secs_f64(self.deadline_seconds).unwrap_or(nearest)
    }

    /// Every key with its default, unit and meaning, as a Markdown table.
    pub fn defaults_table() -> String {
        let default = Self::default();
        let mut table = String::from("| key | default | unit | what |\n| --- | --- | --- | --- |\n");
        for key in key::all() {
            let value = (key.get)(&default).map_or("not set".into(), |value| format!("`{value}`"));
            table += &format!("| `{}` | {value} | {} | {} |\n", key.name, key.unit, key.what);
        }
        table
    }

    fn read(document: Document) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut seen = Vec::new();
        for (key, value) in document.resolve()?.into_values() {
            (key.set)(&mut config, value, key.name)?;
            seen.push(key.name);
        }
        config.refuse_idle(|key| seen.contains(&key.name))?;
        if matches!(config.loss_scale, Some(LossScaling::Static { .. })) && !seen.contains(&SCALE) {
            return Err(ConfigError::Missing {
                key: SCALE,
                because: "the mode is \"static\"",
                example: "loss_scale.scale = 128.0",
            });
        }
        config.validate()?;
        Ok(config)
    }

    /// Refuses a key that asks for something that only stage 3 does, at another one; of those that `counts`.
    fn refuse_idle(&self, counts: impl Fn(&Key) -> bool) -> Result<(), ConfigError> {
        match key::all().find(|key| key.is_idle(self) && counts(key)) {
            Some(key) => Err(ConfigError::IdleKey { key: key.name, stage: self.stage }),
            None => Ok(()),
        }
    }

    /// What a file has to say.
    fn values(&self) -> impl Iterator<Item = (&'static str, Value)> {
        key::all()
            .filter(|key| !key.is_idle(self))
            .filter_map(|key| (key.get)(self).map(|value| (key.name, value)))
    }
}

/// Adds a value to a table, in inner tables as its name says. Those of one table come one after another.
fn insert(table: &mut Vec<(String, Value)>, name: &str, value: Value) {
    let Some((inner, rest)) = name.split_once('.') else {
        return table.push((name.to_owned(), value));
    };
    match table.last_mut() {
        Some((last, Value::Table(entries))) if last == inner => insert(entries, rest, value),
        _ => {
            let mut entries = Vec::new();
            insert(&mut entries, rest, value);
            table.push((inner.to_owned(), Value::Table(entries)));
        }
    }
}

impl Serialize for ZeroConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut root = Vec::new();
        for (name, value) in self.values() {
            insert(&mut root, name, value);
        }
        Value::Table(root).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ZeroConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(Document::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}
