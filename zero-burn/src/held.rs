//! What one rank holds of every parameter.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor};
use zero_comm::CommError;
use zero_core::{Bytes, DType, ParameterIndex, Rank, Stage};
use zero_offload::HostPool;

use crate::base::Base;
#[cfg(feature = "cube")]
use crate::cube;
use crate::engine::lock;
use crate::floats::burn_dtype;
use crate::host::{distinct_bytes, on};
use crate::windows::Windows;

/// One parameter as this rank holds it.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// What this rank updates, `f32`, but for the last elements that are on a disk; a view of `whole` where that is there
    /// and `f32` too.
    pub(crate) shard: Tensor<1>,
    /// The whole parameter in the type of layers, where it stays gathered between steps and has been renewed since the
    /// last one.
    pub(crate) whole: Option<Tensor<1>>,
    /// The shard in the type of layers, where that is another one and other ranks read it, or will.
    pub(crate) shown: Option<Tensor<1>>,
}

/// What an update makes of a shard.
#[derive(Clone, Debug)]
pub(crate) struct Updated {
    pub(crate) shard: Tensor<1>,
    /// The same in the type of layers, if that is another one and the update made it.
    pub(crate) copy: Option<Tensor<1>>,
}

impl Held {
    pub(crate) const fn new(shard: Tensor<1>) -> Self {
        Self { shard, whole: None, shown: None }
    }

    /// Of a shard whose last elements are on a disk, with a copy of all of them in the type of layers.
    pub(crate) const fn with_copy(shard: Tensor<1>, copy: Tensor<1>) -> Self {
        Self { shard, whole: None, shown: Some(copy) }
    }
}

/// Every parameter as this rank holds it.
#[derive(Debug)]
pub(crate) struct Holdings {
    windows: Windows,
    stage: Stage,
    /// Where layers compute, without autodiff.
    device: Device,
    /// Where shards are.
    home: Device,
    /// Memory for replicas.
    pool: HostPool,
    held: Arc<Mutex<Vec<Held>>>,
}

impl Holdings {
    pub(crate) fn new(windows: Windows, base: &Base) -> Self {
        Self {
            windows,
            stage: base.config.stage,
            device: base.device.clone(),
            home: base.home.clone(),
            pool: base.replicas.clone(),
            held: Arc::clone(&base.held),
        }
    }

    pub(crate) fn get(&self, parameter: ParameterIndex) -> Held {
        lock(&self.held)[parameter.index()].clone()
    }

    /// Moves a shard out, to be updated; there is nothing until it is put in place.
    pub(crate) fn take_shard(&self, parameter: ParameterIndex) -> Tensor<1> {
        let nothing = Held::new(Tensor::empty([0], &self.home));
        let Held { shard, whole, .. } = std::mem::replace(&mut lock(&self.held)[parameter.index()], nothing);
        drop(whole);
        shard
    }

    /// Moves out all of a parameter; there is nothing until it is [put](Self::put) in place.
    #[cfg(feature = "cube")]
    pub(crate) fn take(&self, parameter: ParameterIndex) -> Held {
        let nothing = Held::new(Tensor::empty([0], &self.home));
        std::mem::replace(&mut lock(&self.held)[parameter.index()], nothing)
    }

    /// Gives a shard memory of its own, if it may lie in one buffer with those that are updated with it.
    #[cfg(feature = "cube")]
    pub(crate) fn put_apart(&self, parameter: ParameterIndex) {
        let Held { shard, whole, shown: _ } = self.take(parameter);
        let is_shard = whole.as_ref().is_some_and(|whole| cube::same_extent(whole.clone(), shard.clone()));
        // A copy, to the bit but for NaN.
        let shard = shard.mul_scalar(1.0);
        let whole = if is_shard { Some(shard.clone()) } else { whole };
        self.put(parameter, Held { whole, ..Held::new(shard) });
    }

    /// Puts a parameter in place.
    #[cfg(feature = "cube")]
    pub(crate) fn put(&self, parameter: ParameterIndex, held: Held) {
        // What is dropped goes after the lock.
        drop(std::mem::replace(&mut lock(&self.held)[parameter.index()], held));
    }

    /// Puts an updated shard in place; the replica is stale.
    pub(crate) fn set_shard(&self, parameter: ParameterIndex, Updated { shard, copy }: Updated) {
        // What is dropped goes after the lock.
        let new = Held { shown: copy, ..Held::new(shard) };
        drop(std::mem::replace(&mut lock(&self.held)[parameter.index()], new));
    }

    /// The shard in the type of layers, for other ranks to read.
    pub(crate) fn show(&self, parameter: ParameterIndex) -> Tensor<1> {
        let shown = self.compute_shard(parameter);
        if self.windows.dtype != DType::F32 && !self.windows.copies {
            lock(&self.held)[parameter.index()].shown = Some(shown.clone());
        }
        shown
    }

    /// Moves out the copy that the update made, or makes one.
    fn compute_shard(&self, parameter: ParameterIndex) -> Tensor<1> {
        let copy = lock(&self.held)[parameter.index()].shown.take();
        copy.unwrap_or_else(|| self.get(parameter).shard.cast(burn_dtype(self.windows.dtype)))
    }

    /// Makes the replica of a shard that is the whole parameter.
    pub(crate) fn copy_whole(&self, parameter: ParameterIndex) {
        let whole = on(&self.device, self.compute_shard(parameter));
        lock(&self.held)[parameter.index()].whole = Some(whole);
    }

    /// Makes the replica of all ranks' shards.
    pub(crate) fn gather_whole(&self, parameter: ParameterIndex) -> Result<Tensor<1>, CommError> {
        let whole = self.windows.whole(parameter, &self.pool)?;
        if self.home != self.device {
            let new = Held { whole: Some(whole.clone()), ..Held::new(self.get(parameter).shard) };
            drop(std::mem::replace(&mut lock(&self.held)[parameter.index()], new));
            return Ok(whole);
        }
        let owned = self.owned(parameter);
        let part = match owned.is_empty() {
            true => Tensor::<1>::empty([0], &self.device).cast(burn_dtype(self.windows.dtype)),
            false => whole.clone().slice([owned]),
        };
        if !self.windows.copies {
            // The window has to follow the shard, or the memory of both would stay.
            self.windows.expose(vec![(parameter, part.clone())])?;
        }
        let shard = if self.windows.dtype == DType::F32 { part } else { self.get(parameter).shard };
        let new = Held { whole: Some(whole.clone()), ..Held::new(shard) };
        drop(std::mem::replace(&mut lock(&self.held)[parameter.index()], new));
        Ok(whole)
    }

    /// The elements of `parameter` that this rank updates.
    pub(crate) fn owned(&self, parameter: ParameterIndex) -> Range<usize> {
        let partition = self.windows.layout.parameters()[parameter.index()].partition();
        owned(self.stage, self.windows.comm.rank(), partition)
    }

    pub(crate) fn bytes(&self) -> Bytes {
        let held = lock(&self.held);
        Bytes::new(distinct_bytes(
            held.iter().flat_map(|held| held.whole.iter().chain(&held.shown).chain([&held.shard])),
        ))
    }
}

/// The elements of a parameter that `rank` updates: all of it where the optimizer is not sharded.
pub(crate) fn owned(stage: Stage, rank: Rank, partition: zero_core::Partition) -> Range<usize> {
    if stage.shards_optimizer() { partition.range(rank) } else { 0..partition.numel() }
}
