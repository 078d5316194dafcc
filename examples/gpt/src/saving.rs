//! Checkpoints of a run.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::json;
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
    /// Whether the run goes on from the newest, if there is one.
    pub resume: bool,
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct DataPosition {
    /// Steps, those that were skipped included.
    steps: usize,
    seed: u64,
    batch: usize,
    corpus_bytes: usize,
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
                corpus_bytes: corpus.train_bytes(),
            },
            registry: Registry { model: Some(model), config, ..Registry::default() },
            saved: 0,
        })
    }

    /// Goes on from the newest checkpoint, if that is wanted and there is one: gives the steps taken, and what to tell.
    pub(crate) fn resume(&mut self, optimizer: &mut ZeroOptimizer<Fused>) -> Result<(usize, Option<String>)> {
        if !self.settings.resume {
            return Ok((0, None));
        }
        let folder = self.settings.folder.display();
        let Some(newest) = self.checkpoints.newest()? else {
            return Ok((0, Some(format!("no checkpoint in {folder}: training from the beginning"))));
        };
        let loaded = self.checkpoints.load(optimizer, Some(newest), &LoadOptions::default())?;
        let saved: DataPosition = serde_json::from_value(loaded.notes.data)
            .map_err(|error| anyhow!("{} is not of this program: {error}", loaded.place))?;
        let now = DataPosition { steps: saved.steps, ..self.data };
        let rows =
            if saved == now { "" } else { "; seed, batch or corpus have changed, and other rows follow" };
        (self.data, self.saved) = (now, saved.steps);
        let told = format!("resuming after step {} from {}{rows}", saved.steps, loaded.place);
        Ok((saved.steps, Some(told)))
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
