//! Checkpoints of a model and its optimizer.

use std::sync::Arc;

use serde_json::{Value, json};
use zero_checkpoint::{
    Checkpoint, CheckpointError, Coordinator, LoadOptions, LoadReport, Pending, Registry, Saved, Saver,
    SaverOptions, Storage, WeightLayout,
};
use zero_comm::{Communicator, CommunicatorExt};
use zero_core::{LossScale, ParameterIndex, Rank};

use crate::ZeroError;
use crate::engine::{Engine, lock};
use crate::error::During;
use crate::optimizer::ZeroOptimizer;
use crate::ranks::Ranks;
use crate::rule::ShardOptimizer;
use crate::slot::Slot;
use crate::{contents, restore};

/// Saves and loads checkpoints of one engine's model and optimizer; made by
/// [`Zero::checkpoints`](crate::Zero::checkpoints).
///
/// Every rank writes what it holds, wherever that is, and reads what it needs: a checkpoint of any world size, stage and
/// tier can be taken up at any other. It is there as a whole or not at all.
///
/// ```
/// # use std::sync::Arc;
/// # use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
/// # use zero_burn::{Adam, Fused, LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
/// use zero_burn::{LoadOptions, MemoryStorage, Notes, SaverOptions, Storage};
///
/// let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new()); // or `LocalStorage`, a folder
/// # let run = |size, resume: bool| LocalWorld::new(WorldSize::new(size).unwrap()).run(|comm| -> Result<f64, ZeroError> {
/// let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
/// let mut model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
/// let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
/// let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
/// # if resume {
/// let loaded = checkpoints.load(&mut optimizer, None, &LoadOptions::default())?; // the newest
/// assert_eq!((loaded.step, optimizer.steps()), (1, 1));
/// # }
/// # zero.backward(model.forward(Tensor::<2>::ones([2, 8], zero.device())).mean())?;
/// let outcome = optimizer.step(1e-3, &mut model)?;
/// checkpoints.save(&mut optimizer, &Notes::default())?;
/// # Ok(outcome.loss)
/// # }).unwrap();
/// # run(2, false);
/// # run(3, true);
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    slot: Arc<Slot>,
    storage: Arc<dyn Storage>,
    /// All ranks; the saver uses it beside training, and nothing else does.
    group: Arc<Ranks>,
    /// The ranks of this host.
    host: Ranks,
    saver: Saver,
    /// Where the checkpoint is that training went on from.
    parent: Option<String>,
}

/// What a checkpoint holds beside parameters, optimizer and loss scale: what training needs to go on, in whatever form it
/// likes. JSON has no numbers that are not finite.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Notes {
    /// Of the learning rate.
    pub schedule: Value,
    /// Of random numbers that all ranks draw alike.
    pub rng: Value,
    /// How far the data has been read.
    pub data: Value,
    /// What this rank has for itself. It is loaded in a world of the same size alone.
    pub rank: Value,
    /// For who looks for a checkpoint later. Versions and the parent are filled in where they are missing.
    pub registry: Registry,
}

/// What was loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The number of steps taken.
    pub step: u64,
    /// Where the checkpoint is.
    pub place: String,
    /// What it was saved with.
    pub notes: Notes,
    /// What became of each parameter, in the order of [`Zero::layout`](crate::Zero::layout).
    pub report: LoadReport,
}

impl Checkpoints {
    pub(crate) fn new(
        slot: Arc<Slot>,
        comm: &Arc<dyn Communicator>,
        storage: Arc<dyn Storage>,
        options: SaverOptions,
    ) -> Result<Self, ZeroError> {
        let forming = || String::from("forming the group for checkpoints");
        let (rank, neighbours) = (comm.rank(), comm.ranks_of_host());
        let first = neighbours.first().copied().unwrap_or(rank).index() as u64;
        let all = comm.split(Some(0), rank.index() as u64, "checkpoints").during(forming)?;
        let host = comm.split(Some(first), rank.index() as u64, "checkpoints of a host").during(forming)?;
        // Every rank named a color, so every rank is in a group.
        let [all, host] = [all, host].map(|group| Ranks(group.unwrap_or_else(|| Arc::clone(comm))));
        let group = Arc::new(all);
        let saver = Saver::new(Arc::clone(&storage), Arc::clone(&group) as Arc<dyn Coordinator>, options)?;
        Ok(Self { slot, storage, group, host, saver, parent: None })
    }

    /// Saves, and returns when the checkpoint is there. Collective.
    ///
    /// A [delayed](crate::Offload::delayed_update) update is ended first, so that a run with other saves takes other steps. A
    /// checkpoint of the same step is replaced.
    ///
    /// # Errors
    ///
    /// [`ZeroError::ForeignOptimizer`], [`ZeroError::GradientsPending`] between a backward and its step,
    /// [`ZeroError::RunningState`], [`ZeroError::StateNotSaved`], with [`ZeroError::RefusedElsewhere`] on the other ranks;
    /// [`ZeroError::Checkpoint`], on all ranks, if storage fails, if it has a checkpoint of that step and cannot replace
    /// it at once, or if an earlier save failed and nobody has been told; those of [`ZeroOptimizer::flush`].
    pub fn save<O: ShardOptimizer>(
        &mut self,
        optimizer: &mut ZeroOptimizer<O>,
        notes: &Notes,
    ) -> Result<Saved, ZeroError> {
        let engine = self.ready(optimizer)?;
        let notes = self.completed(notes);
        let saver = &mut self.saver;
        contents::with(&engine, optimizer, notes, |contents| Ok(saver.save(contents)?))
    }

    /// Copies what is to be saved, and returns; it is written while training goes on. Collective.
    ///
    /// The copy takes as much memory as is saved, and is kept for the next save.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), and if one rank has no memory for the copy, with [`ZeroError::RefusedElsewhere`] on the
    /// others. What goes wrong later is told by the [`Pending`], or by the next call.
    pub fn save_async<O: ShardOptimizer>(
        &mut self,
        optimizer: &mut ZeroOptimizer<O>,
        notes: &Notes,
    ) -> Result<Pending, ZeroError> {
        let engine = self.ready(optimizer)?;
        let notes = self.completed(notes);
        let saver = &mut self.saver;
        let pending = contents::with(&engine, optimizer, notes, |contents| Ok(saver.save_async(contents)?));
        engine.together(pending)
    }

    /// Waits for the save that goes on beside training, if one does, and gives what it wrote.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Checkpoint`]: its error, if nobody has been told.
    pub fn finish(&mut self) -> Result<Option<Saved>, ZeroError> {
        Ok(self.saver.finish()?)
    }

    /// The step of the newest checkpoint, if there is one. Collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Checkpoint`] if storage fails or the newest is damaged; [`ZeroError::NotSharded`],
    /// [`ZeroError::Communication`].
    pub fn newest(&self) -> Result<Option<u64>, ZeroError> {
        let engine = self.slot.get()?;
        let is_root = engine.comm.rank() == Rank::ROOT;
        let found = match is_root.then(|| Checkpoint::open_latest(Arc::clone(&self.storage))) {
            Some(Ok(checkpoint)) => Ok(Some(checkpoint.manifest().step)),
            Some(Err(CheckpointError::NoCheckpoint { .. })) | None => Ok(None),
            Some(Err(error)) => Err(error),
        };
        // All ranks tell the same cause, whichever of them is heard.
        let told =
            json!({ "step": found.as_ref().ok(), "error": found.as_ref().err().map(ToString::to_string) });
        let told = is_root.then(|| told.to_string().into_bytes());
        let told = engine.comm.broadcast_bytes(told, Rank::ROOT, "the newest checkpoint");
        let told = engine.fail(told.during(|| String::from("looking for a checkpoint")))?;
        let told: Value = serde_json::from_slice(&told).unwrap_or_default();
        match (found, told["error"].as_str()) {
            (Err(error), _) => Err(error.into()),
            (Ok(_), Some(reason)) => {
                Err(CheckpointError::Elsewhere { rank: Rank::ROOT, reason: reason.to_owned() }.into())
            }
            (Ok(_), None) => Ok(told["step"].as_u64()),
        }
    }

    /// Loads the checkpoint of `step`, or the newest, into the model and its optimizer. Collective.
    ///
    /// The optimizer counts steps as when it was saved, and the loss scale goes on from there; not so with
    /// [`LoadOptions::optimizer`] off. Groups have their rates again, and keep the hyper-parameters that they were made with.
    ///
    /// Each rank reads what it holds into its shards, one buffer at a time; where others hold a shard's memory, as between
    /// ranks that are threads, into a copy.
    ///
    /// # Errors
    ///
    /// Those of [`save`](Self::save) that come before anything is written. [`ZeroError::Checkpoint`] if there is none, or
    /// if it and the model do not go together, where `options` do not allow it: then nothing has changed. If storage
    /// fails later, parameters are of two kinds, and the engine ends.
    pub fn load<O: ShardOptimizer>(
        &mut self,
        optimizer: &mut ZeroOptimizer<O>,
        step: Option<u64>,
        options: &LoadOptions,
    ) -> Result<Loaded, ZeroError> {
        let engine = self.ready(optimizer)?;
        let saved = self.saver.finish().map(drop);
        engine.together(saved.map_err(ZeroError::from))?;
        let checkpoint = Checkpoint::open_together(Arc::clone(&self.storage), step, self.group.as_ref())?;
        let report = restore::restore(&engine, optimizer, &checkpoint, options, &self.host)?;
        self.parent = Some(checkpoint.place());
        let manifest = checkpoint.manifest();
        let is_same_world = manifest.world_size() == engine.world();
        let rank = manifest.ranks.get(engine.comm.rank().index()).filter(|_| is_same_world);
        let training = manifest.training.clone();
        Ok(Loaded {
            step: manifest.step,
            place: checkpoint.place(),
            notes: Notes {
                schedule: training.schedule,
                rng: training.rng,
                data: training.data,
                rank: rank.cloned().unwrap_or_default(),
                // Those are of who saved it.
                registry: Registry {
                    parent: None,
                    frameworks: Default::default(),
                    ..manifest.registry.clone()
                },
            },
            report,
        })
    }

    /// The engine, if it and the optimizer can be saved and loaded now, on all ranks.
    fn ready<O: ShardOptimizer>(&self, optimizer: &mut ZeroOptimizer<O>) -> Result<Arc<Engine>, ZeroError> {
        let engine = self.slot.get()?;
        let ready = engine.check().and_then(|()| {
            optimizer.attend(&self.slot)?;
            engine.check_saved()?;
            engine.check_stepped()
        });
        engine.together(ready)?;
        optimizer.flush()?;
        engine.settle_renewals()?;
        Ok(engine)
    }

    fn completed(&self, notes: &Notes) -> Notes {
        let mut notes = notes.clone();
        if notes.registry.parent.is_none() {
            notes.registry.parent.clone_from(&self.parent);
        }
        let frameworks = &mut notes.registry.frameworks;
        frameworks
            .entry(env!("CARGO_PKG_NAME").to_owned())
            .or_insert_with(|| env!("CARGO_PKG_VERSION").into());
        notes
    }
}

impl Engine {
    /// How the elements of a parameter are laid out, compared with PyTorch.
    pub(crate) fn weight_layout(&self, index: ParameterIndex) -> WeightLayout {
        if lock(&self.linear)[index.index()] { WeightLayout::InOut } else { WeightLayout::Plain }
    }

    pub(crate) fn set_loss_scale(&self, scale: LossScale) {
        *lock(&self.scale) = scale;
    }

    /// Refuses a model with state that no checkpoint holds.
    fn check_saved(&self) -> Result<(), ZeroError> {
        match lock(&self.running_state).first() {
            Some(name) => Err(ZeroError::RunningState { name: name.clone() }),
            None => Ok(()),
        }
    }
}
