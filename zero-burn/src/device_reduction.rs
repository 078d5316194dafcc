//! One bucket's way from the gradients on every rank's device to sums there.

use std::ops::Range;
use std::sync::Arc;

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator};
use zero_core::{DType, ParameterIndex};

use crate::arena::Port;
use crate::cube;
use crate::device_bucket::{DeviceBucket, Written};
use crate::floats::Write;
use crate::kernels::{Buffer, KernelError, MoveRow, Norms, Onto, move_rows};
use crate::reduction::Reduction;
use crate::transports::{BucketParts, DeviceCollectives};

/// How a bucket is reduced on devices.
pub(crate) struct DeviceReduction {
    pub(crate) collectives: Arc<dyn DeviceCollectives>,
    /// Its number.
    pub(crate) bucket: usize,
    pub(crate) plan: Reduction,
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
    pub(crate) fn run(
        &self,
        comm: &dyn Communicator,
        travel: &mut Travel,
        label: &str,
    ) -> Result<(), CommError> {
        let (collectives, device) = (&self.collectives, self.collectives.device());
        let failed = |error: KernelError| device.fail(label, error);
        if let Some(written) = travel.written.take() {
            device.wait(written, label)?;
        }
        let norms = self.norms(&travel.bucket).map_err(failed)?;
        let Reduction { counts, accumulate, to_all, how, .. } = &self.plan;
        let parts = BucketParts { comm, bucket: self.bucket, counts, label };
        let addends = collectives.all_to_all(&parts, travel.bucket.tensor())?;
        let part = self.sum(addends, parts.own()).map_err(failed)?;
        if *to_all {
            let parts = collectives.all_gather(&parts, device.port.tensor_of(&part))?;
            self.write(&mut travel.sums, counts.iter().sum(), parts).map_err(failed)?;
        } else if *accumulate == DType::F32 && *how == Write::Put {
            travel.sums = Some(part);
        } else {
            let part = device.port.tensor_of(&part);
            let numel = part.meta.num_elements();
            self.write(&mut travel.sums, numel, vec![(0, part)]).map_err(failed)?;
        }
        let sums = travel.sums.as_ref().map(|sums| device.port.tensor_of(sums));
        travel.not_finite = self.find_not_finite(norms).map_err(failed)?;
        collectives.finish(&parts, sums.as_ref())
    }

    fn port(&self) -> &Port {
        &self.collectives.device().port
    }

    fn sum(&self, addends: Vec<CubeTensor>, numel: usize) -> Result<Buffer, KernelError> {
        let port = self.port();
        let sums = port.room(numel, DType::F32)?;
        for (rank, addend) in addends.into_iter().enumerate() {
            let onto = if rank == 0 { Onto::Put } else { Onto::Add };
            let row = MoveRow { from: 0, to: 0, len: numel };
            move_rows(&port.client, &cube::elements_of(addend)?, &sums, &[row], 1.0, onto)?;
        }
        Ok(sums)
    }

    /// Writes parts, with where each begins, into `sums` of so many elements.
    fn write(
        &self,
        sums: &mut Option<Buffer>,
        numel: usize,
        parts: Vec<(usize, CubeTensor)>,
    ) -> Result<(), KernelError> {
        let port = self.port();
        let onto = match (self.plan.how, &sums) {
            (Write::Add, Some(_)) => Onto::Add,
            (Write::Put | Write::Add, _) => Onto::Put,
        };
        let sums = match sums {
            Some(sums) => sums,
            None => sums.insert(port.room(numel, self.plan.accumulate)?),
        };
        parts.into_iter().try_for_each(|(to, part)| {
            let part = cube::elements_of(part)?;
            let row = MoveRow { from: 0, to, len: part.len() };
            move_rows(&port.client, &part, sums, &[row], 1.0, onto)
        })
    }

    /// The norms of this rank's gradients, which tell whether they are finite.
    fn norms(&self, bucket: &DeviceBucket) -> Result<Norms<'_>, KernelError> {
        let mut norms = Norms::new(&self.port().client);
        self.filled.iter().try_for_each(|(_, ranges)| norms.add(bucket.buffer(), ranges))?;
        Ok(norms)
    }

    fn find_not_finite(&self, norms: Norms<'_>) -> Result<Option<ParameterIndex>, KernelError> {
        let norms = norms.read()?;
        let mut found = self.filled.iter().zip(norms);
        let found = found.find(|(_, rows)| rows.iter().any(|row| !row.is_finite));
        Ok(found.map(|((parameter, _), _)| *parameter))
    }
}
