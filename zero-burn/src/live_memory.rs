//! Memory of a device that layers have, counted for as long as anybody has it.

use std::fmt;

use burn_cubecl::tensor::CubeTensor;
use zero_core::Bytes;

use crate::cube;

/// What is alive, and the most that was at once.
#[derive(Debug, Default)]
pub(crate) struct LiveMemory {
    alive: Vec<Tracked>,
    peak: u64,
}

/// One tensor's memory.
struct Tracked {
    bytes: u64,
    /// Asks without keeping it.
    is_alive: Box<dyn Fn() -> bool + Send>,
}

impl fmt::Debug for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracked").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Waits until the device's thread, not the device, has come to a tensor: before, its memory looks as if nobody had it, and what
/// layers have let go of as if they did.
pub(crate) fn reach(tensor: &CubeTensor) {
    // What fails is found where the tensor is read.
    drop(tensor.client.check([&tensor.handle]));
}

impl LiveMemory {
    /// Counts a tensor that has its memory for itself and that was [reached](reach).
    pub(crate) fn track(&mut self, tensor: &CubeTensor) {
        let memory = tensor.handle.memory.clone().binding().downgrade();
        let is_alive = Box::new(move || memory.upgrade().is_some());
        self.alive.push(Tracked { bytes: cube::bytes(tensor), is_alive });
        self.peak = self.peak.max(self.live().get());
    }

    /// Bytes that somebody has now.
    pub(crate) fn live(&mut self) -> Bytes {
        self.alive.retain(|piece| (piece.is_alive)());
        Bytes::new(self.alive.iter().map(|piece| piece.bytes).sum())
    }

    pub(crate) const fn peak(&self) -> Bytes {
        Bytes::new(self.peak)
    }

    /// Makes what there is now the most.
    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.live().get();
    }
}
