//! Buckets between CUDA devices, by NCCL.

use std::sync::Arc;
use std::thread;

use burn_cubecl::tensor::CubeTensor;
use zero_comm::cudarc::driver::CudaStream;
use zero_comm::{
    CommError, CommunicatorExt, DeviceBuffer, DeviceBufferMut, NcclCommunicator, NcclError, ReduceOp,
};
use zero_core::{DType, Rank};

use super::held_tensor::HeldTensor;
use crate::cube;
use crate::rank_device::RankDevice;
use crate::transports::{BucketParts, DeviceCollectives};

/// A rank's place in NCCL's group.
#[derive(Debug)]
pub(super) struct NcclCollectives {
    device: RankDevice,
    /// There until the end.
    comm: Option<NcclCommunicator>,
    stream: Arc<CudaStream>,
}

/// What goes to other ranks and comes from them at once.
struct Transfer<'a> {
    by: &'a NcclCollectives,
    dtype: DType,
    label: &'a str,
    out: Vec<Message>,
    back: Vec<Message>,
    held: Vec<HeldTensor>,
}

/// To a rank, or from it.
struct Message {
    rank: Rank,
    address: u64,
    numel: usize,
}

impl NcclCollectives {
    /// The group of all ranks, if NCCL connects them; this rank has the device of this number. Collective.
    pub(super) fn find(device: RankDevice, index: usize) -> Result<Option<Arc<Self>>, CommError> {
        let key = device.comm.rank().index() as u64;
        let Some(control) = device.comm.split(Some(0), key, "buckets on devices")? else { return Ok(None) };
        let ranks = Arc::clone(&device.comm);
        let made = NcclCommunicator::new(control, index).and_then(|comm| {
            let stream = comm.context().new_stream();
            let during = || format!("making a stream on CUDA device {index}");
            let stream = stream.map_err(|error| NcclError::Driver { during: during(), error })?;
            Ok(Arc::new(Self { device, comm: Some(comm), stream }))
        });
        let made = match made {
            Ok(collectives) => Some(collectives),
            Err(NcclError::Comm(error)) => return Err(error),
            Err(error) => {
                tracing::info!(%error, "gradients go through host memory");
                None
            }
        };
        let is_made = i64::from(made.is_some());
        let all = ranks.all_reduce_value(is_made, ReduceOp::Min, "whether NCCL connects devices")?;
        Ok(made.filter(|_| all == 1))
    }

    fn transfer<'a>(&'a self, dtype: DType, label: &'a str) -> Transfer<'a> {
        Transfer { by: self, dtype, label, out: Vec::new(), back: Vec::new(), held: Vec::new() }
    }

    fn comm(&self) -> &NcclCommunicator {
        self.comm.as_ref().expect("it is there until the end")
    }

    fn hold(&self, tensor: &CubeTensor, label: &str) -> Result<HeldTensor, CommError> {
        HeldTensor::of(tensor, &self.device, label)
    }
}

impl Transfer<'_> {
    fn send(&mut self, rank: Rank, address: u64, numel: usize) {
        self.out.push(Message { rank, address, numel });
    }

    /// The tensor that comes.
    fn receive(&mut self, rank: Rank, numel: usize) -> Result<CubeTensor, CommError> {
        let coming = self.by.device.empty(numel, self.dtype, self.label)?;
        let held = self.by.hold(&coming, self.label)?;
        self.back.push(Message { rank, address: held.address, numel });
        self.held.push(held);
        Ok(coming)
    }

    /// Does it, when the device has done what this thread gave it, and waits for that; `given` is sent.
    fn run(mut self, given: HeldTensor) -> Result<(), CommError> {
        let (NcclCollectives { device, stream, .. }, comm) = (self.by, self.by.comm());
        let (dtype, label) = (self.dtype, self.label);
        self.held.push(given);
        device.settle(&[], label)?;
        let mut group = comm.group();
        for Message { rank, address, numel } in self.out {
            // SAFETY: it is this much of a tensor on the communicator's device, which is held until all has been sent; the
            // device has written it.
            let buffer = unsafe { DeviceBuffer::from_raw(address, dtype, numel) };
            group.send(rank, buffer, label);
        }
        for Message { rank, address, numel } in self.back {
            // SAFETY: as above, and nobody else has the tensor.
            let buffer = unsafe { DeviceBufferMut::from_raw(address, dtype, numel) };
            group.receive(rank, buffer, label);
        }
        let done = group.launch(stream).and_then(|()| comm.wait());
        done.map_err(|error| {
            // NCCL has been told to end; whether the device has is not known.
            self.held.into_iter().for_each(HeldTensor::forget);
            match error {
                NcclError::Comm(error) => error,
                error => device.fail(label, error),
            }
        })
    }
}

impl Drop for NcclCollectives {
    /// NCCL may wait for the other ranks to end theirs, which they do when they like.
    fn drop(&mut self) {
        let comm = self.comm.take();
        let ending = thread::Builder::new().name(String::from("end of NCCL")).spawn(move || drop(comm));
        if let Err(error) = ending {
            tracing::warn!(%error, "a communicator of NCCL was ended at once, for there was no thread for it");
        }
    }
}

impl DeviceCollectives for NcclCollectives {
    fn device(&self) -> &RankDevice {
        &self.device
    }

    fn all_to_all(&self, parts: &BucketParts<'_>, bucket: CubeTensor) -> Result<Vec<CubeTensor>, CommError> {
        let (own, dtype) = (self.comm().rank(), cube::dtype_of(&bucket));
        let (held, mut transfer) = (self.hold(&bucket, parts.label)?, self.transfer(dtype, parts.label));
        let mut addends = Vec::new();
        for (rank, range) in parts.of_ranks() {
            if rank != own {
                transfer.send(rank, held.address + (range.start * dtype.size()) as u64, range.len());
                continue;
            }
            for rank in self.comm().world_size().ranks() {
                addends.push(if rank == own {
                    cube::part(bucket.clone(), range.clone())
                } else {
                    transfer.receive(rank, range.len())?
                });
            }
        }
        transfer.run(held)?;
        Ok(addends)
    }

    fn all_gather(
        &self,
        parts: &BucketParts<'_>,
        part: CubeTensor,
    ) -> Result<Vec<(usize, CubeTensor)>, CommError> {
        let (own, dtype) = (self.comm().rank(), cube::dtype_of(&part));
        let (held, mut transfer) = (self.hold(&part, parts.label)?, self.transfer(dtype, parts.label));
        let mut all = Vec::new();
        for (rank, range) in parts.of_ranks() {
            if rank != own {
                all.push((range.start, transfer.receive(rank, range.len())?));
                continue;
            }
            all.push((range.start, part.clone()));
            for rank in self.comm().world_size().ranks().filter(|rank| *rank != own) {
                transfer.send(rank, held.address, range.len());
            }
        }
        transfer.run(held)?;
        Ok(all)
    }

    /// What was given has arrived as soon as it is received.
    fn finish(&self, parts: &BucketParts<'_>, sums: Option<&CubeTensor>) -> Result<(), CommError> {
        self.device.settle(sums.as_slice(), parts.label)
    }
}
