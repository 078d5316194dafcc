//! What Linux says no to.

use std::thread;

use tempfile::TempDir;
use zero_offload::{Engine, NvmeStore, StoreError};

use super::{content, options, read};

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
