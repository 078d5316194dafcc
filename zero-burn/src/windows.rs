//! What ranks show each other of their shards, and how a whole parameter is read from that.

use std::sync::Arc;

use zero_comm::{CommError, Communicator, WindowKey};
use zero_core::{Bytes, DType, Layout, ParameterIndex};

use crate::host::HostTensor;
use crate::statistics::{Activity, Recorder};

/// Each rank's shards of all parameters in one type, for all ranks to read.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) dtype: DType,
    pub(crate) values: Values,
    /// Whether what is shown is a copy, be it that ranks are processes or that shards are on a device.
    pub(crate) copies: bool,
    pub(crate) recorder: Arc<Recorder>,
}

/// Which values of a parameter a window shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// What layers compute with.
    Compute,
    /// What the optimizer updates, where that is something else.
    Master,
}

impl Windows {
    /// Shows this rank's shard, in place of what was shown before.
    pub(crate) fn expose(&self, parameter: ParameterIndex, shard: HostTensor) -> Result<(), CommError> {
        self.comm.expose(self.key(parameter), Arc::new(shard))
    }

    /// How many bytes the whole parameter takes.
    pub(crate) fn bytes(&self, parameter: ParameterIndex) -> usize {
        self.layout.parameters()[parameter.index()].numel() * self.dtype.size()
    }

    /// Bytes that windows of this rank's shards take beside the shards themselves.
    pub(crate) fn copied_bytes(&self) -> Bytes {
        let rank = self.comm.rank();
        let own = self.layout.parameters().iter().map(|parameter| parameter.partition().len(rank));
        if self.copies { Bytes::of(own.sum(), self.dtype) } else { Bytes::ZERO }
    }

    /// Reads every rank's shard into `whole`, which has the parameter's [`bytes`](Self::bytes).
    pub(crate) fn read(&self, parameter: ParameterIndex, whole: &mut [u8]) -> Result<(), CommError> {
        let spec = &self.layout.parameters()[parameter.index()];
        let size = self.dtype.size();
        let own = spec.partition().len(self.comm.rank());
        self.recorder.during(Activity::Gather, spec.name(), (spec.numel() - own) * size, || {
            for (rank, range) in spec.partition().ranges().filter(|(_, range)| !range.is_empty()) {
                let into = &mut whole[range.start * size..range.end * size];
                self.comm.read(rank, self.key(parameter), 0, into, spec.name())?;
            }
            Ok(())
        })
    }

    fn key(&self, parameter: ParameterIndex) -> WindowKey {
        WindowKey::new(2 * parameter.index() as u64 + u64::from(self.values == Values::Master))
    }
}
