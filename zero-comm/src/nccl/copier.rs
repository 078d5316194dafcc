//! Copies between memory of devices.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use super::device;
use super::error::NcclError;
use super::patience::watch;
use super::window::give_up_copies;
use crate::{Communicator, CommunicatorExt, OpKind};

/// Bytes of device memory to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCopy {
    /// The device address of the first of them.
    pub from: u64,
    /// The device address that the first of them goes to.
    pub into: u64,
    /// How many.
    pub bytes: usize,
}

/// Copies between memory of a device and memory that it reaches, on a stream of its own.
#[derive(Debug)]
pub struct DeviceCopier {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Of the other devices that it reaches. A connection ends with either.
    connected: Vec<Arc<CudaContext>>,
}

impl DeviceCopier {
    /// One for the CUDA device, counted from 0.
    ///
    /// # Errors
    ///
    /// [`NcclError::DriverMissing`], [`NcclError::NoSuchDevice`], [`NcclError::Driver`].
    pub fn new(device: usize) -> Result<Self, NcclError> {
        let context = device::context(device)?;
        let stream = context.new_stream().map_err(|error| NcclError::Driver {
            during: format!("making a stream on CUDA device {device}"),
            error,
        })?;
        Ok(Self { context, stream, connected: Vec::new() })
    }

    /// Connects its device to another one of this process, counted from 0, if the hardware does. Copies of memory that was
    /// allocated there as a whole, not of a pool of the driver's, are then direct; the driver takes others through the host.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn reach(&mut self, device: usize) -> Result<bool, NcclError> {
        let (own, other) = (&self.context, device::context(device)?);
        if own.ordinal() == device {
            return Ok(true);
        }
        let mut is_connected = 0;
        let connected = own.bind_to_thread().and_then(|()| {
            // SAFETY: both are devices, and there is room for the answer.
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut is_connected, own.cu_device(), other.cu_device()) }
                .result()?;
            if is_connected == 0 {
                return Ok(());
            }
            // SAFETY: the other context is there as long as this value.
            match unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) }.result() {
                Err(DriverError(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
                enabled => enabled,
            }
        });
        connected.map_err(|error| NcclError::Driver {
            during: format!("connecting CUDA device {} to CUDA device {device}", own.ordinal()),
            error,
        })?;
        if is_connected != 0 && !self.connected.contains(&other) {
            self.connected.push(other);
        }
        Ok(is_connected != 0)
    }

    /// Does all copies, in no order, and returns when they are done.
    ///
    /// # Errors
    ///
    /// [`NcclError::Driver`]; [`NcclError::Copy`] if they are not done by the deadline of `comm`; [`NcclError::Comm`] if
    /// the world of `comm` has failed before they are. After an error some may still be under way; from then on, memory
    /// of windows is not used again in this process.
    ///
    /// # Safety
    ///
    /// Memory at both addresses of each copy is that long, allocated or mapped on the device or, if it is read, on
    /// another of this process, and stays so until the copies are done. What had to be done with either is done, and
    /// nothing else accesses what is written meanwhile. What is read may be written meanwhile, also by another process:
    /// then the bytes that are copied are unspecified.
    pub unsafe fn copy(
        &self,
        copies: &[DeviceCopy],
        comm: &dyn Communicator,
        label: &str,
    ) -> Result<(), NcclError> {
        let (device, after) = (self.context.ordinal(), comm.deadline());
        let failed = |error| NcclError::Driver { during: format!("copying on CUDA device {device}"), error };
        let begun = self.context.bind_to_thread().and_then(|()| {
            for copy in copies.iter().filter(|copy| copy.bytes > 0) {
                // SAFETY: by the contract of this function.
                unsafe {
                    result::memcpy_dtod_async(copy.into, copy.from, copy.bytes, self.stream.cu_stream())
                }?;
            }
            let end = self.context.new_event(None)?;
            end.record(&self.stream)?;
            Ok(end)
        });
        let done = begun.map_err(failed).and_then(|end| {
            let look = || Ok(end.try_is_complete().map_err(failed)?.then_some(()));
            let news = || comm.check(OpKind::Read, label).map_err(NcclError::from);
            watch(after, look, news)?.ok_or(NcclError::Copy { device, after })
        });
        done.inspect_err(|_| give_up_copies())
    }
}
