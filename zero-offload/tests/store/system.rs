//! What Linux says no to.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;

use tempfile::TempDir;
use zero_core::Bytes;
use zero_offload::{Engine, NvmeStore, StoreError};

use super::{content, engines, options, read};

/// Lets this thread, and those that it starts, make no ring, as a container's rules do.
fn refuse_io_uring() {
    let code = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let number = libc::SYS_io_uring_setup as u32;
    let mut filter = [
        code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, 0, 1),
        code(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        code(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers, and a program that lives until the call is over.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

#[test]
fn threads_do_the_work_where_the_system_refuses_io_uring() {
    let refused = thread::spawn(|| {
        refuse_io_uring();
        let directory = TempDir::new().unwrap();
        let error = NvmeStore::open(options(directory.path(), Engine::Uring)).unwrap_err();
        assert!(
            matches!(&error, StoreError::NoUring { source } if source.raw_os_error() == Some(libc::EPERM))
        );

        let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
        assert_eq!(store.engine(), Engine::Threads);
        let mut slot = store.reserve("moment", 100_001).unwrap();
        slot.write(0, &content(100_001, 1)).unwrap();
        assert_eq!(read(&slot).unwrap(), content(100_001, 1));
    });
    refused.join().unwrap();
}

/// A small disk of its own.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// None, with the reason printed, where one may not mount.
    fn mount(bytes: u64) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let path = CString::new(directory.path().as_os_str().as_bytes()).unwrap();
        let options = CString::new(format!("size={bytes}")).unwrap();
        // SAFETY: four texts that live until the call is over.
        let mounted = unsafe {
            libc::mount(c"none".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast())
        };
        if mounted == 0 {
            return Some(Self(directory));
        }
        println!("not tested: cannot mount a tmpfs: {}", std::io::Error::last_os_error());
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let path = CString::new(self.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: a text that lives until the call is over.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn a_full_disk_is_told_before_anything_is_written() {
    for engine in engines() {
        let Some(disk) = SmallDisk::mount(1 << 20) else { return };
        let store = NvmeStore::open(options(disk.path(), engine)).unwrap();
        let mut first = store.reserve("first", 300 << 10).unwrap();
        first.write(0, &content(300 << 10, 1)).unwrap();
        match store.reserve("second", 300 << 10).unwrap_err() {
            StoreError::NoSpace { tensor, path, wanted, free } => {
                assert_eq!((tensor.as_str(), wanted), ("second", Bytes::new(600 << 10)));
                assert_eq!(path, store.path().join("data"));
                assert!(free < wanted && free > Bytes::ZERO);
            }
            error => panic!("{error}"),
        }

        // Somebody else takes the rest: what is reserved can still be written.
        let all = vec![1; 2 << 20];
        fs::write(disk.path().join("other"), &all).unwrap_err();
        first.write(0, &content(300 << 10, 2)).unwrap();
        assert_eq!(read(&first).unwrap(), content(300 << 10, 2));
        fs::remove_file(disk.path().join("other")).unwrap();

        drop(first);
        let mut second = store.reserve("second", 300 << 10).unwrap();
        assert_eq!(read(&second).unwrap(), vec![0; 300 << 10]);
        second.write(0, &content(300 << 10, 3)).unwrap();
        assert_eq!(read(&second).unwrap(), content(300 << 10, 3));
    }
}
