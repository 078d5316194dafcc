//! Checkpoints of a run.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zero_burn::{
    Checkpoints, Fused, LoadOptions, LocalStorage, ModelIdentity, Notes, Registry, Retention, SaverOptions,
    Zero, ZeroOptimizer,
};

use crate::corpus::Corpus;
use crate::settings::Settings;

/// Where checkpoints go, and how often.
#[derive(Clone, Debug)]
pub struct CheckpointSettings {
    /// The folder.
    pub folder: PathBuf,
    /// Steps from one to the next; `None` for one at the end alone.
    pub every: Option<NonZeroUsize>,
    /// How many are kept; `None` for all.
    pub keep: Option<NonZeroUsize>,
    /// What the run goes on from.
    pub resume: Resume,
}

/// What a run goes on from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Nothing.
    #[default]
    Never,
    /// The newest checkpoint, if there is one.
    Newest,
    /// The checkpoint of this step.
    Step(u64),
}

impl CheckpointSettings {
    /// Makes the folder, and tries whether something can be written there.
    ///
    /// # Errors
    ///
    /// When it cannot.
    pub fn prepare(&self) -> Result<()> {
        let folder = &self.folder;
        let made = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
        made.with_context(|| format!("cannot write checkpoints to {}", folder.display()))?;
        Ok(())
    }
}

/// One rank's part in saving a run.
#[derive(Debug)]
pub(crate) struct Saving {
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    data: DataPosition,
    registry: Registry,
    /// Steps of the run when it was saved last.
    saved: usize,
}

/// How far the data has been read, and what decides which rows come next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DataPosition {
    /// Steps, those that were skipped included.
    steps: usize,
    seed: u64,
    batch: usize,
    /// The hash of the text.
    corpus: String,
}

impl Saving {
    pub(crate) fn new(
        settings: &Settings,
        checkpoints: &CheckpointSettings,
        zero: &Zero,
        corpus: &Corpus,
    ) -> Result<Self> {
        let retention = Retention { last: checkpoints.keep, every: None };
        let storage = Arc::new(LocalStorage::new(&checkpoints.folder));
        let options = SaverOptions { retention, ..SaverOptions::default() };
        let model = ModelIdentity { name: String::from("gpt"), version: env!("CARGO_PKG_VERSION").into() };
        let config = json!({
            "model": settings.model,
            "train": settings.train,
            "zero": toml::from_str::<toml::Table>(&settings.zero.to_toml())?,
        });
        Ok(Self {
            checkpoints: zero.checkpoints(storage, options)?,
            settings: checkpoints.clone(),
            data: DataPosition {
                steps: 0,
                seed: settings.zero.seed,
                batch: settings.train.batch,
                corpus: corpus.digest(),
            },
            registry: Registry { model: Some(model), config, ..Registry::default() },
            saved: 0,
        })
    }

    /// Goes on from a checkpoint, if that is wanted: gives the steps taken, and what to tell.
    pub(crate) fn resume(&mut self, optimizer: &mut ZeroOptimizer<Fused>) -> Result<(usize, Vec<String>)> {
        let folder = self.settings.folder.display();
        let step = match (self.settings.resume, self.checkpoints.newest()?) {
            (Resume::Step(step), _) => step,
            (Resume::Newest, Some(step)) => step,
            (Resume::Newest, None) => {
                return Ok((0, vec![format!("no checkpoint in {folder}: training from the beginning")]));
            }
            (Resume::Never, None) => return Ok((0, Vec::new())),
            (Resume::Never, Some(step)) => bail!(
                "{folder} has a checkpoint of step {step} of another run: go on from it with --resume, or name another \
                 folder"
            ),
        };
        let loaded = self.checkpoints.load(optimizer, Some(step), &LoadOptions::default())?;
        let (place, config) = (loaded.place, loaded.notes.registry.config);
        let saved: DataPosition = serde_json::from_value(loaded.notes.data)
            .map_err(|error| anyhow!("{place} is not of this program: {error}"))?;
        ensure!(
            config["model"] == self.registry.config["model"],
            "{place} is of the model {}, not of {}; write that into [model]",
            config["model"],
            self.registry.config["model"]
        );
        let mut told = vec![format!("resuming after step {} from {place}", saved.steps)];
        let now = DataPosition { steps: saved.steps, ..self.data.clone() };
        if saved != now {
            told.push(String::from("seed, batch or corpus have changed: other rows follow"));
        }
        for section in ["train", "zero"] {
            let changed = changes(section, &config[section], &self.registry.config[section]);
            told.extend(changed.into_iter().map(|change| format!("changed since then: {change}")));
        }
        (self.data, self.saved) = (now, saved.steps);
        Ok((saved.steps, told))
    }

    /// Saves beside training, if it is time.
    pub(crate) fn after_step(&mut self, steps: usize, optimizer: &mut ZeroOptimizer<Fused>) -> Result<()> {
        if self.settings.every.is_some_and(|every| steps.is_multiple_of(every.get())) {
            let notes = self.notes(steps);
            self.checkpoints.save_async(optimizer, &notes)?;
        }
        Ok(())
    }

    /// Saves what is not saved, and waits until all is there.
    pub(crate) fn finish(&mut self, steps: usize, optimizer: &mut ZeroOptimizer<Fused>) -> Result<()> {
        // That an earlier one failed is no reason to lose the last.
        let earlier = self.checkpoints.finish();
        if steps != self.saved || earlier.is_err() {
            let notes = self.notes(steps);
            self.checkpoints.save(optimizer, &notes)?;
        }
        earlier?;
        Ok(())
    }

    fn notes(&mut self, steps: usize) -> Notes {
        self.saved = steps;
        self.data.steps = steps;
        let data = json!(self.data);
        Notes { data, registry: self.registry.clone(), ..Notes::default() }
    }
}

/// Keys whose values are others, with both.
fn changes(path: &str, before: &Value, now: &Value) -> Vec<String> {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            let keys: BTreeSet<_> = before.keys().chain(now.keys()).collect();
            let of = |table: &Map<String, Value>, key: &str| table.get(key).cloned().unwrap_or_default();
            let inner = |key: &String| changes(&format!("{path}.{key}"), &of(before, key), &of(now, key));
            keys.into_iter().flat_map(inner).collect()
        }
        _ if before == now => Vec::new(),
        _ => vec![format!("{path} was {before}, is {now}")],
    }
}
