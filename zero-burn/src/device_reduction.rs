//! One bucket's way from the gradients on every rank's device to sums there.

use std::ops::Range;
use std::sync::Arc;

use cubecl::future::block_on;
use zero_comm::{CommError, Communicator};
use zero_core::{DType, ParameterIndex, Rank};

use crate::board::{Board, Notice};
use crate::cube;
use crate::device_bucket::{DeviceBucket, Written};
use crate::floats::Write;
use crate::kernels::{Buffer, KernelError, MoveRow, Norms, Onto, move_rows};

/// How a bucket is reduced on devices. Equal on all ranks but for `filled`.
pub(crate) struct DeviceReduction {
    pub(crate) board: Arc<Board>,
    /// Its number.
    pub(crate) bucket: usize,
    /// Elements of each rank's part.
    pub(crate) counts: Vec<usize>,
    /// What sums over several backwards are kept in.
    pub(crate) accumulate: DType,
    /// Whether every rank gets all sums, not its part of them alone.
    pub(crate) to_all: bool,
    /// What becomes of the sums that are there already.
    pub(crate) how: Write,
    /// Where this rank's gradients lie in the bucket.
    pub(crate) filled: Vec<(ParameterIndex, Vec<Range<usize>>)>,
}

/// A bucket on its way.
pub(crate) struct Travel {
    pub(crate) bucket: DeviceBucket,
    /// When the thread that filled it has done so.
    pub(crate) written: Option<Written>,
    /// What was there before, and then what this rank gets.
    pub(crate) sums: Option<Buffer>,
    /// The first parameter whose gradient is not finite.
    pub(crate) not_finite: Option<ParameterIndex>,
}

impl std::fmt::Debug for Travel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Travel")
            .field("bucket", &self.bucket)
            .field("sums", &self.sums)
            .finish_non_exhaustive()
    }
}

impl DeviceReduction {
    /// Adds the bucket up over the ranks, in their order and in `f32`, and puts the sums of this rank's part into those of
    /// `travel`, or adds them.
    ///
    /// # Panics
    ///
    /// If the device fails, as Burn does.
    pub(crate) fn run(
        &self,
        comm: &dyn Communicator,
        travel: &mut Travel,
        label: &str,
    ) -> Result<(), CommError> {
        let (board, rank) = (&self.board, comm.rank());
        if let Some(written) = travel.written.take() {
            block_on(written).unwrap_or_else(|error| panic!("gradients were not written: {error}"));
        }
        let norms = sound(self.norms(&travel.bucket));
        let notices = [Notice::Bucket(self.bucket), Notice::Sums(self.bucket)];
        board.show(vec![(notices[0], travel.bucket.tensor())]);
        comm.barrier(label)?;
        let part = sound(self.sum(rank, label)?);
        let is_direct = self.accumulate == DType::F32 && self.how == Write::Put;
        if self.to_all {
            board.settle();
            board.show(vec![(notices[1], board.port().tensor_of(&part))]);
            comm.barrier(label)?;
            let all = comm.world_size().ranks().zip(&self.counts).filter(|(_, count)| **count > 0);
            let parts = all.map(|(rank, &count)| {
                let sums = board.take_part(rank, notices[1], 0..count, label)?;
                Ok((self.part(rank).start, cube::elements_of(sums)))
            });
            let parts: Vec<_> = parts.collect::<Result<_, CommError>>()?;
            let parts = parts.into_iter().map(|(at, sums)| Ok((at, sums?)));
            let parts = sound(parts.collect::<Result<Vec<_>, KernelError>>());
            sound(self.write(&mut travel.sums, self.counts.iter().sum(), &parts));
        } else if is_direct {
            travel.sums = Some(part);
        } else {
            sound(self.write(&mut travel.sums, part.len(), &[(0, part)]));
        }
        // Norms are read when all before them is done, the sums included; and what was taken for those has come.
        travel.not_finite = sound(self.find_not_finite(norms));
        comm.barrier(label)?;
        notices.into_iter().for_each(|notice| board.withdraw(notice));
        Ok(())
    }

    /// The elements of a rank's part of the bucket.
    fn part(&self, rank: Rank) -> Range<usize> {
        let start = self.counts[..rank.index()].iter().sum();
        start..start + self.counts[rank.index()]
    }

    /// The sums over all ranks of this rank's part.
    fn sum(&self, own: Rank, label: &str) -> Result<Result<Buffer, KernelError>, CommError> {
        let (port, part) = (self.board.port(), self.part(own));
        let mut addends = Vec::new();
        for rank in (0..self.counts.len()).map(Rank::new).filter(|_| !part.is_empty()) {
            addends.push(self.board.take_part(rank, Notice::Bucket(self.bucket), part.clone(), label)?);
        }
        Ok((|| {
            let sums = port.room(part.len(), DType::F32)?;
            for (rank, addend) in addends.into_iter().enumerate() {
                let onto = if rank == 0 { Onto::Put } else { Onto::Add };
                let row = MoveRow { from: 0, to: 0, len: part.len() };
                move_rows(&port.client, &cube::elements_of(addend)?, &sums, &[row], 1.0, onto)?;
            }
            Ok(sums)
        })())
    }

    /// Writes parts, with where each begins, into `sums` of so many elements.
    fn write(
        &self,
        sums: &mut Option<Buffer>,
        numel: usize,
        parts: &[(usize, Buffer)],
    ) -> Result<(), KernelError> {
        let port = self.board.port();
        let onto = match (self.how, &sums) {
            (Write::Add, Some(_)) => Onto::Add,
            (Write::Put | Write::Add, _) => Onto::Put,
        };
        let sums = match sums {
            Some(sums) => sums,
            None => sums.insert(port.room(numel, self.accumulate)?),
        };
        parts.iter().try_for_each(|(to, part)| {
            let row = MoveRow { from: 0, to: *to, len: part.len() };
            move_rows(&port.client, part, sums, &[row], 1.0, onto)
        })
    }

    /// The norms of this rank's gradients, which tell whether they are finite.
    fn norms(&self, bucket: &DeviceBucket) -> Result<Norms<'_>, KernelError> {
        let mut norms = Norms::new(&self.board.port().client);
        self.filled.iter().try_for_each(|(_, ranges)| norms.add(bucket.buffer(), ranges))?;
        Ok(norms)
    }

    /// Waits for the device.
    fn find_not_finite(&self, norms: Norms<'_>) -> Result<Option<ParameterIndex>, KernelError> {
        let norms = norms.read()?;
        if norms.is_empty() {
            self.board.settle();
        }
        let mut found = self.filled.iter().zip(norms);
        let found = found.find(|(_, rows)| rows.iter().any(|row| !row.is_finite));
        Ok(found.map(|((parameter, _), _)| *parameter))
    }
}

/// What kernels are given here fits: what fails is the device.
fn sound<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("reducing gradients: {error}"))
}
