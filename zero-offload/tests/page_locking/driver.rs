//! A CUDA driver that has one device, counts what it does and fails as it is told: `page_locking` builds it as a library.

#![allow(non_snake_case, clippy::missing_safety_doc, reason = "the names and the types are NVIDIA's")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

const INVALID_CONTEXT: c_int = 201;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;
const PAGE: usize = 4096;

struct State {
    /// The code that a function fails with.
    failures: BTreeMap<&'static str, c_int>,
    initialized: bool,
    retained: usize,
    /// How often the context is on the stacks of threads.
    pushed: usize,
    /// The length of the memory at each address.
    registered: BTreeMap<usize, usize>,
    registrations: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    failures: BTreeMap::new(),
    initialized: false,
    retained: 0,
    pushed: 0,
    registered: BTreeMap::new(),
    registrations: 0,
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something, unless the function is to fail.
fn unless_failing(function: &str, call: impl FnOnce(&mut State) -> c_int) -> c_int {
    let mut state = state();
    match state.failures.get(function).or_else(|| state.failures.get("all")) {
        Some(&code) => code,
        None => call(&mut state),
    }
}

/// Has a function, or `all`, fail with a code from now on; with 0, no longer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_fail(function: *const c_char, code: c_int) {
    // SAFETY: the test gives text that ends with 0 and is never freed.
    let function = unsafe { CStr::from_ptr(function) }.to_str().unwrap();
    match code {
        0 => state().failures.remove(function),
        _ => state().failures.insert(function, code),
    };
}

/// Writes the number of retained contexts, of contexts on stacks, of buffers and bytes that are registered, and of all
/// registrations; reads every registered byte, which has to be there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_counts(counts: *mut [usize; 5]) {
    let state = state();
    for (&start, &length) in &state.registered {
        for at in start..start + length {
            // SAFETY: whoever registered it keeps it until it is unregistered, or this ends the process.
            unsafe { (at as *const u8).read_volatile() };
        }
    }
    let bytes = state.registered.values().sum();
    // SAFETY: the test gives a place for them.
    unsafe { *counts = [state.retained, state.pushed, state.registered.len(), bytes, state.registrations] };
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    unless_failing("cuInit", |state| {
        state.initialized = true;
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    unless_failing("cuDeviceGet", |state| match (state.initialized, ordinal) {
        (false, _) => 3,
        (true, 0) => {
            // SAFETY: the caller gives a place for it.
            unsafe { *device = 7 };
            0
        }
        (true, _) => 101,
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    unless_failing("cuDevicePrimaryCtxRetain", |state| {
        assert_eq!(device, 7);
        state.retained += 1;
        // SAFETY: the caller gives a place for it.
        unsafe { *context = 70 as *mut c_void };
        0
    })
}

#[cfg(not(old))]
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    unless_failing("cuDevicePrimaryCtxRelease_v2", |state| {
        state.retained -= 1;
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> c_int {
    unless_failing("cuCtxPushCurrent_v2", |state| {
        if state.retained == 0 || context.addr() != 70 {
            return INVALID_CONTEXT;
        }
        state.pushed += 1;
        0
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> c_int {
    unless_failing("cuCtxPopCurrent_v2", |state| {
        state.pushed -= 1;
        // SAFETY: the caller gives a place for it.
        unsafe { *context = 70 as *mut c_void };
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: *mut c_void, length: usize, flags: c_uint) -> c_int {
    unless_failing("cuMemHostRegister_v2", |state| {
        if state.pushed == 0 || flags != 1 {
            return INVALID_CONTEXT;
        }
        let pages = |start: usize, length: usize| start / PAGE..(start + length).div_ceil(PAGE);
        let new = pages(start.addr(), length);
        let overlaps = state.registered.iter().any(|(&start, &length)| {
            let old = pages(start, length);
            old.start < new.end && new.start < old.end
        });
        if overlaps {
            return ALREADY_REGISTERED;
        }
        state.registered.insert(start.addr(), length);
        state.registrations += 1;
        0
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: *mut c_void) -> c_int {
    unless_failing("cuMemHostUnregister", |state| {
        if state.pushed == 0 {
            return INVALID_CONTEXT;
        }
        state.registered.remove(&start.addr()).map_or(NOT_REGISTERED, |_| 0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    let known = match code {
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        _ => return 1,
    };
    // SAFETY: the caller gives a place for it.
    unsafe { *name = known.as_ptr() };
    0
}
