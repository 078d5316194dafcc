//! A piece of shared memory. The only file here that makes and unmakes mappings.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::process;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Resource, getrlimit};

use crate::open_files;

/// An anonymous file whose memory processes share. Parts that nobody has written to take no memory.
#[derive(Clone, Debug)]
pub(crate) struct SharedFile(Arc<File>);

impl SharedFile {
    /// A new, empty file.
    pub(crate) fn create() -> io::Result<Self> {
        let file = memfd_create(c"zero-comm", MemfdFlags::CLOEXEC);
        Ok(Self(Arc::new(file.map_err(|errno| open_files::advised(errno.into()))?.into())))
    }

    /// The file of another process of this host, by what its [`path`](Self::path) says.
    pub(crate) fn open(path: &str) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        Ok(Self(Arc::new(file.map_err(open_files::advised)?)))
    }

    /// Where other processes of this host can open the file, for as long as this process has it.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_raw_fd())
    }

    /// Makes the file `length` bytes long. New bytes are zero.
    ///
    /// # Errors
    ///
    /// Those of the operating system. A file beyond the limit on their size would be answered with a signal that
    /// ends this process.
    pub(crate) fn set_length(&self, length: u64) -> io::Result<()> {
        if let Some(limit) = getrlimit(Resource::Fsize).current.filter(|limit| *limit < length) {
            return Err(io::Error::other(format!(
                "files may have {limit} bytes at most, and the memory is a file of {length}, though few of them \
                 are used; lift that limit (`ulimit -f unlimited`)"
            )));
        }
        Ok(ftruncate(&self.0, length)?)
    }

    /// Makes sure that there is memory for a range, which without this is found out when it is written to.
    pub(crate) fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(fallocate(&self.0, FallocateFlags::empty(), offset, length)?)
    }

    /// Gives the memory of a range back; its bytes are zero from now on.
    pub(crate) fn release(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?)
    }
}

/// A range of a [`SharedFile`] in this process's memory.
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to no thread; what is shared in it is reached by atomics, or by the slices
// whose makers answer for exclusion.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `length` bytes from `offset` on, a multiple of the page size. The file must be that long.
    pub(crate) fn map(file: &SharedFile, offset: u64, length: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that nothing else uses.
        let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, &file.0, offset)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, length })
    }

    pub(crate) const fn len(&self) -> usize {
        self.length
    }

    /// The counter at `offset`, a multiple of 4.
    pub(crate) fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset % 4 == 0 && offset + 4 <= self.length, "no counter at {offset}");
        // SAFETY: it lies in the mapping and is aligned, as the mapping is to a page; zero bytes are valid,
        // and the word is only ever reached as an atomic.
        unsafe { self.start.add(offset).cast().as_ref() }
    }

    /// The counter at `offset`, a multiple of 8.
    pub(crate) fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset + 8 <= self.length, "no counter at {offset}");
        // SAFETY: as in `u32`.
        unsafe { self.start.add(offset).cast().as_ref() }
    }

    /// Bytes to read.
    ///
    /// # Safety
    ///
    /// Nobody, in any process, writes them while the slice lives.
    pub(crate) unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        assert!(offset <= self.length && length <= self.length - offset, "no bytes at {offset}");
        // SAFETY: they lie in the mapping, which lives as long as the borrow; the rest is the caller's.
        unsafe { slice::from_raw_parts(self.start.add(offset).as_ptr(), length) }
    }

    /// Bytes to write.
    ///
    /// # Safety
    ///
    /// Nobody else, in any process, reads or writes them while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller answers for exclusion")]
    pub(crate) unsafe fn bytes_mut(&self, offset: usize, length: usize) -> &mut [u8] {
        assert!(offset <= self.length && length <= self.length - offset, "no bytes at {offset}");
        // SAFETY: as in `bytes`.
        unsafe { slice::from_raw_parts_mut(self.start.add(offset).as_ptr(), length) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is what `map` got, and no borrow of it outlives `self`.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::warn!(%error, "could not unmap shared memory");
        }
    }
}
