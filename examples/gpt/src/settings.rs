//! What a run does: embedded defaults, a TOML file over them, flags over both.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
use zero_burn::{
    DType, DeepSpeedAdam, DeepSpeedOptimizer, DeviceKind, LossScaling, Offload, Stage, WorldSize, ZeroConfig,
};

use crate::deepspeed::DeepSpeedFile;
use crate::flags::{Flags, Kind};
use crate::learner::{BETAS, EPSILON};
use crate::model::{Gpt, GptConfig};
use crate::rates::Rates;
use crate::saving::{CheckpointSettings, Resume};
use crate::train_config::TrainConfig;
use crate::update;

/// Everything a run needs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model's shape.
    pub model: GptConfig,
    /// How to train.
    pub train: TrainConfig,
    /// The engine's configuration.
    pub zero: ZeroConfig,
    /// What to compute on.
    pub device: DeviceKind,
    /// Where the text lies.
    pub corpus: Vec<PathBuf>,
    /// The optimizer: AdamW with the numbers of `train`, unless a file of DeepSpeed has another.
    pub optimizer: DeepSpeedOptimizer,
    /// The learning rates.
    pub rates: Rates,
    /// A file of DeepSpeed that has not been [followed](DeepSpeedFile::follow) yet, because how depends on the world.
    pub deepspeed: Option<DeepSpeedFile>,
    /// Where metrics go.
    pub metrics: Option<PathBuf>,
    /// Where the trace goes.
    pub trace: Option<PathBuf>,
    /// Where checkpoints go.
    pub checkpoints: Option<CheckpointSettings>,
    /// Burn alone.
    pub plain: bool,
    /// The number of ranks, if the command line gives it.
    pub ranks: Option<usize>,
    /// Each rank is a process.
    pub processes: bool,
    /// What somebody wrote, by key, such as `train.batch`: in which words, and where.
    pub(crate) written: BTreeMap<String, String>,
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
            device: flags.device.unwrap_or(DeviceKind::Flex),
            corpus: vec![workspace()],
            optimizer: adamw(&TrainConfig::default()),
            rates: Rates::Cosine,
            deepspeed: flags.deepspeed_config.as_deref().map(DeepSpeedFile::read).transpose()?,
            metrics: flags.metrics,
            trace: flags.trace,
            checkpoints: flags.checkpoint_dir.map(|folder| CheckpointSettings {
                folder,
                every: flags.save_every,
                keep: flags.keep,
                resume: match flags.resume {
                    None => Resume::Never,
                    Some(None) => Resume::Newest,
                    Some(Some(step)) => Resume::Step(step),
                },
            }),
            plain: flags.plain,
            ranks: flags.ranks,
            processes: flags.processes,
            written: BTreeMap::new(),
        };
        if let Some(path) = &flags.config {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let name = path.display();
            settings.apply_toml(&text, &name.to_string()).with_context(|| format!("{name} cannot work"))?;
        }
        if let Some(ranks) = flags.ranks {
            settings.train.ranks = ranks;
        }
        if let Some(stage) = flags.stage {
            settings.zero.stage = Stage::try_from(stage)?;
            settings.note("zero.stage", format!("--stage {stage}"));
        }
        if let Some(precision) = flags.precision {
            settings.zero.precision.compute = precision;
            settings.note("zero.precision.compute", format!("--precision {precision}"));
        }
        for (kind, place) in flags.offload {
            let table = format!("zero.offload.{kind}");
            let path = place.path.as_ref().map(|path| path.display().to_string());
            let mut words = format!("--offload {kind}={}", place.tier);
            if let Some(path) = path {
                words += &format!(":{path}");
                settings.note(&format!("{table}.path"), words.clone());
            }
            settings.note(&format!("{table}.tier"), words);
            let offload = &mut settings.zero.offload;
            let placement = match kind {
                Kind::Optimizer => &mut offload.optimizer,
                Kind::Gradients => &mut offload.gradients,
                Kind::Parameters => &mut offload.parameters,
            };
            *placement = place;
        }
        if flags.delayed_update {
            settings.zero.offload.delayed_update = true;
            settings.note("zero.offload.delayed_update", String::from("--delayed-update"));
        }
        if let Some(batch) = flags.batch {
            settings.train.batch = batch;
            settings.note("train.batch", format!("--batch {batch}"));
        }
        if let Some(accumulation) = flags.accumulation {
            settings.train.accumulation = accumulation;
            settings.note("train.accumulation", format!("--accumulation {accumulation}"));
        }
        if flags.recompute {
            settings.train.recompute = true;
            settings.note("train.recompute", String::from("--recompute"));
        }
        if let Some(lr) = flags.lr {
            settings.train.lr = lr;
            settings.note("train.lr", format!("--lr {lr}"));
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
        settings.optimizer = adamw(&settings.train);
        settings.validate()?;
        Ok(settings)
    }

    /// The model on `device`.
    pub fn build(&self, device: &Device) -> Gpt {
        self.model.init(device).with_recompute(self.train.recompute)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> WorldSize {
        WorldSize::new(self.train.ranks).unwrap_or(WorldSize::ONE)
    }

    /// The learning rate of a step, counted from 0; steps that were skipped do not count.
    pub fn lr(&self, step: u64) -> f64 {
        self.rates.at(step, &self.train)
    }

    /// What somebody wrote about the batch, as the last line of a message.
    pub(crate) fn words_on_batch(&self) -> String {
        let words = ["train.batch", "train.accumulation"].map(|key| self.written.get(key));
        let words: Vec<_> = words.into_iter().flatten().map(String::as_str).collect();
        if words.is_empty() { String::new() } else { format!("\n  beside the file: {}", words.join(", ")) }
    }

    fn note(&mut self, key: &str, words: String) {
        self.written.insert(key.to_owned(), words);
    }

    /// Notes every key of a section, those of its tables by their path.
    fn note_table(&mut self, section: &str, table: &toml::Table, file: &str) {
        for (key, value) in table {
            let key = format!("{section}.{key}");
            match value {
                toml::Value::Table(table) => self.note_table(&key, table, file),
                _ => self.note(&key, format!("`{key} = {value}` in {file}")),
            }
        }
    }

    fn apply_toml(&mut self, text: &str, file: &str) -> Result<()> {
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
            self.note_table(&section, &table, file);
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

    /// Whether all of it can work.
    pub(crate) fn validate(&self) -> Result<()> {
        let Self { model, train, zero, .. } = self;
        let positive = [
            ("model.context", model.context),
            ("model.dim", model.dim),
            ("model.heads", model.heads),
            ("model.layers", model.layers),
            ("train.ranks", train.ranks),
            ("train.steps", train.steps),
            ("train.batch", train.batch),
            ("train.accumulation", train.accumulation),
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
        let bounded = [
            ("train.ranks", train.ranks, MOST_RANKS),
            ("train.steps", train.steps, MOST_STEPS),
            ("train.batch", train.batch, MOST_ROWS),
            ("train.accumulation", train.accumulation, MOST_BACKWARDS),
        ];
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
        // Here, before there are ranks that would each fail.
        update::fused(&self.optimizer)?;
        zero.validate()?;
        let is_apart = self.trace.is_none() || self.trace != self.metrics;
        ensure!(is_apart, "--trace and --metrics name one file; the trace would replace the metrics");
        if self.plain {
            if let DeepSpeedOptimizer::AdamW(numbers) = &self.optimizer {
                update::adamw(numbers)?;
            }
            ensure!(
                zero.offload == Offload::default(),
                "--plain, which trains with Burn alone, keeps everything in memory; leave out what offloads"
            );
            let compute = zero.precision.compute;
            ensure!(
                compute == DType::F32,
                "--plain, which trains with Burn alone, computes in f32, not in {compute}"
            );
            let precision = zero.precision;
            for (key, is_plain) in [
                ("precision.reduce", precision.reduce() == DType::F32),
                ("precision.accumulate", precision.accumulate == DType::F32),
                ("precision.optimizer_state", precision.optimizer_state == DType::F32),
                ("loss_scale", zero.loss_scaling() == LossScaling::NONE),
            ] {
                ensure!(
                    is_plain,
                    "--plain, which trains with Burn alone, does not do what `zero.{key}` asks for"
                );
            }
            ensure!(
                train.accumulation == 1,
                "--plain, which trains with Burn alone, takes one backward per step, not `train.accumulation` = {}",
                train.accumulation
            );
        }
        Ok(())
    }
}

/// Beyond this, memory would run out before anything could be said about it.
const MOST_PARAMETERS: u128 = 20_000_000_000;

/// More would be a mistake.
const MOST_RANKS: usize = 1024;

/// So many in a step would be a mistake, too.
const MOST_BACKWARDS: usize = 1_000_000;

/// A rank holds all its rows of a step.
const MOST_ROWS: usize = 1_000_000;

/// The loss of every step is kept for the curve.
const MOST_STEPS: usize = 1_000_000_000;

/// AdamW by the numbers of `[train]`.
fn adamw(train: &TrainConfig) -> DeepSpeedOptimizer {
    let TrainConfig { lr, weight_decay, .. } = *train;
    DeepSpeedOptimizer::AdamW(DeepSpeedAdam { lr, betas: BETAS, eps: EPSILON, weight_decay })
}

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
