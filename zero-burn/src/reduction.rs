//! One bucket's way from every rank's gradients to sums.

use half::{bf16, f16};
use zero_comm::{CommError, Communicator, CommunicatorExt, Element, ReduceOp};
use zero_core::DType;
use zero_offload::HostBuffer;

use crate::floats::{Floats, FloatsMut, Write};
use crate::scratch::{Scratch, ScratchBuffer};

/// How a bucket is reduced. Equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Reduction {
    /// Elements of each rank's part.
    pub(crate) counts: Vec<usize>,
    /// What travels: a bucket's elements are of this type.
    pub(crate) wire: DType,
    /// What sums over several backwards are kept in.
    pub(crate) accumulate: DType,
    /// Whether every rank gets all sums, not its part of them alone.
    pub(crate) to_all: bool,
    /// What becomes of the sums that are there already.
    pub(crate) how: Write,
}

impl Reduction {
    /// Bytes that this rank gives to others.
    pub(crate) fn bytes(&self, rank: usize) -> usize {
        let (all, own) = (self.counts.iter().sum::<usize>(), self.counts[rank]);
        let (scattered, gathered) = ((all - own) * self.wire.size(), (all - own) * size_of::<f32>());
        scattered + if self.to_all { gathered } else { 0 }
    }

    /// Adds `bucket` up over the ranks, in their order and in `f32`, and puts the sums of this rank's part into `sums`,
    /// or adds them to it.
    pub(crate) fn run(
        &self,
        comm: &dyn Communicator,
        bucket: &mut ScratchBuffer,
        sums: &mut HostBuffer,
        scratch: &Scratch,
        label: &str,
    ) -> Result<(), CommError> {
        let is_direct = self.accumulate == DType::F32 && self.how == Write::Put;
        let own = self.counts[comm.rank().index()];
        if self.to_all && self.wire == DType::F32 {
            comm.all_reduce(bucket.as_mut_slice::<f32>(), ReduceOp::Sum, label)?;
            self.write(bucket.as_slice(), sums);
        } else if self.to_all {
            let mut part = scratch.take(own * size_of::<f32>());
            let mut whole = scratch.take(self.counts.iter().sum::<usize>() * size_of::<f32>());
            self.scatter(comm, bucket, part.as_mut_slice(), scratch, label)?;
            comm.all_gather_uneven(part.as_slice::<f32>(), whole.as_mut_slice::<f32>(), &self.counts, label)?;
            self.write(whole.as_slice(), sums);
        } else if is_direct {
            self.scatter(comm, bucket, sums.as_mut_slice(), scratch, label)?;
        } else {
            let mut part = scratch.take(own * size_of::<f32>());
            self.scatter(comm, bucket, part.as_mut_slice(), scratch, label)?;
            self.write(part.as_slice(), sums);
        }
        Ok(())
    }

    fn write(&self, from: &[f32], sums: &mut HostBuffer) {
        FloatsMut::new(self.accumulate, sums).write(self.how, Floats::F32(from), 1.0);
    }

    /// The sums, in `f32`, of this rank's part.
    fn scatter(
        &self,
        comm: &dyn Communicator,
        bucket: &ScratchBuffer,
        part: &mut [f32],
        scratch: &Scratch,
        label: &str,
    ) -> Result<(), CommError> {
        match self.wire {
            DType::F16 => self.scatter_half::<f16>(comm, bucket, part, scratch, label),
            DType::BF16 => self.scatter_half::<bf16>(comm, bucket, part, scratch, label),
            _ => {
                comm.reduce_scatter_uneven(bucket.as_slice::<f32>(), part, &self.counts, ReduceOp::Sum, label)
            }
        }
    }

    /// A reduce-scatter of half-width floats would give half-width sums, so each rank gets all addends of its part.
    fn scatter_half<T: Element>(
        &self,
        comm: &dyn Communicator,
        bucket: &ScratchBuffer,
        part: &mut [f32],
        scratch: &Scratch,
        label: &str,
    ) -> Result<(), CommError> {
        let (own, ranks) = (self.counts[comm.rank().index()], self.counts.len());
        let mut addends = scratch.take(own * ranks * T::DTYPE.size());
        comm.all_to_all_uneven(
            bucket.as_slice::<T>(),
            &self.counts,
            addends.as_mut_slice::<T>(),
            &vec![own; ranks],
            label,
        )?;
        let addends = Floats::new(T::DTYPE, &addends);
        for rank in 0..ranks {
            let how = if rank == 0 { Write::Put } else { Write::Add };
            let addend = addends.slice(rank * own..(rank + 1) * own);
            FloatsMut::F32(&mut *part).write(how, addend, 1.0);
        }
        Ok(())
    }
}
