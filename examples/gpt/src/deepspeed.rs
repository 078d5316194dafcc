//! A `ds_config.json` of DeepSpeed in place of the run's own settings.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use zero_burn::{
    DeepSpeedError, DeepSpeedGiven, DeepSpeedImport, DeepSpeedOptimizer, DeepSpeedReport, DeepSpeedScheduler,
    WorldSize, ZeroConfig,
};

use crate::learner::{BETAS, EPSILON};
use crate::rates::Rates;
use crate::settings::Settings;

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
        let [train_batch_size, micro_batch_size, accumulation_steps] = self.batch(settings, world).map(Some);
        let Settings { model, train, zero, .. } = settings;
        let given = DeepSpeedGiven {
            world_size: world,
            train_batch_size,
            micro_batch_size_per_rank: micro_batch_size,
            accumulation_steps,
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
        // As text: some of these errors tell their source themselves.
        let import = ZeroConfig::from_deepspeed(&self.text, &given).map_err(|error| match error {
            DeepSpeedError::Batch(error) => anyhow!("{path}: {error}{}", settings.words_on_batch()),
            error => anyhow!("{path}: {error}"),
        })?;
        self.refuse_contradictions(settings, &import)?;
        let DeepSpeedImport { config, batch, optimizer, scheduler, report } = import;
        let mut settings = settings.clone();
        settings.zero = ZeroConfig {
            alignment: settings.zero.alignment,
            seed: settings.zero.seed,
            deadline_seconds: settings.zero.deadline_seconds,
            ..config
        };
        settings.train.batch = batch.train_batch_size;
        settings.train.accumulation = batch.accumulation_steps;
        settings.optimizer = optimizer;
        settings.rates = match (scheduler, optimizer) {
            (Some(scheduler), _) => Rates::DeepSpeed(scheduler),
            (None, Some(optimizer)) => Rates::Constant(optimizer.lr()),
            (None, None) => settings.rates,
        };
        settings.deepspeed = None;
        settings.validate().with_context(|| format!("{path} cannot work"))?;
        Ok((settings, report))
    }

    /// Rows per step, rows per rank and backward, and backwards per step, for those of the three that the file leaves to
    /// us: the others, and what somebody wrote, decide before defaults do.
    fn batch(&self, settings: &Settings, world: WorldSize) -> [usize; 3] {
        // What else is wrong with the file, the import says.
        let file: serde_json::Value = serde_json::from_str(&self.text).unwrap_or_default();
        let known = |key: &str, setting: &str, value: usize| {
            let here = file.get(key).and_then(serde_json::Value::as_f64).map(|number| number as usize);
            here.or_else(|| settings.written.contains_key(setting).then_some(value))
        };
        let (train, world) = (&settings.train, world.get());
        let batch = known("train_batch_size", "train.batch", train.batch);
        let micro = known("train_micro_batch_size_per_gpu", "", 0);
        let steps = known("gradient_accumulation_steps", "train.accumulation", train.accumulation);
        let part = |batch: usize, of: usize| (batch / of.saturating_mul(world).max(1)).max(1);
        let steps = steps
            .or_else(|| batch.zip(micro).map(|(batch, micro)| part(batch, micro)))
            .unwrap_or(train.accumulation);
        let micro = micro.unwrap_or_else(|| part(batch.unwrap_or(train.batch), steps));
        let batch = batch.unwrap_or_else(|| micro.saturating_mul(steps).saturating_mul(world));
        [batch, micro, steps]
    }

    /// Refuses what somebody wrote that the file says otherwise; it would be of no effect.
    fn refuse_contradictions(&self, settings: &Settings, import: &DeepSpeedImport) -> Result<()> {
        let mut contradictions = String::new();
        let mut compare = |key: &str, ours: String, theirs: Option<String>, source: &str| {
            if let Some(words) = settings.written.get(key)
                && theirs.as_ref() != Some(&ours)
            {
                let theirs = theirs.as_deref().unwrap_or("not set");
                contradictions += &format!("\n  {words}, but the file makes it {theirs} ({source})");
            }
        };
        let (train, batch) = (&settings.train, &import.batch);
        let theirs = Some(batch.train_batch_size.to_string());
        compare("train.batch", train.batch.to_string(), theirs, "train_batch_size");
        let theirs = Some(batch.accumulation_steps.to_string());
        compare("train.accumulation", train.accumulation.to_string(), theirs, "gradient_accumulation_steps");
        let (rate, warmup) = rate_and_warmup(import);
        if let Some((rate, source)) = rate {
            compare("train.lr", train.lr.to_string(), Some(rate.to_string()), source);
            // DeepSpeed takes two steps at least.
            let ours = if warmup.is_some() { train.warmup.max(2) } else { train.warmup };
            let theirs = warmup.map(|steps| steps.to_string());
            compare("train.warmup", ours.to_string(), theirs, "scheduler.params.warmup_num_steps");
        }
        if let Some(optimizer) = &import.optimizer {
            let (ours, theirs) = (train.weight_decay.to_string(), weight_decay(optimizer).to_string());
            compare("train.weight_decay", ours, Some(theirs), "optimizer.params.weight_decay");
        }
        let theirs = keys(&import.config);
        for (key, ours) in keys(&settings.zero) {
            let source = match key.as_str() {
                // DeepSpeed does not know these.
                "alignment" | "seed" | "deadline_seconds" => continue,
                "stage" => "zero_optimization.stage",
                "precision.compute" => "fp16.enabled and bf16.enabled",
                "clip_norm" => "gradient_clipping",
                _ => "docs/deepspeed.md has its key",
            };
            compare(&format!("zero.{key}"), ours, theirs.get(&key).cloned(), source);
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

fn weight_decay(optimizer: &DeepSpeedOptimizer) -> f64 {
    match optimizer {
        DeepSpeedOptimizer::Adam(adam) | DeepSpeedOptimizer::AdamW(adam) => adam.weight_decay,
        DeepSpeedOptimizer::Lion { weight_decay, .. }
        | DeepSpeedOptimizer::Adagrad { weight_decay, .. }
        | DeepSpeedOptimizer::Sgd { weight_decay, .. } => *weight_decay,
    }
}

/// The values of a configuration by key, as text.
fn keys(config: &ZeroConfig) -> BTreeMap<String, String> {
    let text = config.to_toml();
    let lines = text.lines().filter_map(|line| line.split_once(" = "));
    lines.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}
