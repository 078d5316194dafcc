//! Copies to and from tensors of CUDA devices.

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, DeviceCopier, DeviceCopy, NcclError};

use super::held_tensor::HeldTensor;
use crate::rank_device::RankDevice;

/// Copies, with the tensors that they are of or for.
pub(super) struct Copies<'a> {
    copier: &'a DeviceCopier,
    device: &'a RankDevice,
    label: &'a str,
    all: Vec<DeviceCopy>,
    held: Vec<HeldTensor>,
}

impl<'a> Copies<'a> {
    /// None yet, to be done on the rank's device.
    pub(super) fn new(copier: &'a DeviceCopier, device: &'a RankDevice, label: &'a str) -> Self {
        Self { copier, device, label, all: Vec::new(), held: Vec::new() }
    }

    /// Where a tensor lies until the copies are done. If it is to be read, its device has written it.
    pub(super) fn hold(&mut self, tensor: &CubeTensor) -> Result<u64, CommError> {
        let held = HeldTensor::of(tensor, self.device, self.label)?;
        let address = held.address;
        self.held.push(held);
        Ok(address)
    }

    /// Adds one, between tensors that are held and windows, of no more bytes than these have.
    pub(super) fn add(&mut self, copy: DeviceCopy) {
        self.all.push(copy);
    }

    /// Does them, when the device has done what this thread gave it, and waits for that.
    pub(super) fn run(self) -> Result<(), CommError> {
        let Self { copier, device, label, all, held } = self;
        device.settle(&[], label)?;
        // SAFETY: callers made sure of the lengths. Tensors are held until the copies are done, or for good; what is read was
        // written before, and what was to be done with memory that is written is done, for it is the device's, and this
        // thread's. Windows are never freed, and who reads one finds out whether it was written meanwhile.
        let copied = unsafe { copier.copy(&all, &*device.comm, label) };
        copied.map_err(|error| {
            held.into_iter().for_each(HeldTensor::forget);
            match error {
                NcclError::Comm(error) => error,
                error => device.fail(label, error),
            }
        })
    }
}
