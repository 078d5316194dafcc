//! What tests of transports begin with.

use std::sync::Arc;

use burn::tensor::Device;
use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator};
use zero_core::{DType, Layout, LayoutOptions, ParameterIndex, ParameterSpec};

use super::DeviceWindows;
use crate::cube;
use crate::host::tensor_dtype;
use crate::rank_device::RankDevice;
use crate::statistics::Recorder;
use crate::windows::{Values, Windows};

pub(crate) fn bytes_of(tensor: &CubeTensor) -> Vec<u8> {
    let mut bytes = vec![0; cube::bytes(tensor) as usize];
    if !bytes.is_empty() {
        cube::read(tensor, 0, "a test", &mut bytes).unwrap();
    }
    bytes
}

pub(crate) fn tensor(device: &RankDevice, bytes: &[u8], dtype: DType) -> CubeTensor {
    let (client, device) = (device.port.client.clone(), device.port.device.clone());
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(4).max(4), 0);
    let handle = client.create_from_slice(&padded).offset_end((padded.len() - bytes.len()) as u64);
    let shape = [bytes.len() / dtype.size()].into();
    CubeTensor::new_contiguous(client, device, shape, handle, tensor_dtype(dtype))
}

/// A rank with windows, for 10 elements over all ranks.
pub(crate) struct Member {
    pub(crate) on_devices: Arc<dyn DeviceWindows>,
    pub(crate) windows: Windows,
}

impl Member {
    pub(crate) fn new(
        comm: &Arc<dyn Communicator>,
        device: Device,
        on_devices: Arc<dyn DeviceWindows>,
    ) -> Self {
        let (name, aliases) = (String::from("weight"), Vec::new());
        let spec = ParameterSpec { name, shape: vec![10], dtype: DType::F32, trainable: true, aliases };
        let windows = Windows {
            comm: Arc::clone(comm),
            layout: Arc::new(Layout::new(vec![spec], comm.world_size(), LayoutOptions::default()).unwrap()),
            dtype: DType::F32,
            values: Values::Compute,
            device,
            on_devices: Some(Arc::clone(&on_devices)),
            copies: true,
            recorder: Arc::new(Recorder::new()),
        };
        Self { on_devices, windows }
    }

    /// Shows this rank's elements of those from `first` on.
    pub(crate) fn show(&self, first: u8) -> Result<(), CommError> {
        let device = self.on_devices.device();
        let part = self.windows.layout.parameters()[0].partition().range(device.comm.rank());
        let bytes: Vec<u8> = part.flat_map(|at| (f32::from(first) + at as f32).to_le_bytes()).collect();
        let shard = tensor(device, &bytes, DType::F32);
        self.on_devices.show(&self.windows, vec![(ParameterIndex::new(0), shard)])
    }

    pub(crate) fn whole(&self) -> Result<CubeTensor, CommError> {
        self.on_devices.whole(&self.windows, ParameterIndex::new(0), true)
    }

    /// All elements, by both ways to read them.
    pub(crate) fn read(&self) -> Result<Vec<f32>, CommError> {
        let whole = bytes_of(&self.whole()?);
        let mut read = vec![0; whole.len()];
        self.on_devices.read(&self.windows, ParameterIndex::new(0), &mut read)?;
        assert_eq!(read, whole);
        Ok(bytemuck::pod_collect_to_vec(&whole))
    }
}

pub(crate) fn elements(first: u8) -> Vec<f32> {
    (0..10).map(|at| f32::from(first + at)).collect()
}
