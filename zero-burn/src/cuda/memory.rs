//! Memory of a CUDA device that other processes read.

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{
    CommError, DeviceCopier, DeviceCopy, DeviceView, DeviceWindow, DeviceWindowHandle, NcclError,
};
use zero_core::DType;

use super::held_tensor::{HeldTensor, copy};
use crate::cube;
use crate::process_windows::{MemoryHandle, Piece, SharedMemory};
use crate::rank_device::RankDevice;

/// A rank's way to such memory.
#[derive(Debug)]
pub(super) struct CudaMemory {
    device: RankDevice,
    /// The number of its CUDA device.
    index: usize,
    copier: DeviceCopier,
}

impl CudaMemory {
    /// That of a device, or why there is none.
    pub(super) fn new(device: RankDevice, index: usize) -> Result<Self, String> {
        let copier = DeviceCopier::new(index).map_err(|error| error.to_string())?;
        Ok(Self { device, index, copier })
    }

    fn open(&self, handle: MemoryHandle) -> Result<DeviceView, NcclError> {
        DeviceView::open(self.index, DeviceWindowHandle::from_bytes(handle))
    }
}

impl SharedMemory for CudaMemory {
    type Block = DeviceWindow;

    fn device(&self) -> &RankDevice {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceWindow, String> {
        DeviceWindow::new(self.index, bytes).map_err(|error| error.to_string())
    }

    fn handle(&self, block: &DeviceWindow) -> MemoryHandle {
        block.handle().to_bytes()
    }

    fn reach(&self, handle: MemoryHandle) -> Result<(), String> {
        self.open(handle).map(drop).map_err(|error| error.to_string())
    }

    fn write(
        &self,
        block: &DeviceWindow,
        tensors: &[(usize, &CubeTensor)],
        label: &str,
    ) -> Result<(), CommError> {
        let (mut held, mut copies) = (Vec::new(), Vec::new());
        for (start, tensor) in tensors {
            let (hold, bytes) = (HeldTensor::of(tensor, &self.device, label)?, cube::bytes(tensor) as usize);
            let into = block.address(*start..start + bytes).expect("a block has room for its shards");
            copies.push(DeviceCopy { from: hold.address, into, bytes });
            held.push(hold);
        }
        copy(&self.copier, &self.device, held, &copies, label)
    }

    fn join(
        &self,
        dtype: DType,
        numel: usize,
        pieces: &[Piece],
        label: &str,
    ) -> Result<CubeTensor, CommError> {
        let whole = self.device.empty(numel, dtype, label)?;
        let held = HeldTensor::of(&whole, &self.device, label)?;
        let copies = pieces.iter().map(|piece| {
            let Piece { handle, from, bytes, into } = *piece;
            assert!(into + bytes <= numel * dtype.size(), "pieces are of the tensor");
            let view = self.open(handle).map_err(|error| error.to_string())?;
            let missing = || format!("there are no {bytes} bytes behind byte {from} of a window");
            let from = view.address(from..from + bytes).ok_or_else(missing)?;
            Ok(DeviceCopy { from, into: held.address + into as u64, bytes })
        });
        let copies: Result<Vec<_>, String> = copies.collect();
        let copies = copies.map_err(|reason| self.device.fail(label, reason))?;
        copy(&self.copier, &self.device, vec![held], &copies, label)?;
        Ok(whole)
    }
}
