//! Whole models out of an engine, and into one.

use std::sync::Arc;

use burn::module::Module;
use zero_checkpoint::{LoadOptions, LoadReport, PublishedWeights, SaverOptions, Storage};
use zero_core::Rank;

use crate::checkpoints::Checkpoints;
use crate::zero::Zero;
use crate::{ZeroError, restore, stand_in};

impl Zero {
    /// The model with whole parameters, without autodiff and without this engine: to export or to serve. Local; takes
    /// the memory of the whole model, and where layers compute in 16 bits that of their copy for a moment.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], [`ZeroError::UpdatePending`], any [pending misuse](Self::check),
    /// [`ZeroError::Communication`] when another rank's shards cannot be read; [`ZeroError::MastersOnDisk`] if those are
    /// on a disk, where [`unshard_to`](Self::unshard_to) has them, and [`ZeroError::Offload`] if this rank's are, and
    /// cannot be read.
    pub fn unshard<M: Module>(&self, model: &M) -> Result<M, ZeroError> {
        let engine = self.engine()?;
        engine.check_no_update()?;
        if engine.has_distant_masters() {
            return Err(ZeroError::MastersOnDisk);
        }
        let whole = stand_in::unshard(model, &engine, |parameter| engine.master(parameter));
        engine.check()?;
        whole
    }

    /// The model with whole parameters, as [`unshard`](Self::unshard) gives it, on `root` alone. Collective; also where
    /// master weights are on a disk: then the other ranks hold one of their shards at a time for it.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], on this rank alone. [`ZeroError::NoSuchRank`], [`ZeroError::UpdatePending`], any
    /// [pending misuse](Self::check), [`ZeroError::Offload`] if a disk cannot be read, with
    /// [`ZeroError::RefusedElsewhere`] on the other ranks; [`ZeroError::RanksDiffer`] if ranks name different roots, which
    /// fails the engine, and [`ZeroError::Communication`].
    pub fn unshard_to<M: Module>(&self, model: &M, root: Rank) -> Result<Option<M>, ZeroError> {
        let engine = self.engine()?;
        engine.agree_on_root(root)?;
        if engine.has_distant_masters() {
            let masters = engine.collect_masters(root)?;
            let whole = masters.map(|masters| {
                stand_in::unshard(model, &engine, |parameter| Ok(masters[parameter.index()].clone()))
            });
            engine.check()?;
            return whole.transpose();
        }
        let whole = (engine.comm.rank() == root).then(|| self.unshard(model));
        engine.together(whole.transpose())
    }

    /// Loads weights that somebody has published as safetensors into the model: each rank reads what it holds. Collective.
    ///
    /// ```no_run
    /// # use burn::{nn::LinearConfig, tensor::Device};
    /// # use zero_burn::{LocalWorld, WorldSize, Zero, ZeroConfig, ZeroError};
    /// use zero_burn::{LoadOptions, NameMap, PublishedWeights};
    ///
    /// # LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// # let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
    /// let model = zero.shard(|device| LinearConfig::new(8, 4).init(device))?;
    /// let names: NameMap = r#"{"lm_head.weight": "weight", "lm_head.bias": "bias"}"#.parse()?;
    /// let weights = PublishedWeights::open("published", names)?; // a file, or a folder with an index
    /// zero.load_weights(&weights, &LoadOptions::default())?;
    /// # drop(model);
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    ///
    /// The `weight` of a module named `Linear` is transposed on the way. Optimizer state is left as it is: load before the first step.
    ///
    /// # Errors
    ///
    /// [`ZeroError::NotSharded`], [`ZeroError::GradientsPending`], [`ZeroError::UpdatePending`], any
    /// [pending misuse](Self::check); [`ZeroError::Checkpoint`] if weights and model do not go together, where `options` do
    /// not allow it: then nothing has changed, and the other ranks return it or [`ZeroError::RefusedElsewhere`]. If a file
    /// cannot be read later, parameters are of two kinds, and the engine ends.
    pub fn load_weights(
        &self,
        weights: &PublishedWeights,
        options: &LoadOptions,
    ) -> Result<LoadReport, ZeroError> {
        let engine = self.engine()?;
        engine.together(engine.check().and_then(|()| engine.check_no_gradients()))?;
        engine.settle_renewals()?;
        restore::restore_published(&engine, weights, options)
    }

    /// A place for checkpoints of the model and its optimizer. Collective.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Checkpoint`] for options that cannot work, [`ZeroError::Communication`].
    pub fn checkpoints(
        &self,
        storage: Arc<dyn Storage>,
        options: SaverOptions,
    ) -> Result<Checkpoints, ZeroError> {
        Checkpoints::new(Arc::clone(&self.slot), &self.base.comm, storage, options)
    }
}
