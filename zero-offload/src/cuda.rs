//! The CUDA driver, looked for when it is first needed, and the memory that it page-locks.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use zero_core::Bytes;

/// The names of the driver's library.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Page-locked for all devices, not only for the one whose context is current (`CU_MEMHOSTREGISTER_PORTABLE`).
const PORTABLE: c_uint = 1;

const SUCCESS: c_int = 0;

/// What the driver says where it has nothing registered any more: it was never initialized, the process ends, the context
/// is not valid or destroyed, the memory is not registered.
const GONE: [c_int; 5] = [3, 4, 201, 709, 713];

/// Why memory is ordinary where page-locked memory was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageLockError {
    /// There is no driver.
    #[error("no CUDA driver was found as {}: {reason}; install NVIDIA's driver", tried.join(" or "))]
    NoDriver {
        /// The names under which it was looked for.
        tried: Vec<&'static str>,
        /// What the system said about the first of them.
        reason: String,
    },

    /// The driver lacks a function.
    #[error("the CUDA driver has no function {function}; install a newer one")]
    OldDriver {
        /// The name of the function.
        function: &'static str,
    },

    /// The device cannot be used.
    #[error("CUDA device {device} cannot be used: {function} failed with {code}; name a device that works")]
    Device {
        /// The number of the device.
        device: u32,
        /// The driver's function that failed.
        function: &'static str,
        /// What it returned.
        code: String,
    },

    /// The driver did not page-lock a buffer.
    #[error("the CUDA driver did not page-lock {bytes}: {code}; allow more locked memory or ask for less")]
    Refused {
        /// The size of the buffer.
        bytes: Bytes,
        /// What it returned.
        code: String,
    },
}

type RawContext = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:ident($($argument:ty),*);)*) => {
        /// The driver's functions.
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            /// The functions of `library`.
            ///
            /// # Safety
            ///
            /// `library` is the CUDA driver, and stays loaded for as long as the value is used.
            unsafe fn bind(library: &libloading::Library) -> Result<Self, PageLockError> {
                Ok(Self {
                    // SAFETY: the signatures are those of cuda.h; the library stays loaded by the contract of this
                    // function.
                    $($field: *unsafe { library.get(stringify!($symbol)) }
                        .map_err(|_| PageLockError::OldDriver { function: stringify!($symbol) })?,)*
                })
            }
        }
    };
}

functions! {
    init = cuInit(c_uint);
    device = cuDeviceGet(*mut c_int, c_int);
    retain = cuDevicePrimaryCtxRetain(*mut RawContext, c_int);
    release = cuDevicePrimaryCtxRelease_v2(c_int);
    push = cuCtxPushCurrent_v2(RawContext);
    pop = cuCtxPopCurrent_v2(*mut RawContext);
    register = cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    unregister = cuMemHostUnregister(*mut c_void);
    error_name = cuGetErrorName(c_int, *mut *const c_char);
}

impl Driver {
    /// The driver, which is loaded by the first call that finds it and stays to the end of the process.
    fn get() -> Result<&'static Self, PageLockError> {
        static LOADED: OnceLock<(Driver, libloading::Library)> = OnceLock::new();
        if let Some((driver, _)) = LOADED.get() {
            return Ok(driver);
        }
        // SAFETY: what the driver does when it is loaded has no conditions.
        let open = |name| unsafe { libloading::Library::new(name) };
        let library = open(NAMES[0]).or_else(|error| open(NAMES[1]).map_err(|_| error)).map_err(|error| {
            // What the loader said is behind libloading's own words.
            let reason = error.source().map_or(error.to_string(), ToString::to_string);
            PageLockError::NoDriver { tried: NAMES.to_vec(), reason }
        })?;
        // SAFETY: it has the driver's name, and both go into the static together.
        let driver = unsafe { Self::bind(&library) }?;
        Ok(&LOADED.get_or_init(|| (driver, library)).0)
    }

    /// The name of a result code, and the code.
    fn explain(&self, code: c_int) -> String {
        let mut name = ptr::null();
        // SAFETY: writes a pointer to text that ends with 0 and is never freed, or to nothing.
        unsafe { (self.error_name)(code, &mut name) };
        if name.is_null() {
            return format!("result code {code}");
        }
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name) };
        format!("{} ({code})", name.to_string_lossy())
    }
}

fn result(code: c_int) -> Result<(), c_int> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}

/// A device's primary context, which the CUDA runtime uses too; retained until this is dropped.
pub(crate) struct Device {
    driver: &'static Driver,
    device: c_int,
    context: RawContext,
}

// SAFETY: the context is a handle that the driver's functions take on any thread.
unsafe impl Send for Device {}

// SAFETY: as for `Send`; the functions may be called by several threads at once.
unsafe impl Sync for Device {}

impl Device {
    /// The device of this number. Its primary context is made if nobody has.
    pub(crate) fn open(number: u32) -> Result<Self, PageLockError> {
        let driver = Driver::get()?;
        let failed = |function| {
            move |code| PageLockError::Device { device: number, function, code: driver.explain(code) }
        };
        let (mut device, mut context) = (0, ptr::null_mut());
        // Beyond what the driver counts to there is no device either.
        let ordinal = c_int::try_from(number).unwrap_or(c_int::MAX);
        // SAFETY: the driver is initialized first, and writes to the two variables.
        unsafe {
            result((driver.init)(0)).map_err(failed("cuInit"))?;
            result((driver.device)(&mut device, ordinal)).map_err(failed("cuDeviceGet"))?;
            result((driver.retain)(&mut context, device)).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        }
        Ok(Self { driver, device, context })
    }

    /// Page-locks `memory`, for all devices.
    ///
    /// # Safety
    ///
    /// The memory must not be freed before [`unregister`](Self::unregister) has succeeded.
    pub(crate) unsafe fn register(&self, memory: &mut [u8]) -> Result<(), PageLockError> {
        // SAFETY: the memory is there, and stays by the contract of this function.
        let registered = self
            .within(|| unsafe { (self.driver.register)(memory.as_mut_ptr().cast(), memory.len(), PORTABLE) });
        let bytes = Bytes::new(memory.len() as u64);
        registered.map_err(|code| PageLockError::Refused { bytes, code: self.driver.explain(code) })
    }

    /// Ends what [`register`](Self::register) began; if this fails, devices may still use the memory.
    pub(crate) fn unregister(&self, memory: &mut [u8]) -> Result<(), String> {
        // SAFETY: the driver knows the memory by its address, and refuses what is not registered.
        let done = self.within(|| unsafe { (self.driver.unregister)(memory.as_mut_ptr().cast()) });
        match done {
            Err(code) if !GONE.contains(&code) => Err(self.driver.explain(code)),
            _ => Ok(()),
        }
    }

    /// Calls a function of the driver with the context current, and leaves the thread with the one that it had.
    fn within(&self, call: impl FnOnce() -> c_int) -> Result<(), c_int> {
        // SAFETY: the context is retained.
        result(unsafe { (self.driver.push)(self.context) })?;
        let done = result(call());
        let mut popped = ptr::null_mut();
        // SAFETY: pops what was pushed above, and writes it to the variable.
        unsafe { (self.driver.pop)(&mut popped) };
        done
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained when this was made. Of no effect where the driver has ended before.
        unsafe { (self.driver.release)(self.device) };
    }
}
