//! Master weights for who asks: this rank's, whole ones, and whole ones on one rank with all ranks' help.

use burn::tensor::{FloatDType, Tensor};
use zero_comm::CommunicatorExt;
use zero_core::{DType, ParameterIndex, Rank};

use crate::ZeroError;
use crate::agreement::agree;
use crate::engine::{Engine, Standing};
use crate::error::During;
use crate::host::{HostTensor, tensor_from_buffer};

impl Engine {
    /// All of this rank's shard as the optimizer sees it.
    fn own_master(&self, index: ParameterIndex) -> Result<Tensor<1>, ZeroError> {
        loop {
            // What is in memory and what is not stay of one step while the guard is held.
            let in_place = self.phase.wait_for_shards();
            let whole = self.with_disk(index, self.held(index).shard);
            drop(in_place);
            match (whole, self.masters_on_disk()) {
                // A step of another thread has them, and gives them back soon.
                (Err(ZeroError::UpdatePending), Some(masters)) if self.check_no_update().is_ok() => {
                    masters.wait_for(index);
                }
                (whole, _) => return whole,
            }
        }
    }

    /// All of a shard of which this is in memory.
    pub(crate) fn with_disk(&self, index: ParameterIndex, shard: Tensor<1>) -> Result<Tensor<1>, ZeroError> {
        let numel = self.holdings.owned(index).len();
        let is_here = shard.shape().num_elements() == numel;
        let Some(masters) = self.masters_on_disk().filter(|_| !is_here) else { return Ok(shard) };
        let mut all = self.exports.take(numel * DType::F32.size());
        let shard = HostTensor::new(shard);
        all.as_mut_slice()[..shard.as_slice().len()].copy_from_slice(shard.as_slice());
        let here = size_of_val(shard.as_slice());
        masters.read(index, 0, &mut all[here..])?;
        Ok(tensor_from_buffer(all, DType::F32, &self.device))
    }

    /// Whether other ranks have masters that cannot be read from here.
    pub(crate) fn has_distant_masters(&self) -> bool {
        self.has_windows() && self.masters_on_disk().is_some()
    }

    /// The whole parameter as the optimizer sees it, flat and `f32`, where layers compute in another type.
    pub(crate) fn master(&self, index: ParameterIndex) -> Result<Tensor<1>, ZeroError> {
        self.phase.check_failure()?;
        if !self.has_windows() {
            return self.own_master(index);
        }
        let masters = self.masters.as_ref().ok_or(ZeroError::MastersOnDisk)?;
        let mut whole = self.exports.take(masters.bytes(index));
        let read = masters.read(index, &mut whole);
        let name = self.parameter(index).name();
        self.fail(read.during(|| format!("gathering master weights of `{name}`")))?;
        Ok(tensor_from_buffer(whole, DType::F32, &self.device))
    }

    /// As [`master`](Self::master), of any type that layers compute in, for who has no error to give: it is NaN, and the
    /// error is kept for the next fallible call.
    pub(crate) fn master_or_nan(&self, index: ParameterIndex) -> Tensor<1> {
        if self.standing() == Standing::Replaced || !self.is_mixed() {
            return self.whole_or_nan(index).cast(FloatDType::F32);
        }
        self.master(index).unwrap_or_else(|error| {
            self.phase.note(error);
            Tensor::full([self.parameter(index).numel()], f32::NAN, &self.device)
        })
    }

    /// Makes sure that all ranks mean the same root, and that there is one to collect parameters now.
    pub(crate) fn agree_on_root(&self, root: Rank) -> Result<(), ZeroError> {
        let ready = self.check().and_then(|()| self.check_no_update());
        self.together(ready.and_then(|()| match root.index() < self.world() {
            true => Ok(()),
            false => Err(ZeroError::NoSuchRank { rank: root, world: self.world() }),
        }))?;
        self.fail(agree(self.comm.as_ref(), &[format!("unshard_to {root}")]))
    }

    /// All parameters as the optimizer sees them, flat and `f32`, on `root`; nothing on other ranks. Collective.
    pub(crate) fn collect_masters(&self, root: Rank) -> Result<Option<Vec<Tensor<1>>>, ZeroError> {
        let is_root = self.comm.rank() == root;
        let (mut whole, mut read) = (Vec::new(), Ok(()));
        for parameter in self.layout.parameters() {
            let own = match self.own_master(parameter.index()) {
                Ok(own) => own,
                Err(error) => {
                    // The others wait for something; they are told when all is done.
                    read = read.and(Err(error));
                    Tensor::zeros([self.holdings.owned(parameter.index()).len()], &self.device)
                }
            };
            whole.extend(self.collect(parameter.index(), own, root)?);
        }
        self.together(read)?;
        Ok(is_root.then_some(whole))
    }

    /// Every rank's shard of a parameter, on `root`.
    fn collect(
        &self,
        index: ParameterIndex,
        own: Tensor<1>,
        root: Rank,
    ) -> Result<Option<Tensor<1>>, ZeroError> {
        let (own, partition) = (HostTensor::new(own), self.parameter(index).partition());
        let is_root = self.comm.rank() == root;
        let mut sent = vec![0; self.world()];
        sent[root.index()] = own.as_slice().len();
        let received = partition.ranges().map(|(_, range)| if is_root { range.len() } else { 0 });
        let received: Vec<_> = received.collect();
        let numel: usize = received.iter().sum();
        let mut all = self.exports.take(numel * DType::F32.size());
        let label = format!("`{}` to {root}", self.parameter(index).name());
        let moved =
            self.comm.all_to_all_uneven(own.as_slice(), &sent, all.as_mut_slice::<f32>(), &received, &label);
        self.fail(moved.during(|| format!("collecting master weights of {label}")))?;
        Ok(is_root.then(|| tensor_from_buffer(all, DType::F32, &self.device)))
    }
}
