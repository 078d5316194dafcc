//! Operations that are launched alone.

use cudarc::driver::CudaStream;
use zero_core::Rank;

use super::buffer::{DeviceBuffer, DeviceBufferMut};
use super::communicator::NcclCommunicator;
use super::error::NcclError;
use crate::ReduceOp;

impl NcclCommunicator {
    /// Launches an [`NcclGroup::all_reduce`](crate::NcclGroup::all_reduce) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn all_reduce<'a>(
        &'a self,
        stream: &'a CudaStream,
        buffer: impl Into<DeviceBufferMut<'a>>,
        op: ReduceOp,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.all_reduce(buffer, op, label);
        group.launch(stream)
    }

    /// Launches an [`NcclGroup::all_gather`](crate::NcclGroup::all_gather) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn all_gather<'a>(
        &'a self,
        stream: &'a CudaStream,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.all_gather(send, receive, label);
        group.launch(stream)
    }

    /// Launches an [`NcclGroup::reduce_scatter`](crate::NcclGroup::reduce_scatter) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn reduce_scatter<'a>(
        &'a self,
        stream: &'a CudaStream,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        op: ReduceOp,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.reduce_scatter(send, receive, op, label);
        group.launch(stream)
    }

    /// Launches an [`NcclGroup::broadcast`](crate::NcclGroup::broadcast) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn broadcast<'a>(
        &'a self,
        stream: &'a CudaStream,
        buffer: impl Into<DeviceBufferMut<'a>>,
        root: Rank,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.broadcast(buffer, root, label);
        group.launch(stream)
    }

    /// Launches an [`NcclGroup::send`](crate::NcclGroup::send) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn send<'a>(
        &'a self,
        stream: &'a CudaStream,
        to: Rank,
        buffer: impl Into<DeviceBuffer<'a>>,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.send(to, buffer, label);
        group.launch(stream)
    }

    /// Launches an [`NcclGroup::receive`](crate::NcclGroup::receive) alone.
    ///
    /// # Errors
    ///
    /// See [`NcclGroup::launch`](crate::NcclGroup::launch).
    pub fn receive<'a>(
        &'a self,
        stream: &'a CudaStream,
        from: Rank,
        buffer: impl Into<DeviceBufferMut<'a>>,
        label: &str,
    ) -> Result<(), NcclError> {
        let mut group = self.group();
        group.receive(from, buffer, label);
        group.launch(stream)
    }
}
