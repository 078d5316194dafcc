//! How ranks' devices reach each other past host memory.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator};
use zero_core::{ParameterIndex, Rank};

use crate::arena::Port;
use crate::board::Board;
use crate::cube;
use crate::rank_device::RankDevice;
use crate::windows::{Values, Windows};

/// The transports that there are; what has none goes through windows and collective operations of the host.
#[derive(Debug, Default)]
pub(crate) struct Transports {
    /// For shards.
    pub(crate) shards: Option<Arc<dyn DeviceWindows>>,
    /// For gradients.
    pub(crate) buckets: Option<Arc<dyn DeviceCollectives>>,
}

impl Transports {
    /// Those between the ranks of `comm`; `port` if this rank wants any. Collective.
    pub(crate) fn find(comm: &Arc<dyn Communicator>, port: Option<&Port>) -> Result<Self, CommError> {
        if comm.world_size().get() == 1 {
            return Ok(Self::default());
        }
        #[cfg(all(test, feature = "wgpu"))]
        if let Some(transports) = tests::substituted(comm, port)? {
            return Ok(transports);
        }
        if let Some(board) = Board::meet(comm, port)? {
            return Ok(Self { shards: Some(board.clone()), buckets: Some(board) });
        }
        #[cfg(feature = "cuda")]
        return crate::cuda::find(comm, port);
        #[cfg(not(feature = "cuda"))]
        Ok(Self::default())
    }
}

/// Where ranks show each other shards that are on their devices. Nobody has to do anything for one who takes what is shown,
/// as with windows of the host.
pub(crate) trait DeviceWindows: fmt::Debug + Send + Sync {
    fn device(&self) -> &RankDevice;

    /// Whether what is shown is a copy.
    fn copies(&self) -> bool;

    /// Shows this rank's shards, each in place of what was shown before, when the device has written them.
    fn show(&self, windows: &Windows, shards: Vec<(ParameterIndex, CubeTensor)>) -> Result<(), CommError>;

    /// Lets go of the memory of all shards, as far as it is what is shown. Who wants one waits.
    fn withdraw(&self);

    /// Whether a shard was withdrawn, and has to be shown again though it is the same.
    fn is_withdrawn(&self, parameter: ParameterIndex, values: Values) -> bool;

    /// Every rank's shard, side by side on this rank's device; if it `waits`, the device has written that.
    fn whole(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        waits: bool,
    ) -> Result<CubeTensor, CommError>;

    /// The shard of `rank`, on any device.
    fn shard(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        rank: Rank,
    ) -> Result<CubeTensor, CommError>;

    /// Reads every rank's shard to the host.
    fn read(&self, windows: &Windows, parameter: ParameterIndex, into: &mut [u8]) -> Result<(), CommError> {
        let (spec, size) = (windows.parameter(parameter), windows.dtype.size());
        for (rank, range) in spec.partition().ranges().filter(|(_, range)| !range.is_empty()) {
            let shard = self.shard(windows, parameter, rank)?;
            cube::read(&shard, 0, "reading shards", &mut into[range.start * size..range.end * size])
                .map_err(|error| self.device().fail(spec.name(), error))?;
        }
        Ok(())
    }
}

/// How a bucket's gradients get from every rank's device to those of who adds them up. All ranks bring the same buckets in the
/// same order.
pub(crate) trait DeviceCollectives: fmt::Debug + Send + Sync {
    fn device(&self) -> &RankDevice;

    /// Gives each rank its part of the bucket, and takes this rank's part as each rank has it, in their order; the device has
    /// written `bucket`.
    fn all_to_all(&self, parts: &BucketParts<'_>, bucket: CubeTensor) -> Result<Vec<CubeTensor>, CommError>;

    /// Every rank's part of the sums, with where it begins; `part` is this rank's.
    fn all_gather(
        &self,
        parts: &BucketParts<'_>,
        part: CubeTensor,
    ) -> Result<Vec<(usize, CubeTensor)>, CommError>;

    /// Returns when nobody needs what this rank gave, and the device has written `sums`.
    fn finish(&self, parts: &BucketParts<'_>, sums: Option<&CubeTensor>) -> Result<(), CommError>;
}

/// What brings tensors from other devices of this process.
pub(crate) trait Carrier: fmt::Debug + Send + Sync {
    /// Does all copies, in no order, when `device` has done what this thread gave it to do, and returns when they are done.
    /// What is copied has been written by its device.
    fn carry(&self, device: &RankDevice, copies: &[Carry<'_>], label: &str) -> Result<(), CommError>;
}

/// A tensor of any device to be copied into one of the rank's.
#[cfg_attr(
    not(any(feature = "cuda", all(test, feature = "wgpu"))),
    expect(dead_code, reason = "nothing else connects devices")
)]
pub(crate) struct Carry<'a> {
    pub(crate) from: &'a CubeTensor,
    pub(crate) into: &'a CubeTensor,
    /// The first element that is written.
    pub(crate) start: usize,
}

/// How a bucket is cut into a part for each rank.
#[derive(Clone, Copy)]
pub(crate) struct BucketParts<'a> {
    /// For what ranks do together on their hosts.
    pub(crate) comm: &'a dyn Communicator,
    /// The bucket's number.
    pub(crate) bucket: usize,
    /// Elements of each rank's part.
    pub(crate) counts: &'a [usize],
    pub(crate) label: &'a str,
}

impl BucketParts<'_> {
    /// Elements of this rank's part.
    pub(crate) fn own(&self) -> usize {
        self.counts[self.comm.rank().index()]
    }

    /// Each rank that has a part, with the part's elements.
    pub(crate) fn of_ranks(&self) -> impl Iterator<Item = (Rank, Range<usize>)> {
        let mut end = 0;
        let ranges = self.counts.iter().map(move |count| {
            let start = end;
            end += count;
            start..end
        });
        ranges
            .enumerate()
            .filter(|(_, range)| !range.is_empty())
            .map(|(rank, range)| (Rank::new(rank), range))
    }
}

#[cfg(all(test, any(feature = "wgpu", feature = "cuda")))]
pub(crate) mod fixture;
#[cfg(all(test, feature = "wgpu"))]
mod tests;
