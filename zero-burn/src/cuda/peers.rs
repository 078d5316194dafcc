//! Copies between CUDA devices of one process.

use zero_comm::{CommError, DeviceCopier, DeviceCopy};

use super::held_tensor::{HeldTensor, copy};
use crate::arena::Port;
use crate::cube;
use crate::rank_device::RankDevice;
use crate::transports::{Carrier, Carry};

/// A device's way to others.
#[derive(Debug)]
pub(crate) struct Peers {
    copier: DeviceCopier,
}

impl Peers {
    /// That of `own` to `others`, or why there is none.
    pub(crate) fn new<'a>(own: &Port, others: impl IntoIterator<Item = &'a Port>) -> Result<Self, String> {
        let index = |port: &Port| match port.cuda_index() {
            Some(index) => Ok(index as usize),
            None => Err(format!("{:?} is no CUDA device", port.device)),
        };
        let mut copier = DeviceCopier::new(index(own)?).map_err(|error| error.to_string())?;
        for other in others {
            if !copier.reach(index(other)?).map_err(|error| error.to_string())? {
                return Err(format!("nothing connects {:?} and {:?}", own.device, other.device));
            }
        }
        Ok(Self { copier })
    }
}

impl Carrier for Peers {
    fn carry(&self, device: &RankDevice, copies: &[Carry<'_>], label: &str) -> Result<(), CommError> {
        let (mut held, mut device_copies) = (Vec::new(), Vec::new());
        for Carry { from, into, start } in copies {
            let (bytes, room) = (cube::bytes(from), cube::bytes(into));
            let behind = (start * from.dtype.size()) as u64;
            assert!(behind + bytes <= room, "what is copied has room");
            let [source, target] = [from, into].map(|tensor| HeldTensor::of(tensor, device, label));
            let (source, target) = (source?, target?);
            let (from, into) = (source.address, target.address + behind);
            device_copies.push(DeviceCopy { from, into, bytes: bytes as usize });
            held.extend([source, target]);
        }
        copy(&self.copier, device, held, &device_copies, label)
    }
}
