//! Whole master weights for one rank, with all ranks' help.

use burn::tensor::Tensor;
use zero_comm::CommunicatorExt;
use zero_core::{DType, ParameterIndex, Rank};

use crate::ZeroError;
use crate::engine::Engine;
use crate::error::During;
use crate::host::{HostTensor, tensor_from_buffer};

impl Engine {
    /// All parameters as the optimizer sees them, flat and `f32`, on `root`; nothing on other ranks. Collective.
    pub(crate) fn collect_masters(&self, root: Rank) -> Result<Option<Vec<Tensor<1>>>, ZeroError> {
        let ready = self.check().and_then(|()| self.check_no_update());
        self.together(ready.and_then(|()| match root.index() < self.world() {
            true => Ok(()),
            false => Err(ZeroError::NoSuchRank { rank: root, world: self.world() }),
        }))?;
        let is_root = self.comm.rank() == root;
        let (mut whole, mut read) = (Vec::new(), Ok(()));
        for parameter in self.layout.parameters() {
            let own = self.own_master(parameter.index()).unwrap_or_else(|error| {
                // The others wait for something; they are told when all is done.
                read = std::mem::replace(&mut read, Ok(())).and(Err(error));
                Tensor::zeros([self.holdings.owned(parameter.index()).len()], &self.device)
            });
            let all = self.collect(parameter.index(), own, root)?;
            whole.extend(all.filter(|_| is_root));
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
        if !self.has_windows() {
            return Ok(Some(own));
        }
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
