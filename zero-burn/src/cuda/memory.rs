//! Memory of a CUDA device that other processes read.

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{
    CommError, DeviceCopier, DeviceCopy, DeviceView, DeviceWindow, DeviceWindowHandle, NcclError,
};
use zero_core::DType;

use super::copies::Copies;
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
        let mut copies = Copies::new(&self.copier, &self.device, label);
        for (start, tensor) in tensors {
            let (from, bytes) = (copies.hold(tensor)?, cube::bytes(tensor) as usize);
            let into = block.address(*start..start + bytes).expect("a block has room for its shards");
            copies.add(DeviceCopy { from, into, bytes });
        }
        copies.run()
    }

    fn join(
        &self,
        dtype: DType,
        numel: usize,
        pieces: &[Piece],
        label: &str,
    ) -> Result<CubeTensor, CommError> {
        let whole = self.device.empty(numel, dtype, label)?;
        let mut copies = Copies::new(&self.copier, &self.device, label);
        let start = copies.hold(&whole)?;
        let fail = |reason: String| self.device.fail(label, reason);
        for piece in pieces {
            let Piece { handle, from, bytes, into } = *piece;
            assert!(into + bytes <= numel * dtype.size(), "pieces are of the tensor");
            let view = self.open(handle).map_err(|error| fail(error.to_string()))?;
            let from = view
                .address(from..from + bytes)
                .ok_or_else(|| fail(format!("there are no {bytes} bytes behind byte {from} of a window")))?;
            copies.add(DeviceCopy { from, into: start + into as u64, bytes });
        }
        copies.run()?;
        Ok(whole)
    }
}
