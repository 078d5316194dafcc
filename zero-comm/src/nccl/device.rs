//! A CUDA device.

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};

use super::error::NcclError;
use super::library;

/// How many devices the driver shows.
pub(super) fn count() -> Result<usize, NcclError> {
    library::require_driver()?;
    match CudaContext::device_count() {
        Ok(count) => Ok(count.try_into().unwrap_or(0)),
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => Err(NcclError::Driver { during: "counting CUDA devices".to_owned(), error }),
    }
}

/// The primary context of a device: the one that NCCL uses.
pub(super) fn context(device: usize) -> Result<Arc<CudaContext>, NcclError> {
    let count = count()?;
    if device >= count {
        return Err(NcclError::NoSuchDevice { device, count });
    }
    CudaContext::new(device)
        .map_err(|error| NcclError::Driver { during: format!("opening CUDA device {device}"), error })
}
