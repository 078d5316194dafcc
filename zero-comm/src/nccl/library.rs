//! NVIDIA's libraries, looked for when they are first needed, and the functions of NCCL.
//!
//! The functions are declared here and not taken from cudarc, because that looks for `libnccl.so` alone,
//! where NVIDIA's runtime packages install `libnccl.so.2`, panics if it finds nothing, and takes result codes
//! as an enumeration, which a newer NCCL may leave.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use super::error::NcclError;

/// A communicator as NCCL knows it.
pub(super) type RawCommunicator = *mut c_void;
/// A CUDA stream.
pub(super) type RawStream = *mut c_void;

/// What ranks need to find each other (`ncclUniqueId`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// How a communicator behaves: the fields of `ncclConfig_t` that NCCL 2.14 had.
///
/// NCCL reads as much as `size` says and takes defaults for fields that are younger than `version`.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// No function waits for other ranks.
    pub(super) const NON_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 };
}

/// Result codes that mean something here; all others are errors.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// The color of a rank that joins no group.
pub(super) const NO_COLOR: c_int = -1;

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

impl NcclVersion {
    /// The first version that can split communicators.
    const OLDEST: Self = Self { major: 2, minor: 18, patch: 0 };

    const fn from_code(code: u32) -> Self {
        // Up to 2.8 there was one digit less between the numbers.
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Self { major: code / unit, minor: code % unit / 100, patch: code % 100 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:ident($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of NCCL, by their names without `nccl`.
        pub(super) struct Library {
            pub(super) version: NcclVersion,
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            /// The functions of `library`, or the name of one that it does not have.
            ///
            /// # Safety
            ///
            /// `library` is NCCL of at least version 2.18, and stays loaded for as long as the value is used.
            unsafe fn bind(
                library: &libloading::Library,
                version: NcclVersion,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    version,
                    // SAFETY: the signatures are those of nccl.h, which keeps them within version 2; the
                    // library stays loaded by the contract of this function.
                    $($field: *unsafe { library.get(stringify!($symbol)) }
                        .map_err(|_| stringify!($symbol))?,)*
                })
            }
        }
    };
}

functions! {
    get_unique_id = ncclGetUniqueId(*mut UniqueId) -> c_int;
    init_rank_config = ncclCommInitRankConfig(
        *mut RawCommunicator, c_int, UniqueId, c_int, *mut Config
    ) -> c_int;
    split = ncclCommSplit(RawCommunicator, c_int, c_int, *mut RawCommunicator, *mut Config) -> c_int;
    finalize = ncclCommFinalize(RawCommunicator) -> c_int;
    destroy = ncclCommDestroy(RawCommunicator) -> c_int;
    abort = ncclCommAbort(RawCommunicator) -> c_int;
    get_async_error = ncclCommGetAsyncError(RawCommunicator, *mut c_int) -> c_int;
    get_error_string = ncclGetErrorString(c_int) -> *const c_char;
    get_last_error = ncclGetLastError(RawCommunicator) -> *const c_char;
    group_start = ncclGroupStart() -> c_int;
    group_end = ncclGroupEnd() -> c_int;
    all_reduce = ncclAllReduce(
        *const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream
    ) -> c_int;
    all_gather = ncclAllGather(
        *const c_void, *mut c_void, usize, c_int, RawCommunicator, RawStream
    ) -> c_int;
    reduce_scatter = ncclReduceScatter(
        *const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream
    ) -> c_int;
    broadcast = ncclBroadcast(
        *const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, RawStream
    ) -> c_int;
    reduce = ncclReduce(
        *const c_void, *mut c_void, usize, c_int, c_int, c_int, RawCommunicator, RawStream
    ) -> c_int;
    send = ncclSend(*const c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    receive = ncclRecv(*mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
}

impl Library {
    /// NCCL, which is loaded by the first call that finds it and stays: its threads outlive communicators.
    pub(super) fn get() -> Result<&'static Self, NcclError> {
        static LOADED: OnceLock<(Library, libloading::Library)> = OnceLock::new();
        if let Some((library, _)) = LOADED.get() {
            return Ok(library);
        }
        let (name, loaded) = open(&["libnccl.so.2", "libnccl.so"])
            .map_err(|Missing { tried, reason }| NcclError::LibraryMissing { tried, reason })?;
        let unfit = |reason| NcclError::LibraryUnfit { library: name.to_owned(), reason };
        let version = version_of(&loaded).map_err(unfit)?;
        if version < NcclVersion::OLDEST {
            return Err(unfit(format!("it is of version {version}")));
        }
        // SAFETY: its version was looked at, and both go into the static together.
        let library = unsafe { Self::bind(&loaded, version) }
            .map_err(|symbol| unfit(format!("it has no function {symbol}")))?;
        tracing::debug!(name, %version, "loaded NCCL");
        Ok(&LOADED.get_or_init(|| (library, loaded)).0)
    }

    /// What NCCL calls `code`, and the last error it noted, if any.
    pub(super) fn explain(&self, code: c_int, raw: RawCommunicator) -> String {
        // SAFETY: `raw` is not looked into; the result is text that ends with 0 and is never freed.
        let texts = unsafe { [(self.get_error_string)(code), (self.get_last_error)(raw)] };
        let texts = texts.into_iter().filter(|text| !text.is_null()).map(|text| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
        });
        texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ")
    }
}

/// Loads the CUDA driver, unless it is loaded. cudarc, which finds it by the same names, would panic.
pub(super) fn require_driver() -> Result<(), NcclError> {
    // Unloading and loading it again is slow.
    static LOADED: OnceLock<libloading::Library> = OnceLock::new();
    if LOADED.get().is_none() {
        let (_, driver) = open(&["libcuda.so.1", "libcuda.so"])
            .map_err(|Missing { tried, reason }| NcclError::DriverMissing { tried, reason })?;
        LOADED.get_or_init(|| driver);
    }
    Ok(())
}

struct Missing {
    tried: Vec<String>,
    reason: String,
}

/// Loads the first of `names` that there is.
fn open(names: &[&'static str]) -> Result<(&'static str, libloading::Library), Missing> {
    let mut first = None;
    for name in names {
        // SAFETY: what NVIDIA's libraries do when they are loaded has no conditions.
        match unsafe { libloading::Library::new(*name) } {
            Ok(library) => return Ok((name, library)),
            Err(error) => {
                // What the loader said is behind libloading's own words.
                first.get_or_insert_with(|| error.source().map_or(error.to_string(), ToString::to_string));
            }
        }
    }
    Err(Missing { tried: names.iter().map(ToString::to_string).collect(), reason: first.unwrap_or_default() })
}

fn version_of(library: &libloading::Library) -> Result<NcclVersion, String> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut code = 0;
    // SAFETY: every NCCL has the function with this signature, and writes one number.
    let result = unsafe {
        match library.get::<GetVersion>("ncclGetVersion") {
            Ok(get_version) => get_version(&mut code),
            Err(_) => return Err("it has no function ncclGetVersion".to_owned()),
        }
    };
    match u32::try_from(code) {
        Ok(code) if result == SUCCESS => Ok(NcclVersion::from_code(code)),
        _ => Err(format!("asked for its version, it says {code} with result code {result}")),
    }
}

#[cfg(test)]
mod tests {
    use super::NcclVersion;

    #[test]
    fn versions_are_read_and_compared() {
        let version = |code| NcclVersion::from_code(code).to_string();
        assert_eq!(version(2708), "2.7.8");
        assert_eq!(version(21_400), "2.14.0");
        assert_eq!(version(23_007), "2.30.7");
        assert!(NcclVersion::from_code(21_703) < NcclVersion::OLDEST);
        assert!(NcclVersion::from_code(21_801) >= NcclVersion::OLDEST);
    }
}
