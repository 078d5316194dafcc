//! Why a configuration is refused.

use thiserror::Error;

use crate::{Stage, nearest};

/// Why a configuration is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not TOML.
    #[error("line {line} of the configuration is not valid TOML: {}", .source.message())]
    Toml {
        /// The line, counted from 1.
        line: usize,
        /// What the parser says.
        source: Box<toml::de::Error>,
    },
    /// The text is not a JSON object.
    #[error("the configuration is not a valid JSON object: {0}")]
    Json(
        /// What the parser says, with line and column.
        #[from]
        serde_json::Error,
    ),
    /// A key is not one of those known.
    #[error("unknown key `{key}`; {hint}")]
    UnknownKey {
        /// The key given.
        key: String,
        /// The nearest known key, or all of them when none is near, as the end of the message.
        hint: String,
    },
    /// A key is given twice.
    #[error("the key `{key}` is given twice; keep one of the two")]
    DuplicateKey {
        /// The key.
        key: &'static str,
    },
    /// A value has the wrong type.
    #[error("`{key}` is {found}; write {expected}")]
    WrongType {
        /// The key.
        key: &'static str,
        /// What belongs there, with an article.
        expected: &'static str,
        /// What was found: its type, and the value if that is short.
        found: String,
    },
    /// A number has the right type, but no such value exists.
    #[error("`{key}` is {found}; it must be {allowed}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The number given.
        found: String,
        /// The numbers that exist.
        allowed: &'static str,
    },
    /// A bucket could not hold a single gradient.
    #[error(
        "bucket_bytes is {bytes}, but one f32 gradient takes 4 bytes; choose at least 4, better a few MiB"
    )]
    BucketTooSmall {
        /// The size given, in bytes.
        bytes: u64,
    },
    /// A threshold is set where it has no effect.
    #[error(
        "persistence_threshold is {threshold}, but {stage} keeps every parameter gathered, so that it has no \
         effect; remove it or choose stage 3"
    )]
    IdleThreshold {
        /// The threshold given, in elements.
        threshold: usize,
        /// The stage.
        stage: Stage,
    },
    /// No gradient can be clipped to this norm.
    #[error(
        "clip_norm is {norm}, but gradients can only be scaled to a finite norm above 0; remove it to leave \
         gradients as they are"
    )]
    ClipNorm {
        /// The norm given.
        norm: f64,
    },
    /// No wait can end after this time.
    #[error(
        "deadline_seconds is {seconds}, but a wait needs an end: a time from a nanosecond to 2^64 seconds, \
         such as 300"
    )]
    Deadline {
        /// The seconds given.
        seconds: f64,
    },
}

impl ConfigError {
    pub(super) fn unknown_key(
        key: String,
        known: impl IntoIterator<Item = &'static str, IntoIter: Clone>,
    ) -> Self {
        let known = known.into_iter();
        let hint = match nearest(&key, known.clone()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known keys are {}", known.collect::<Vec<_>>().join(", ")),
        };
        Self::UnknownKey { key, hint }
    }
}
