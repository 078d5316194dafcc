//! A `ds_config.json` of DeepSpeed in place of the run's own settings.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use zero_burn::{
    BatchError, DeepSpeedError, DeepSpeedGiven, DeepSpeedImport, DeepSpeedReport, DeepSpeedScheduler,
    Offload, WorldSize, ZeroConfig,
};

use crate::learner::{BETAS, EPSILON};
use crate::rates::Rates;
use crate::settings::Settings;

/// What DeepSpeed does not know, of `[zero]`: [`DeepSpeedFile::follow`] keeps it.
const KEPT: [&str; 8] = [
    "alignment",
    "device_transport",
    "seed",
    "deadline_seconds",
    "reduce_gradients",
    "offload.buffer_bytes",
    "offload.delayed_update",
    "offload.exact_steps",
];

/// The file, as it was read.
#[derive(Clone, Debug)]
pub struct DeepSpeedFile {
    path: PathBuf,
    text: String,
}

impl DeepSpeedFile {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { path: path.to_owned(), text })
    }

    /// What a run of `world` ranks does by `settings` and this file, with what became of each of its keys.
    ///
    /// The file decides about ZeRO, batch, optimizer and learning rates; `settings` answer what it leaves `"auto"`, and
    /// keep what it does not know. With neither an optimizer nor a scheduler in it, both are those of `settings`; with an
    /// optimizer alone, the learning rate is constant, as DeepSpeed's is.
    ///
    /// # Errors
    ///
    /// When the file cannot be followed, with all reasons, or when a flag or a key of the TOML file says something else,
    /// naming both.
    pub fn follow(&self, settings: &Settings, world: WorldSize) -> Result<(Settings, DeepSpeedReport)> {
        let path = self.path.display();
        let Settings { model, train, zero, written, .. } = settings;
        let given = DeepSpeedGiven {
            world_size: world,
            // Defaults are no wish: what the file says goes before.
            train_batch_size: written.contains_key("train.batch").then_some(train.batch),
            micro_batch_size_per_rank: None,
            accumulation_steps: written.contains_key("train.accumulation").then_some(train.accumulation),
            clip_norm: Some(zero.clip_norm.unwrap_or(0.0)),
            compute: Some(zero.precision.compute),
            lr: Some(train.lr),
            betas: Some(BETAS),
            eps: Some(EPSILON),
            weight_decay: Some(train.weight_decay),
            warmup_steps: Some(train.warmup as u64),
            total_steps: Some(train.steps as u64),
            hidden_size: Some(model.dim),
        };
        let read = |given| ZeroConfig::from_deepspeed(&self.text, given);
        let import = match read(&given) {
            Err(DeepSpeedError::Refused { batch: Some(BatchError::Unknown), .. }) => {
                // Nobody says how many rows there are.
                let rows = (train.batch / train.accumulation / world.get()).max(1);
                read(&DeepSpeedGiven { micro_batch_size_per_rank: Some(rows), ..given })
            }
            other => other,
        };
        // As text: some of these errors tell their source themselves.
        let import = import.map_err(|error| match error {
            DeepSpeedError::Refused { batch: Some(_), .. } => {
                anyhow!("{path}: {error}{}", settings.words_on_batch())
            }
            error => anyhow!("{path}: {error}"),
        })?;
        self.refuse_contradictions(settings, &import)?;
        let DeepSpeedImport { config, batch, optimizer, scheduler, report } = import;
        let mut settings = settings.clone();
        settings.zero = ZeroConfig {
            alignment: settings.zero.alignment,
            device_transport: settings.zero.device_transport,
            seed: settings.zero.seed,
            deadline_seconds: settings.zero.deadline_seconds,
            reduce_gradients: settings.zero.reduce_gradients,
            offload: Offload {
                buffer_bytes: settings.zero.offload.buffer_bytes,
                delayed_update: settings.zero.offload.delayed_update,
                exact_steps: settings.zero.offload.exact_steps,
                ..config.offload
            },
            ..config
        };
        settings.train.batch = batch.train_batch_size;
        settings.train.accumulation = batch.accumulation_steps;
        settings.optimizer = optimizer.unwrap_or(settings.optimizer);
        settings.rates = match (scheduler, optimizer) {
            (Some(scheduler), _) => Rates::DeepSpeed(scheduler),
            (None, Some(optimizer)) => Rates::Constant(optimizer.lr()),
            (None, None) => settings.rates,
        };
        settings.deepspeed = None;
        settings.validate().with_context(|| format!("{path} cannot work"))?;
        Ok((settings, report))
    }

    /// Refuses what somebody wrote that the file says otherwise; it would be of no effect.
    fn refuse_contradictions(&self, settings: &Settings, import: &DeepSpeedImport) -> Result<()> {
        let mut contradictions = String::new();
        let mut compare = |key: &str, ours: Option<String>, theirs: Option<String>, source: &str| {
            if let Some(words) = settings.written.get(key)
                && theirs != ours
            {
                let theirs = theirs.as_deref().unwrap_or("not set");
                contradictions += &format!("\n  {words}, but the file makes it {theirs} ({source})");
            }
        };
        let (train, batch) = (&settings.train, &import.batch);
        for (key, ours, theirs, source) in [
            ("train.batch", train.batch, batch.train_batch_size, "train_batch_size"),
            (
                "train.accumulation",
                train.accumulation,
                batch.accumulation_steps,
                "gradient_accumulation_steps",
            ),
        ] {
            compare(key, Some(ours.to_string()), Some(theirs.to_string()), source);
        }
        let (rate, warmup) = rate_and_warmup(import);
        if let Some((rate, source)) = rate {
            compare("train.lr", Some(train.lr.to_string()), Some(rate.to_string()), source);
            // DeepSpeed takes two steps at least.
            let ours = if warmup.is_some() { train.warmup.max(2) } else { train.warmup };
            let theirs = warmup.map(|steps| steps.max(2).to_string());
            compare("train.warmup", Some(ours.to_string()), theirs, "scheduler.params.warmup_num_steps");
        }
        if let Some(optimizer) = &import.optimizer {
            let (ours, theirs) = (train.weight_decay.to_string(), optimizer.weight_decay().to_string());
            compare("train.weight_decay", Some(ours), Some(theirs), "optimizer.params.weight_decay");
        }
        let entries = |config: &ZeroConfig| config.entries().collect::<BTreeMap<_, _>>();
        let (ours, theirs) = (entries(&settings.zero), entries(&import.config));
        let keys = settings.written.keys().filter_map(|key| key.strip_prefix("zero."));
        for key in keys.filter(|key| !KEPT.contains(key)) {
            let (ours, theirs) = (ours.get(key).cloned(), theirs.get(key).cloned());
            let (theirs, source) = match key {
                "persistence_threshold" | "lookahead_bytes" | "live_bytes" | "reuse_bytes"
                    if !import.config.stage.shards_parameters() =>
                {
                    // 0 asks for nothing, and gets it.
                    let theirs = ours.clone().filter(|ours| ours == "0");
                    (theirs, "zero_optimization.stage is not 3, where it has an effect")
                }
                "stage" => (theirs, "zero_optimization.stage"),
                "precision.compute" => (theirs, "fp16.enabled and bf16.enabled"),
                "clip_norm" => (theirs, "gradient_clipping"),
                "loss_scale.factor" | "loss_scale.at_min" => (theirs, "DeepSpeed has no key for it"),
                _ => (theirs, "docs/deepspeed.md has its key"),
            };
            compare(&format!("zero.{key}"), ours, theirs, source);
        }
        ensure!(
            contradictions.is_empty(),
            "{} is contradicted; leave out one of each two, or write \"auto\" in the file:{contradictions}",
            self.path.display()
        );
        Ok(())
    }
}

/// The highest learning rate, with its key, and the steps up to it; no rate if the file has none.
fn rate_and_warmup(import: &DeepSpeedImport) -> (Option<(f64, &'static str)>, Option<u64>) {
    let optimizer = import.optimizer.map(|optimizer| (optimizer.lr(), "optimizer.params.lr"));
    match import.scheduler {
        None => (optimizer, None),
        Some(
            DeepSpeedScheduler::WarmupLr { max_lr, warmup, .. }
            | DeepSpeedScheduler::WarmupDecayLr { max_lr, warmup, .. },
        ) => (Some((max_lr, "scheduler.params.warmup_max_lr")), Some(warmup.steps)),
        Some(DeepSpeedScheduler::WarmupCosineLr { lr, warmup, .. }) => {
            (Some((lr, "optimizer.params.lr")), Some(warmup.steps))
        }
        Some(DeepSpeedScheduler::OneCycle { max_lr, .. }) => {
            (Some((max_lr, "scheduler.params.cycle_max_lr")), None)
        }
        Some(DeepSpeedScheduler::LrRangeTest { min_lr, .. }) => {
            (Some((min_lr, "scheduler.params.lr_range_test_min_lr")), None)
        }
    }
}
