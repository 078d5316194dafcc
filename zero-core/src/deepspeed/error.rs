//! Why a `ds_config.json` cannot be imported.

use thiserror::Error;

use super::report::shortened;
use super::{BatchError, DeepSpeedReport};
use crate::ConfigError;

/// Why a `ds_config.json` cannot be imported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeepSpeedError {
    /// The text is not JSON.
    #[error(
        "the DeepSpeed configuration is not valid JSON{}: {source}; comments and trailing commas, which \
         DeepSpeed allows, have to go", near(.key.as_deref())
    )]
    Json {
        /// The last key before the place, if there is one.
        key: Option<String>,
        /// What the parser says, with line and column.
        source: serde_json::Error,
    },
    /// The text is JSON, but not an object.
    #[error("the DeepSpeed configuration is {found}; it must be a JSON object")]
    NotAnObject {
        /// What it is, with an article.
        found: String,
    },
    /// Keys that cannot be followed; all of them, with the reasons.
    #[error("the DeepSpeed configuration cannot be followed:{}", refusals(.report))]
    Refused {
        /// What became of each key, refused or not.
        report: DeepSpeedReport,
        /// Why there is no batch plan, if that is among the reasons.
        batch: Option<BatchError>,
    },
    /// Values that are legal alone make no configuration together.
    #[error("the DeepSpeed configuration makes no configuration here: {0}")]
    Config(
        /// The reason.
        #[from]
        ConfigError,
    ),
}

fn near(key: Option<&str>) -> String {
    key.map(|key| format!(", at or after the key `{}`", shortened(key))).unwrap_or_default()
}

fn refusals(report: &DeepSpeedReport) -> String {
    report
        .refused()
        .map(|(entry, why)| format!("\n  `{}` = {}: {why}", entry.key, shortened(&entry.value)))
        .collect()
}
