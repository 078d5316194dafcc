//! Copies between CUDA devices of one process.

use std::ptr;

use zero_comm::{CommError, DeviceCopier, DeviceCopy};

use super::copies::Copies;
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
        let mut all = Copies::new(&self.copier, device, label);
        // Copies into one tensor come one after the other.
        for copies in copies.chunk_by(|one, other| ptr::eq(one.into, other.into)) {
            let (start, room) = (all.hold(copies[0].into)?, cube::bytes(copies[0].into));
            for Carry { from, start: element, .. } in copies {
                let (behind, bytes) = ((element * from.dtype.size()) as u64, cube::bytes(from));
                assert!(behind + bytes <= room, "what is copied has room");
                let from = all.hold(from)?;
                all.add(DeviceCopy { from, into: start + behind, bytes: bytes as usize });
            }
        }
        all.run()
    }
}
