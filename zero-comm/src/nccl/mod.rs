//! NVIDIA devices that NCCL connects, and windows of their memory.
//!
//! NCCL moves the data; everything else is done over another communicator, `control`: ranks find each other,
//! make sure that they launch the same, and learn of failures. NCCL is used without blocking throughout: each
//! call returns at once, and whoever must wait looks in turn at what is awaited, at NCCL's state and at
//! `control`, so that no wait is endless and each ends with a cause. The price is a thread that NCCL starts
//! for each launch, so small operations belong in groups.
//!
//! Both libraries, NCCL and the CUDA driver, are looked for when they are first needed. A program built with
//! this runs without them, and gets an error that says what is missing.

mod agreement;
mod buffer;
mod communicator;
mod control;
mod copier;
mod device;
mod entry;
mod error;
mod group;
mod handle;
mod join;
mod library;
mod patience;
mod session;
mod single;
mod window;

pub use agreement::Agreement;
pub use buffer::{DeviceBuffer, DeviceBufferMut};
pub use communicator::NcclCommunicator;
pub use copier::{DeviceCopier, DeviceCopy};
pub use error::NcclError;
pub use group::NcclGroup;
pub use library::NcclVersion;
pub use window::{DeviceView, DeviceWindow, DeviceWindowHandle};
