//! Why a configuration is refused.

use thiserror::Error;

use crate::{Bytes, Stage, Tier, nearest};

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
    /// A value has the right type, but nothing that can be.
    #[error("`{key}` is {found}; it must be {allowed}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// The value given.
        found: String,
        /// The values that can be.
        allowed: &'static str,
    },
    /// A value is not one of the few that a key takes.
    #[error("`{key}` is {found}; it must be {allowed}")]
    Choice {
        /// The key.
        key: &'static str,
        /// What was found.
        found: String,
        /// The values it takes, as the end of the message.
        allowed: String,
    },
    /// A key is set, but not the one that gives it a meaning, or that one to a value where it has none.
    #[error("`{key}` is set, but it has a meaning only with {needs}; set that, or remove `{key}`")]
    KeyNeeds {
        /// The key.
        key: &'static str,
        /// The entry it needs.
        needs: &'static str,
    },
    /// A key is not set, but another one cannot do without.
    #[error("`{key}` is not set, but {because}; write {example}")]
    Missing {
        /// The key.
        key: &'static str,
        /// What it is needed for.
        because: &'static str,
        /// An entry that would do.
        example: &'static str,
    },
    /// A dynamic loss scale would begin below its minimum.
    #[error(
        "loss_scale.initial_scale is {initial}, but loss_scale.min_scale is {min}; raise the first or lower the \
         second"
    )]
    InitialScale {
        /// The initial scale given.
        initial: f64,
        /// The minimum given.
        min: f64,
    },
    /// A bucket could not hold a single gradient.
    #[error(
        "bucket_bytes is {bytes}, but one f32 gradient takes 4 bytes; choose at least 4, better a few MiB"
    )]
    BucketTooSmall {
        /// The size given, in bytes.
        bytes: u64,
    },
    /// A key of stage 3 is set at another one, where it has no effect.
    #[error(
        "`{key}` is set, but {stage} keeps every parameter gathered, so that it has no effect; remove it or choose \
         stage 3"
    )]
    IdleKey {
        /// The key.
        key: &'static str,
        /// The stage.
        stage: Stage,
    },
    /// No gradient can be clipped to this norm.
    #[error(
        "clip_norm is {norm}, but gradients can only be scaled to a finite norm above 0; a file leaves them as \
         they are with 0, a program with None"
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
    /// Buffers could not hold a block that is read, one that is updated and one that is written.
    #[error(
        "offload.buffer_bytes is {buffers}, which has no room for three transfers of offload.block_bytes, {block}; raise \
         the first or lower the second"
    )]
    OffloadBuffers {
        /// The size of all buffers.
        buffers: Bytes,
        /// The size of a block.
        block: Bytes,
    },
    /// More master weights would be on a disk than states that they are updated with.
    #[error(
        "offload.parameters has more of each shard on a disk than offload.optimizer, but a step that a disk fails has to \
         leave states in memory as they are, and a copy of those would take twice what the disk saves; put as much of \
         offload.optimizer there, with the tier \"{}\", or leave both to \"{}\"",
        Tier::Nvme,
        Tier::Auto
    )]
    MastersBeyondStates,
    /// Master weights would be moved away that other ranks read.
    #[error(
        "offload.parameters.tier is \"{tier}\", but precision.compute is \"f32\", so that the shards that ranks read from \
         each other are the masters themselves; it helps in 16 bits: choose \"bf16\" or \"f16\", or remove the tier"
    )]
    OffloadedShards {
        /// The tier.
        tier: Tier,
    },
    /// Gradients would be moved to a disk that are there whole until the step.
    #[error(
        "offload.gradients.tier is \"{}\", but gradients are reduced at the step, so that whole gradients would wait in \
         memory; set reduce_gradients = \"every-backward\", or remove the tier",
        Tier::Nvme
    )]
    OffloadedAtStep,
}

impl ConfigError {
    /// A key `name` that is not one of `known` in its table; `prefix` is the table with a point, or empty. Points in
    /// `name` lead into tables that do not exist, and the first one is what is amiss.
    pub(super) fn unknown_key(prefix: &str, name: &str, known: &[&'static str]) -> Self {
        let hint = match nearest(name.split('.').next().unwrap_or(name), known.iter().copied()) {
            Some(near) => format!("did you mean `{prefix}{near}`?"),
            None => {
                let known: Vec<_> = known.iter().map(|name| format!("{prefix}{name}")).collect();
                format!("known keys are {}", known.join(", "))
            }
        };
        Self::UnknownKey { key: format!("{prefix}{name}"), hint }
    }

    /// Words as a message lists them: `"a", "b" or "c"`.
    pub(crate) fn list(words: impl IntoIterator<Item = &'static str>) -> String {
        let quoted: Vec<String> = words.into_iter().map(|word| format!("{word:?}")).collect();
        match quoted.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
            _ => quoted.concat(),
        }
    }
}
