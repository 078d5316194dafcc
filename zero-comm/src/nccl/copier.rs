//! Copies between memory of devices.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};

use super::device;
use super::error::NcclError;
use super::patience::watch;
use super::window::give_up_copies;
use crate::give_up::cause;
use crate::{Communicator, OpKind};

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
        Ok(Self { context, stream })
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
    /// Memory at both addresses of each copy is that long, allocated or mapped on the device, and stays so until the
    /// copies are done. What had to be done with either is done, and nothing else accesses what is written meanwhile. What
    /// is read may be written meanwhile, also by another process: then the bytes that are copied are unspecified.
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
            let news =
                || cause(comm, OpKind::Read, label).map_or(Ok(()), |error| Err(NcclError::from(error)));
            watch(after, look, news)?.ok_or(NcclError::Copy { device, after })
        });
        done.inspect_err(|_| give_up_copies())
    }
}
