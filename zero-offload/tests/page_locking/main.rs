//! Page-locked memory, with a driver that a test builds: each test runs in a process of its own that finds it.

#![cfg(target_os = "linux")]

use std::env;
use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use zero_core::Bytes;
use zero_offload::{HostPool, PageLockError, PageLocking, PoolOptions};

/// Set in the processes that run a test.
const CHILD: &str = "FINDS_THE_DRIVER";

/// Which driver a process finds.
#[derive(Clone, Copy, PartialEq)]
enum Found {
    Driver,
    /// One that lacks a function.
    Old,
    /// Files of its name that are none.
    Nothing,
}

/// Runs `body` in a process that finds such a driver. `name` is the test's.
fn with(found: Found, name: &str, body: fn()) {
    if env::var_os(CHILD).is_some() {
        return body();
    }
    let folder = TempDir::new().unwrap();
    match found {
        Found::Nothing => ["libcuda.so.1", "libcuda.so"]
            .into_iter()
            .for_each(|name| fs::write(folder.path().join(name), "no library").unwrap()),
        Found::Driver => build(folder.path(), &[]),
        Found::Old => build(folder.path(), &["--cfg", "old"]),
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", name])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{output:?}");
}

fn build(folder: &Path, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page_locking/driver.rs");
    let output = Command::new(env::var_os("RUSTC").unwrap_or("rustc".into()))
        .args(["--edition", "2024", "--crate-type", "cdylib", "-D", "warnings", "--check-cfg", "cfg(old)"])
        .args(options)
        .arg("-o")
        .arg(folder.join("libcuda.so.1"))
        .arg(source)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The driver, to ask and to tell what nobody asks or tells NVIDIA's.
struct Fake(libloading::Library);

#[derive(Debug, Default, PartialEq)]
struct Counts {
    retained: usize,
    pushed: usize,
    buffers: usize,
    bytes: usize,
    registrations: usize,
}

impl Fake {
    fn load() -> Self {
        // SAFETY: it does nothing when it is loaded.
        Self(unsafe { libloading::Library::new("libcuda.so.1") }.unwrap())
    }

    fn fail(&self, function: &'static CStr, code: c_int) {
        // SAFETY: the function's own signature.
        unsafe {
            let fail: libloading::Symbol<'_, unsafe extern "C" fn(*const c_char, c_int)> =
                self.0.get("fake_fail").unwrap();
            fail(function.as_ptr(), code);
        }
    }

    fn counts(&self) -> Counts {
        let mut counts = [0; 5];
        // SAFETY: as above.
        unsafe {
            let write: libloading::Symbol<'_, unsafe extern "C" fn(*mut [usize; 5])> =
                self.0.get("fake_counts").unwrap();
            write(&mut counts);
        }
        let [retained, pushed, buffers, bytes, registrations] = counts;
        Counts { retained, pushed, buffers, bytes, registrations }
    }
}

/// A pool that keeps up to 10 MiB.
fn pool() -> HostPool {
    HostPool::page_locked(PoolOptions { retain: Bytes::new(10 << 20) }, 0)
}

fn fallback(pool: &HostPool) -> PageLockError {
    match pool.page_locking() {
        PageLocking::Fallback(error) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_page_locked_until_it_is_freed() {
    with(Found::Driver, "memory_is_page_locked_until_it_is_freed", || {
        let (fake, pool) = (Fake::load(), pool());
        assert_eq!(pool.page_locking(), PageLocking::On);
        let mut buffers = [0, 1, 4096, 4097, 3 << 20].map(|bytes| pool.take(bytes));
        for buffer in &mut buffers {
            buffer.fill(7);
            assert_eq!(buffer.is_page_locked(), !buffer.is_empty());
            assert!(buffer.is_empty() || buffer.as_ptr().addr() % 4096 == 0);
        }
        let bytes = 4096 + 4096 + 8192 + (3 << 20);
        let expected = Counts { retained: 1, pushed: 0, buffers: 4, bytes, registrations: 4 };
        assert_eq!(fake.counts(), expected);

        // Idle memory stays what it is, and is used again as that.
        drop(buffers);
        assert_eq!(fake.counts(), expected);
        assert!(pool.take(3 << 20).is_page_locked());
        assert_eq!(fake.counts(), expected);
        pool.trim();
        assert_eq!(fake.counts(), Counts { retained: 1, registrations: 4, ..Counts::default() });
    });
}

#[test]
fn the_context_stays_until_the_last_buffer_is_gone() {
    with(Found::Driver, "the_context_stays_until_the_last_buffer_is_gone", || {
        let (fake, pool) = (Fake::load(), pool());
        let (kept, idle) = (pool.take(1 << 20), pool.take(1 << 20));
        drop(idle);
        drop(pool);
        assert_eq!((fake.counts().retained, fake.counts().buffers), (1, 2));
        drop(kept);
        assert_eq!(fake.counts(), Counts { registrations: 2, ..Counts::default() });
    });
}

#[test]
fn an_ordinary_pool_asks_no_driver() {
    with(Found::Driver, "an_ordinary_pool_asks_no_driver", || {
        let (fake, pool) = (Fake::load(), HostPool::default());
        assert!(!pool.take(1 << 20).is_page_locked());
        assert_eq!((pool.page_locking(), fake.counts()), (PageLocking::Off, Counts::default()));
    });
}

#[test]
fn threads_share_a_pool_of_page_locked_memory() {
    with(Found::Driver, "threads_share_a_pool_of_page_locked_memory", || {
        let (fake, pool) = (Fake::load(), pool());
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..50 {
                        let mut buffer = pool.take(thread * 1_000_000 + round % 3);
                        buffer[0] = 1;
                        assert!(buffer.is_page_locked());
                    }
                });
            }
        });
        drop(pool);
        let Counts { registrations, .. } = fake.counts();
        assert!(registrations >= 12);
        assert_eq!(fake.counts(), Counts { registrations, ..Counts::default() });
    });
}

#[test]
fn what_the_driver_refuses_is_ordinary_memory() {
    with(Found::Driver, "what_the_driver_refuses_is_ordinary_memory", || {
        let (fake, pool) = (Fake::load(), pool());
        let before = pool.take(1 << 20);
        fake.fail(c"cuMemHostRegister_v2", 2);
        let mut refused = pool.take(2 << 20);
        refused.fill(9);
        assert!(before.is_page_locked() && !refused.is_page_locked());
        fake.fail(c"cuCtxPushCurrent_v2", 999);
        assert!(!pool.take(500).is_page_locked());
        // Of several reasons, the first.
        let code = "CUDA_ERROR_OUT_OF_MEMORY (2)".to_owned();
        assert_eq!(fallback(&pool), PageLockError::Refused { bytes: Bytes::new(2 << 20), code });
        let message = fallback(&pool).to_string();
        assert!(message.contains("2.0 MiB") && message.contains("allow more locked memory"), "{message}");

        fake.fail(c"cuMemHostRegister_v2", 0);
        fake.fail(c"cuCtxPushCurrent_v2", 0);
        assert!(pool.take(3 << 20).is_page_locked());
        drop((before, refused, pool));
        assert_eq!(fake.counts(), Counts { registrations: 2, ..Counts::default() });
    });
}

#[test]
fn a_device_that_cannot_be_used_leaves_ordinary_memory() {
    with(Found::Driver, "a_device_that_cannot_be_used_leaves_ordinary_memory", || {
        let fake = Fake::load();
        let check = |device, function, code: &str| {
            let pool = HostPool::page_locked(PoolOptions::default(), device);
            let mut buffer = pool.take(1 << 20);
            buffer.fill(1);
            assert!(!buffer.is_page_locked());
            let code = code.to_owned();
            assert_eq!(fallback(&pool), PageLockError::Device { device, function, code });
        };
        check(1, "cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE (101)");
        check(u32::MAX, "cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE (101)");
        fake.fail(c"cuDevicePrimaryCtxRetain", 46);
        check(0, "cuDevicePrimaryCtxRetain", "result code 46");
        fake.fail(c"cuInit", 100);
        check(0, "cuInit", "CUDA_ERROR_NO_DEVICE (100)");
        assert_eq!(fake.counts(), Counts::default());
    });
}

#[test]
fn memory_that_the_driver_does_not_let_go_is_not_freed() {
    with(Found::Driver, "memory_that_the_driver_does_not_let_go_is_not_freed", || {
        let (fake, pool) = (Fake::load(), pool());
        let buffer = pool.take(5 << 20);
        // What a device did wrong before.
        fake.fail(c"cuMemHostUnregister", 700);
        drop(buffer);
        pool.trim();
        // Counting reads it.
        assert_eq!(
            fake.counts(),
            Counts { retained: 1, buffers: 1, bytes: 5 << 20, registrations: 1, pushed: 0 }
        );
        assert_eq!((pool.live(), pool.idle()), (Bytes::ZERO, Bytes::ZERO));
    });
}

#[test]
fn buffers_outlive_a_driver_that_has_ended() {
    with(Found::Driver, "buffers_outlive_a_driver_that_has_ended", || {
        let (fake, pool) = (Fake::load(), pool());
        let buffers = [1, 1 << 20].map(|bytes| pool.take(bytes));
        // What it says to everything while the process ends.
        fake.fail(c"all", 4);
        drop(buffers);
        pool.trim();
        assert!(!pool.take(10).is_page_locked());
    });
}

#[test]
fn a_driver_without_a_function_leaves_ordinary_memory() {
    with(Found::Old, "a_driver_without_a_function_leaves_ordinary_memory", || {
        let pool = pool();
        assert!(!pool.take(10).is_page_locked());
        let function = "cuDevicePrimaryCtxRelease_v2";
        assert_eq!(fallback(&pool), PageLockError::OldDriver { function });
    });
}

#[test]
fn where_there_is_no_driver_memory_is_ordinary_and_the_reason_is_told() {
    with(Found::Nothing, "where_there_is_no_driver_memory_is_ordinary_and_the_reason_is_told", || {
        let pool = pool();
        let mut buffer = pool.take(1 << 20);
        buffer.fill(1);
        assert!(!buffer.is_page_locked());
        let error = fallback(&pool);
        let PageLockError::NoDriver { tried, reason } = &error else { panic!("{error}") };
        assert_eq!(tried, &["libcuda.so.1", "libcuda.so"]);
        assert!(!reason.is_empty() && error.to_string().contains("libcuda.so.1 or libcuda.so"), "{error}");
    });
}
