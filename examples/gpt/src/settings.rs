//! What a run does: embedded defaults, a TOML file over them, flags over both.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use zero_burn::{Stage, WorldSize, ZeroConfig};

use crate::flags::Flags;
use crate::model::GptConfig;
use crate::train_config::TrainConfig;

/// Everything a run needs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model's shape.
    pub model: GptConfig,
    /// How to train.
    pub train: TrainConfig,
    /// The engine's configuration.
    pub zero: ZeroConfig,
    /// Where the text lies.
    pub corpus: Vec<PathBuf>,
    /// Where metrics go.
    pub metrics: Option<PathBuf>,
    /// Burn alone.
    pub plain: bool,
    /// The number of ranks, if the command line gives it.
    pub ranks: Option<usize>,
    /// Each rank is a process.
    pub processes: bool,
}

impl Settings {
    /// From the command line.
    ///
    /// # Errors
    ///
    /// Names the file and key, or the flag, that cannot work.
    pub fn new(flags: Flags) -> Result<Self> {
        let mut settings = Self {
            model: GptConfig::default(),
            train: TrainConfig::default(),
            zero: ZeroConfig { clip_norm: Some(1.0), ..ZeroConfig::default() },
            corpus: vec![workspace()],
            metrics: flags.metrics,
            plain: flags.plain,
            ranks: flags.ranks,
            processes: flags.processes,
        };
        if let Some(path) = &flags.config {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            settings.apply_toml(&text).with_context(|| format!("{} cannot work", path.display()))?;
        }
        if let Some(ranks) = flags.ranks {
            settings.train.ranks = ranks;
        }
        if let Some(stage) = flags.stage {
            settings.zero.stage = Stage::try_from(stage)?;
        }
        if let Some(steps) = flags.steps {
            settings.train.steps = steps;
        }
        if let Some(seed) = flags.seed {
            settings.zero.seed = seed;
        }
        if !flags.corpus.is_empty() {
            settings.corpus = flags.corpus;
        }
        settings.validate()?;
        Ok(settings)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> WorldSize {
        WorldSize::new(self.train.ranks).unwrap_or(WorldSize::ONE)
    }

    /// The learning rate of a step, counted from 0.
    pub fn lr(&self, step: usize) -> f64 {
        let train = &self.train;
        if step < train.warmup {
            return train.lr * (step + 1) as f64 / train.warmup as f64;
        }
        let done = (step - train.warmup) as f64 / train.steps.saturating_sub(train.warmup).max(1) as f64;
        train.lr * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()))
    }

    fn apply_toml(&mut self, text: &str) -> Result<()> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let before = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = 1 + text.bytes().take(before).filter(|&byte| byte == b'\n').count();
            anyhow!("line {line}: {}", error.message())
        })?;
        for (section, value) in table {
            let table = match value {
                toml::Value::Table(table) => table,
                _ => return Err(anyhow!("`{section}` must be a section: [{section}]")),
            };
            match section.as_str() {
                "model" => self.model = merge("model", &self.model, table)?,
                "train" => self.train = merge("train", &self.train, table)?,
                "zero" => {
                    let clips = table.contains_key("clip_norm");
                    let clip_norm = self.zero.clip_norm;
                    self.zero = ZeroConfig::from_toml_table(table).context("[zero]")?;
                    if !clips {
                        self.zero.clip_norm = clip_norm;
                    }
                }
                _ => return Err(unknown("section", &section, vec!["model", "train", "zero"])),
            }
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        let Self { model, train, .. } = self;
        let positive = [
            ("model.context", model.context),
            ("model.dim", model.dim),
            ("model.heads", model.heads),
            ("model.layers", model.layers),
            ("train.ranks", train.ranks),
            ("train.steps", train.steps),
            ("train.batch", train.batch),
            ("train.held_out_rows", train.held_out_rows),
        ];
        for (name, value) in positive {
            ensure!(value > 0, "`{name}` must be at least 1");
        }
        ensure!(
            model.dim.is_multiple_of(model.heads),
            "`model.dim` = {} is not a multiple of `model.heads` = {}",
            model.dim,
            model.heads
        );
        let bounded = [("train.ranks", train.ranks, MOST_RANKS), ("train.steps", train.steps, MOST_STEPS)];
        for (name, value, most) in bounded {
            ensure!(value <= most, "`{name}` = {value} is more than {most}");
        }
        let parameters = model.parameters();
        ensure!(
            parameters <= MOST_PARAMETERS,
            "the model would have {parameters} parameters, more than the {MOST_PARAMETERS} that this example is for; \
             lower `model.dim` or `model.layers`"
        );
        ensure!(model.vocab == 256, "`model.vocab` must be 256: tokens are bytes");
        ensure!(train.lr.is_finite() && train.lr > 0.0, "`train.lr` must be positive, not {}", train.lr);
        ensure!(
            train.weight_decay.is_finite() && train.weight_decay >= 0.0,
            "`train.weight_decay` must not be negative, but is {}",
            train.weight_decay
        );
        self.zero.validate()?;
        Ok(())
    }
}

/// Beyond this, memory would run out before anything could be said about it.
const MOST_PARAMETERS: u128 = 20_000_000_000;

/// More would be a mistake.
const MOST_RANKS: usize = 1024;

/// The loss of every step is kept for the curve.
const MOST_STEPS: usize = 1_000_000_000;

/// Lays a section of a file over the defaults.
fn merge<T: Serialize + for<'de> Deserialize<'de>>(
    section: &str,
    defaults: &T,
    table: toml::Table,
) -> Result<T> {
    let mut merged = toml::Table::try_from(defaults)?;
    for (key, value) in table {
        if !merged.contains_key(&key) {
            return Err(unknown("key", &key, merged.keys().map(String::as_str).collect()))
                .context(format!("[{section}]"));
        }
        merged.insert(key, value);
    }
    merged
        .try_into()
        .map_err(|error: toml::de::Error| anyhow!("{}", error.message()))
        .context(format!("[{section}]"))
}

fn unknown(what: &str, name: &str, known: Vec<&str>) -> anyhow::Error {
    match zero_burn::nearest(name, known.iter().copied()) {
        Some(nearest) => anyhow!("unknown {what} `{name}`; did you mean `{nearest}`?"),
        None => anyhow!("unknown {what} `{name}`; there are {}", known.join(", ")),
    }
}

/// The folder of this workspace: `cargo run` says where the package is, a bare binary remembers it.
fn workspace() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.ancestors().nth(2).map_or_else(|| PathBuf::from("."), PathBuf::from)
}
