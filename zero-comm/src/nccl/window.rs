//! Memory of a CUDA device that processes of one host read from each other's devices.
//!
//! What CUDA calls IPC: the driver maps memory of one process into another. Nobody has to do anything for one who
//! reads, as with the windows of host memory. To free memory that another process has mapped is undefined behaviour. So
//! a window's memory is never freed but goes to a later window of its process, and what was mapped stays mapped until the
//! process ends.

use std::collections::HashMap;
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::sys::{self, CUipcMem_flags, CUipcMemHandle};
use cudarc::driver::{CudaContext, DriverError, result};

use super::device;
use super::error::NcclError;
use crate::lock;

/// Memory of windows that are gone, to be used again.
static RETIRED: Mutex<Vec<Allocation>> = Mutex::new(Vec::new());
/// Where this process's own memory is: the driver does not map it to where it is already.
static OWN: LazyLock<Mutex<HashMap<Name, u64>>> = LazyLock::new(Mutex::default);
/// What was mapped, by the device that reads it.
static MAPPED: LazyLock<Mutex<HashMap<(usize, Name), Mapped>>> = LazyLock::new(Mutex::default);

/// Memory of windows comes in multiples of this: the driver shares whole blocks of as much, and what else lies in one must not be
/// freed either.
const UNIT: usize = 2 << 20;
/// Whether a copy was given up that may still write to a window, or read from it.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// The driver's name for memory.
type Name = [u8; HANDLE];

const HANDLE: usize = size_of::<CUipcMemHandle>();
const LENGTH: usize = size_of::<u64>();

/// What another process of the host finds a [`DeviceWindow`] by. Travels as bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceWindowHandle {
    name: Name,
    bytes: u64,
}

impl DeviceWindowHandle {
    /// How many bytes a handle has.
    pub const BYTES: usize = HANDLE + LENGTH;

    /// As bytes.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut all = [0; Self::BYTES];
        all[..HANDLE].copy_from_slice(&self.name);
        all[HANDLE..].copy_from_slice(&self.bytes.to_le_bytes());
        all
    }

    /// From the bytes of [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(all: [u8; Self::BYTES]) -> Self {
        let (mut name, mut bytes) = ([0; HANDLE], [0; LENGTH]);
        name.copy_from_slice(&all[..HANDLE]);
        bytes.copy_from_slice(&all[HANDLE..]);
        Self { name, bytes: u64::from_le_bytes(bytes) }
    }
}

impl fmt::Debug for DeviceWindowHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceWindowHandle").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
struct Allocation {
    /// Memory is gone with its context.
    context: Arc<CudaContext>,
    address: u64,
    handle: DeviceWindowHandle,
}

struct Mapped {
    _context: Arc<CudaContext>,
    start: u64,
}

/// Memory of a CUDA device that other processes of the host can read.
///
/// What is in it is whatever was there before. When it is dropped its memory is not freed, for it may be mapped elsewhere,
/// but goes to a later window of this process: who still has a [`DeviceView`] sees what that one holds.
///
/// ```no_run
/// use zero_comm::{DeviceCopier, DeviceCopy, DeviceView, DeviceWindow, DeviceWindowHandle, LocalWorld, NcclError};
/// use zero_core::WorldSize;
///
/// // The process that shows memory:
/// let window = DeviceWindow::new(0, 4096)?;
/// let handle: [u8; DeviceWindowHandle::BYTES] = window.handle().to_bytes(); // to be sent somehow
///
/// // A process that reads it, and a communicator whose end ends the wait:
/// # let comm = LocalWorld::new(WorldSize::ONE).communicators().remove(0);
/// let view = DeviceView::open(1, DeviceWindowHandle::from_bytes(handle))?;
/// let copier = DeviceCopier::new(1)?;
/// # let memory = 0;
/// let copy = DeviceCopy { from: view.address(0..4096).unwrap(), into: memory, bytes: 4096 };
/// // SAFETY: `memory` is as long, and nobody else uses it or writes the window meanwhile.
/// unsafe { copier.copy(&[copy], &*comm, "a window")? };
/// # Ok::<_, NcclError>(())
/// ```
#[derive(Debug)]
pub struct DeviceWindow(Allocation);

impl DeviceWindow {
    /// A window of at least so many bytes on the CUDA device, counted from 0.
    ///
    /// # Errors
    ///
    /// [`NcclError::DriverMissing`], [`NcclError::NoSuchDevice`]; [`NcclError::Driver`] if there is no memory, or the
    /// driver does not share it between processes.
    pub fn new(device: usize, bytes: usize) -> Result<Self, NcclError> {
        let bytes = bytes.max(1).next_multiple_of(UNIT);
        let mut retired = lock(&RETIRED);
        // More than twice as much would be missed elsewhere.
        let sizes = bytes as u64..=2 * bytes as u64;
        let fits = |(at, old): (usize, &Allocation)| {
            let is_alike = old.context.ordinal() == device && sizes.contains(&old.handle.bytes);
            is_alike.then_some((old.handle.bytes, at))
        };
        if let Some((_, at)) = retired.iter().enumerate().filter_map(fits).min() {
            return Ok(Self(retired.swap_remove(at)));
        }
        drop(retired);
        let context = device::context(device)?;
        let allocated = context.bind_to_thread().and_then(|()| allocate(bytes));
        allocated
            .map(|(address, name)| {
                lock(&OWN).insert(name, address);
                let handle = DeviceWindowHandle { name, bytes: bytes as u64 };
                Self(Allocation { context: Arc::clone(&context), address, handle })
            })
            .map_err(|error| NcclError::Driver {
                during: format!("making a window of {bytes} bytes on CUDA device {device}"),
                error,
            })
    }

    /// What others open it by.
    pub const fn handle(&self) -> DeviceWindowHandle {
        self.0.handle
    }

    /// Where these bytes of it are on its device; `None` if it has not so many.
    pub fn address(&self, range: Range<usize>) -> Option<u64> {
        within(self.0.address, self.0.handle.bytes, &range)
    }
}

/// Ends the use of windows' memory by later windows.
pub(super) fn give_up_copies() {
    GIVEN_UP.store(true, Ordering::Release);
}

impl Drop for DeviceWindow {
    fn drop(&mut self) {
        if !GIVEN_UP.load(Ordering::Acquire) {
            lock(&RETIRED).push(self.0.clone());
        }
    }
}

/// Device memory that can be shared, and its name.
fn allocate(bytes: usize) -> Result<(u64, Name), DriverError> {
    // SAFETY: a context is current.
    let address = unsafe { result::malloc_sync(bytes) }?;
    let mut name = MaybeUninit::<CUipcMemHandle>::uninit();
    // SAFETY: the memory was just allocated; the name is written if the call succeeds.
    let name =
        unsafe { sys::cuIpcGetMemHandle(name.as_mut_ptr(), address).result().map(|()| name.assume_init()) };
    match name {
        Ok(name) => Ok((address, name.reserved.map(|byte| byte as u8))),
        Err(error) => {
            // SAFETY: nobody else knows of it.
            if let Err(error) = unsafe { result::free_sync(address) } {
                tracing::warn!(%error, "device memory was not freed");
            }
            Err(error)
        }
    }
}

fn within(start: u64, bytes: u64, range: &Range<usize>) -> Option<u64> {
    (range.start <= range.end && range.end as u64 <= bytes).then(|| start + range.start as u64)
}

/// A [`DeviceWindow`] of another process, or of this one, as this one sees it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView {
    start: u64,
    bytes: u64,
}

impl DeviceView {
    /// Maps the window to where a CUDA device of this process, counted from 0, can copy from. It stays mapped; opened
    /// again, it is the same.
    ///
    /// # Errors
    ///
    /// As [`DeviceWindow::new`]; [`NcclError::Driver`] if the devices do not reach each other, or the window's process is
    /// gone or runs on another host.
    pub fn open(device: usize, handle: DeviceWindowHandle) -> Result<Self, NcclError> {
        if let Some(start) = lock(&OWN).get(&handle.name) {
            return Ok(Self { start: *start, bytes: handle.bytes });
        }
        let mut mapped = lock(&MAPPED);
        let key = (device, handle.name);
        let start = match mapped.get(&key) {
            Some(mapped) => mapped.start,
            None => {
                let context = device::context(device)?;
                let start = context.bind_to_thread().and_then(|()| map(handle.name));
                let start = start.map_err(|error| NcclError::Driver {
                    during: format!("opening a window of another process for CUDA device {device}"),
                    error,
                })?;
                mapped.insert(key, Mapped { _context: context, start });
                start
            }
        };
        Ok(Self { start, bytes: handle.bytes })
    }

    /// Where these bytes of it are for the device that it was opened for; `None` if it has not so many.
    pub fn address(&self, range: Range<usize>) -> Option<u64> {
        within(self.start, self.bytes, &range)
    }
}

fn map(name: Name) -> Result<u64, DriverError> {
    let mut start = 0;
    let name = CUipcMemHandle { reserved: name.map(|byte| byte as _) };
    let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    // SAFETY: a context is current; what a name stands for is the driver's to judge.
    unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut start, name, flags) }.result()?;
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_the_same_after_their_way_as_bytes() {
        let mut name = [0; HANDLE];
        name[3] = 200;
        let handle = DeviceWindowHandle { name, bytes: 1 << 40 };
        assert_eq!(DeviceWindowHandle::from_bytes(handle.to_bytes()), handle);
    }

    #[test]
    fn only_bytes_that_are_there_have_an_address() {
        assert_eq!(within(1000, 8, &(0..8)), Some(1000));
        assert_eq!(within(1000, 8, &(3..3)), Some(1003));
        assert_eq!(within(1000, 8, &(3..9)), None);
        #[expect(clippy::reversed_empty_ranges, reason = "it has no address either")]
        let reversed = within(1000, 8, &(5..4));
        assert_eq!(reversed, None);
    }
}
