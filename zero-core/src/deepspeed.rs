//! What a `ds_config.json` of DeepSpeed asks for.
//!
//! Keys, defaults and meanings are those of DeepSpeed 0.19.6.

mod batch;
mod draft;
mod error;
mod file;
mod given;
mod key;
mod keys;
mod offload;
mod optimizer;
mod report;
mod scheduler;

pub use batch::{BatchError, BatchPlan};
pub use error::DeepSpeedError;
pub use given::DeepSpeedGiven;
pub use optimizer::{DeepSpeedAdam, DeepSpeedOptimizer};
pub use report::{DeepSpeedEntry, DeepSpeedReport, DeepSpeedSource, DeepSpeedVerdict};
pub use scheduler::{DeepSpeedScheduler, DeepSpeedWarmup};

use std::fmt::Write;

use crate::ZeroConfig;
use crate::config::value::Value;
use file::File;
use key::{Auto, Key, OrElse, Rule, When};
use optimizer::OptimizerKind;
use scheduler::SchedulerKind;

/// What a `ds_config.json` of DeepSpeed asks for; see [`ZeroConfig::from_deepspeed`].
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedImport {
    /// The configuration. What DeepSpeed does not know, such as the deadline, has its default.
    pub config: ZeroConfig,
    /// How many samples a step takes.
    pub batch: BatchPlan,
    /// The optimizer, if the file has one.
    pub optimizer: Option<DeepSpeedOptimizer>,
    /// The learning rates, if the file has any.
    pub scheduler: Option<DeepSpeedScheduler>,
    /// What became of each key.
    pub report: DeepSpeedReport,
}

impl ZeroConfig {
    /// Reads a `ds_config.json` of DeepSpeed.
    ///
    /// Training means what it means with DeepSpeed 0.19.6, defaults of keys that the file does not have
    /// included. `docs/deepspeed.md` lists what becomes of each key; the report says it for one file.
    ///
    /// ```
    /// use zero_core::{Bytes, DType, DeepSpeedGiven, DeepSpeedVerdict, Stage, WorldSize, ZeroConfig};
    ///
    /// let text = r#"{
    ///     "train_micro_batch_size_per_gpu": 4,
    ///     "gradient_accumulation_steps": "auto",
    ///     "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "offload_param": {"device": "none"}},
    ///     "bf16": {"enabled": true}
    /// }"#;
    /// let world = WorldSize::new(8).unwrap();
    /// let given = DeepSpeedGiven { accumulation_steps: Some(2), ..DeepSpeedGiven::new(world) };
    /// let import = ZeroConfig::from_deepspeed(text, &given)?;
    ///
    /// assert_eq!((import.config.stage, import.config.precision.compute), (Stage::Two, DType::BF16));
    /// assert_eq!(import.config.bucket_bytes, Bytes::new(200_000_000));
    /// assert_eq!(import.batch.train_batch_size, 64);
    /// let device = import.report.find("zero_optimization.offload_param.device").unwrap();
    /// assert!(matches!(device.verdict, DeepSpeedVerdict::WithoutEffect { .. }));
    ///
    /// let text = r#"{"train_batch_size": 8, "zero_optimisation": {}}"#;
    /// let error = ZeroConfig::from_deepspeed(text, &given).unwrap_err();
    /// assert!(error.to_string().ends_with("unknown key; did you mean `zero_optimization`?"));
    /// # Ok::<(), zero_core::DeepSpeedError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`DeepSpeedError::Json`] and [`DeepSpeedError::NotAnObject`] for another text,
    /// and [`DeepSpeedError::Refused`] with every key that cannot be followed, unknown and repeated ones and batch
    /// sizes that do not fit the world included.
    pub fn from_deepspeed(text: &str, given: &DeepSpeedGiven) -> Result<DeepSpeedImport, DeepSpeedError> {
        let entries = match serde_json::from_str(text) {
            Ok(Value::Table(entries)) => entries,
            Ok(other) => return Err(DeepSpeedError::NotAnObject { found: other.describe() }),
            Err(source) => {
                let key = key_before(text, source.line(), source.column());
                return Err(DeepSpeedError::Json { key, source });
            }
        };
        let (draft, batch, report) = File::read(entries, given);
        let is_refused = report.refused().next().is_some();
        let batch = match batch {
            Some(Ok(batch)) if !is_refused => batch,
            batch => return Err(DeepSpeedError::Refused { report, batch: batch.and_then(Result::err) }),
        };
        Ok(DeepSpeedImport {
            config: draft.config()?,
            batch,
            optimizer: draft.optimizer.build(),
            scheduler: draft.scheduler(),
            report,
        })
    }
}

impl DeepSpeedImport {
    /// Every key with DeepSpeed's default and what becomes of it, as a Markdown table; then old names.
    pub fn keys_table() -> String {
        let mut table = String::from("| key | default | verdict | `\"auto\"` |\n| --- | --- | --- | --- |\n");
        for key in keys::all() {
            let default = if key.name.ends_with('*') { String::new() } else { format!("`{}`", key.default) };
            let auto = match (key.auto, key.rule) {
                (Auto::Given { field, or, .. }, _) => {
                    let or = match or {
                        OrElse::Refusal => "",
                        OrElse::Default => ", or the default",
                        OrElse::Division => ", or by division",
                    };
                    format!("`{field}`{or}")
                }
                (Auto::Default, Rule::Taken { .. }) => "the default".into(),
                (Auto::Default, _) => String::new(),
            };
            // Writing to a string does not fail.
            let _ = writeln!(table, "| `{}` | {default} | {} | {auto} |", key.name, described(key));
        }
        table += "\n| old or short name | name |\n| --- | --- |\n";
        for (old, new) in keys::OLD_NAMES {
            let _ = writeln!(table, "| `{old}` | `{new}` |");
        }
        table
    }
}

/// What becomes of a key, for the documentation.
fn described(key: &Key) -> String {
    match key.rule {
        Rule::Taken { by, when, .. } => {
            let when = match when {
                When::Always | When::Present => String::new(),
                When::Sharded => " at stages 1 to 3".into(),
                When::StageThree => " at stage 3".into(),
                When::OptimizerOffloaded => " if the optimizer's state is offloaded".into(),
                When::OptimizerOnDisk => " if the optimizer's state is on a disk".into(),
                When::Fp16 => " if fp16 is enabled".into(),
                When::DynamicScale => " if fp16 is enabled and its loss_scale is 0".into(),
                When::Optimizer(kinds) => of(kinds, OptimizerKind::NAMES),
                When::Scheduler(kinds) => of(kinds, SchedulerKind::NAMES),
            };
            let separator = if key.note.is_empty() { "" } else { "; " };
            format!("honoured{when}: {by}{separator}{}", key.note)
        }
        Rule::Ignored(why) => format!("without effect: {why}"),
        Rule::Nearly(how) => format!("honoured if `{}`, else approximated: {how}", key.default),
        Rule::Off { values, why } => {
            let values: Vec<_> = values.iter().map(|value| format!("`{value}`")).collect();
            format!("without effect if {}, else refused: {why}", values.join(" or "))
        }
        Rule::Switches(why) => format!("without effect, but `enabled` refused unless `false`: {why}"),
    }
}

/// The kinds that a parameter belongs to, for the documentation.
fn of<K: PartialEq>(kinds: &[K], names: &[(&str, K)]) -> String {
    let names: Vec<_> =
        names.iter().filter(|(_, kind)| kinds.contains(kind)).map(|(name, _)| *name).collect();
    format!(" for {}", names.join(", "))
}

/// The last key of a text before a place, given as the parser gives it.
fn key_before(text: &str, line: usize, column: usize) -> Option<String> {
    let start: usize = text.split_inclusive('\n').take(line.checked_sub(1)?).map(str::len).sum();
    let before = text.as_bytes().get(..start.saturating_add(column).min(text.len()))?;
    let before = String::from_utf8_lossy(before);
    let (before, _) = before.rsplit_once(':')?;
    before.trim_end().strip_suffix('"')?.rsplit('"').next().map(str::to_owned)
}
