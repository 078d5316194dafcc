//! What ranks show each other of their shards, and how a whole parameter is read from that.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator, WindowKey};
use zero_core::{Bytes, DType, Layout, Parameter, ParameterIndex};
use zero_offload::HostPool;

#[cfg(feature = "cube")]
use crate::cube;
use crate::host::{HostTensor, tensor_from_buffer};
use crate::statistics::{Activity, Recorder};
#[cfg(feature = "cube")]
use crate::transports::DeviceWindows;

/// Each rank's shards of all parameters in one type, for all ranks to read.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) dtype: DType,
    pub(crate) values: Values,
    /// Where layers compute, without autodiff.
    pub(crate) device: Device,
    /// Where ranks show their shards on their devices, if they do.
    #[cfg(feature = "cube")]
    pub(crate) on_devices: Option<Arc<dyn DeviceWindows>>,
    /// Whether what is shown is a copy, be it that ranks are processes or that shards are on a device.
    pub(crate) copies: bool,
    pub(crate) recorder: Arc<Recorder>,
}

/// Which values of a parameter a window shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Values {
    /// What layers compute with.
    Compute,
    /// What the optimizer updates, where that is something else.
    Master,
}

impl Values {
    /// The window of a parameter.
    pub(crate) fn key(self, parameter: ParameterIndex) -> WindowKey {
        WindowKey::new(2 * parameter.index() as u64 + u64::from(self == Self::Master))
    }
}

impl Windows {
    /// Shows this rank's shards, each in place of what was shown before. Those of a device are shown there, or else read at once,
    /// which stops it less often.
    pub(crate) fn expose(&self, shards: Vec<(ParameterIndex, Tensor<1>)>) -> Result<(), CommError> {
        #[cfg(feature = "cube")]
        if let Some(on_devices) = &self.on_devices {
            let shards = shards.into_iter().map(|(parameter, shard)| (parameter, cube::buffer(shard)));
            return on_devices.show(self, shards.collect());
        }
        let (parameters, shards): (Vec<_>, Vec<_>) = shards.into_iter().unzip();
        let mut shards = parameters.into_iter().zip(HostTensor::several(shards));
        shards
            .try_for_each(|(parameter, shard)| self.comm.expose(self.values.key(parameter), Arc::new(shard)))
    }

    /// The parameters of which this rank shows nothing any more.
    pub(crate) fn withdrawn(&self) -> Vec<ParameterIndex> {
        #[cfg(feature = "cube")]
        if let Some(on_devices) = &self.on_devices {
            let parameters = self.layout.parameters().iter().map(Parameter::index);
            return parameters.filter(|index| on_devices.is_withdrawn(*index, self.values)).collect();
        }
        Vec::new()
    }

    /// Whether ranks take shards from each other's devices.
    pub(crate) fn are_on_devices(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.on_devices.is_some();
        #[cfg(not(feature = "cube"))]
        false
    }

    /// How many bytes the whole parameter takes.
    pub(crate) fn bytes(&self, parameter: ParameterIndex) -> usize {
        self.parameter(parameter).numel() * self.dtype.size()
    }

    /// Bytes that windows of this rank's shards take beside the shards themselves.
    pub(crate) fn copied_bytes(&self) -> Bytes {
        let rank = self.comm.rank();
        let own = self.layout.parameters().iter().map(|parameter| parameter.partition().len(rank));
        if self.copies { Bytes::of(own.sum(), self.dtype) } else { Bytes::ZERO }
    }

    /// Every rank's shard, side by side in a tensor where layers compute, which the device has written; `pool` is for one that
    /// comes through host memory.
    pub(crate) fn whole(&self, parameter: ParameterIndex, pool: &HostPool) -> Result<Tensor<1>, CommError> {
        #[cfg(feature = "cube")]
        if self.are_on_devices() {
            return Ok(cube::tensor(self.whole_on_device(parameter, true)?));
        }
        let mut buffer = pool.take(self.bytes(parameter));
        self.read(parameter, &mut buffer)?;
        Ok(tensor_from_buffer(buffer, self.dtype, &self.device))
    }

    /// Reads every rank's shard into `whole`, which has the parameter's [`bytes`](Self::bytes).
    pub(crate) fn read(&self, parameter: ParameterIndex, whole: &mut [u8]) -> Result<(), CommError> {
        self.during(parameter, || {
            #[cfg(feature = "cube")]
            if let Some(on_devices) = &self.on_devices {
                return on_devices.read(self, parameter, whole);
            }
            let (spec, size) = (self.parameter(parameter), self.dtype.size());
            for (rank, range) in spec.partition().ranges().filter(|(_, range)| !range.is_empty()) {
                let into = &mut whole[range.start * size..range.end * size];
                self.comm.read(rank, self.values.key(parameter), 0, into, spec.name())?;
            }
            Ok(())
        })
    }

    /// Every rank's shard, side by side on this rank's device; if it `waits`, when the device has written it: other threads may
    /// take it then. The thread that steps waits for what it has read before shards change; any other has to do so here.
    ///
    /// # Panics
    ///
    /// If ranks do not show their shards there.
    #[cfg(feature = "cube")]
    pub(crate) fn whole_on_device(
        &self,
        parameter: ParameterIndex,
        waits: bool,
    ) -> Result<CubeTensor, CommError> {
        let on_devices = self.on_devices.as_ref().expect("asked for only where ranks show them there");
        self.during(parameter, || on_devices.whole(self, parameter, waits))
    }

    /// Counts the gather of a parameter.
    fn during<T>(
        &self,
        parameter: ParameterIndex,
        gather: impl FnOnce() -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let spec = self.parameter(parameter);
        let others = spec.numel() - spec.partition().len(self.comm.rank());
        self.recorder.during(Activity::Gather, spec.name(), others * self.dtype.size(), gather)
    }

    pub(crate) fn parameter(&self, index: ParameterIndex) -> &Parameter {
        &self.layout.parameters()[index.index()]
    }
}
