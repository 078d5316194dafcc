//! The file that holds a store's tensors.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use zero_core::Bytes;

use crate::lock::lock;
use crate::store::directory::RunDirectory;
use crate::store::error::StoreError;
use crate::store::space::Space;

/// One file with room for every tensor of a store; dropping it removes it with its directory.
#[derive(Debug)]
pub(crate) struct DataFile {
    file: File,
    path: PathBuf,
    /// Whether transfers go past the page cache and hence must be whole pages.
    direct: bool,
    space: Mutex<Space>,
    directory: RunDirectory,
}

impl DataFile {
    /// Makes the file, past the page cache if `direct` and the file system can do that.
    pub(crate) fn create(directory: RunDirectory, direct: bool) -> Result<Self, StoreError> {
        let path = directory.data();
        let opened = match direct.then(|| open_direct(&path)).transpose() {
            Ok(opened) => opened.flatten(),
            Err(source) => return Err(StoreError::Directory { path, source }),
        };
        let direct = opened.is_some();
        let file = match opened.map_or_else(|| open(&path, 0), Ok) {
            Ok(file) => file,
            Err(source) => return Err(StoreError::Directory { path, source }),
        };
        Ok(Self { file, path, direct, space: Mutex::default(), directory })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn direct(&self) -> bool {
        self.direct
    }

    /// What the file system has left for this user; nothing if that is not known.
    pub(crate) fn unused(&self) -> u64 {
        free_bytes(&self.file).unwrap_or(0)
    }

    /// How much is reserved.
    pub(crate) fn used(&self) -> u64 {
        lock(&self.space).used()
    }

    /// Reserves space for a tensor: afterwards a full disk cannot fail a write to it.
    pub(crate) fn reserve(&self, tensor: &str, length: u64) -> Result<Range<u64>, StoreError> {
        let mut space = lock(&self.space);
        let range = space.take(length);
        let Err(source) = allocate(&self.file, &range) else {
            return Ok(range);
        };
        self.free(&mut space, range);
        drop(space);
        let (tensor, path, wanted) = (tensor.to_owned(), self.path.clone(), Bytes::new(length));
        if source.kind() == io::ErrorKind::StorageFull || source.kind() == io::ErrorKind::QuotaExceeded {
            let free = Bytes::new(self.unused());
            return Err(StoreError::NoSpace { tensor, path, wanted, free });
        }
        Err(StoreError::Reserve { tensor, path, wanted, source })
    }

    /// Ends a reservation; the disk gets its space back.
    pub(crate) fn release(&self, range: Range<u64>) {
        self.free(&mut lock(&self.space), range);
    }

    fn free(&self, space: &mut Space, range: Range<u64>) {
        let end = space.end();
        space.give_back(range.clone());
        let freed =
            if space.end() < end { self.file.set_len(space.end()) } else { punch(&self.file, &range) };
        // Not worth failing for: the space is reused, and comes back when the file goes.
        if let Err(error) = freed {
            tracing::debug!(path = %self.path.display(), ?range, %error, "space is not given back to the disk");
        }
    }
}

fn open(path: &Path, flags: i32) -> io::Result<File> {
    // Whatever is there already is not ours.
    OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(path)
}

/// The new file, past the page cache; none, and no file, where the file system cannot do that. Some say so when
/// the file is opened, others when it is first written to.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<Option<File>> {
    use std::os::unix::fs::FileExt;

    use crate::memory::{Memory, PAGE};

    let tried = open(path, rustix::fs::OFlags::DIRECT.bits() as i32).and_then(|file| {
        let page = Memory::pages(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        file.write_at(page.bytes(), 0)?;
        file.set_len(0)?;
        Ok(file)
    });
    match tried {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(None),
        },
        // A full disk is told when a tensor is reserved, with its name.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => std::fs::remove_file(path).map(|()| None),
        Err(error) => Err(error),
    }
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

/// Takes the blocks of `range` from the disk, longer file included.
fn allocate(file: &File, range: &Range<u64>) -> io::Result<()> {
    let length = range.end - range.start;
    if length == 0 {
        return Ok(());
    }
    #[cfg(target_os = "linux")]
    match retry(|| rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), range.start, length)) {
        Err(rustix::io::Errno::OPNOTSUPP) => {}
        done => return done.map_err(io::Error::from),
    }
    // Second best: a disk that others fill up in the meantime fails the write.
    if free_bytes(file)? < length {
        return Err(io::ErrorKind::StorageFull.into());
    }
    if file.metadata()?.len() < range.end { file.set_len(range.end) } else { Ok(()) }
}

/// Gives the blocks of `range` back to the disk.
#[cfg(target_os = "linux")]
fn punch(file: &File, range: &Range<u64>) -> io::Result<()> {
    use rustix::fs::FallocateFlags;

    if range.is_empty() {
        return Ok(());
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(retry(|| rustix::fs::fallocate(file, mode, range.start, range.end - range.start))?)
}

#[cfg(not(target_os = "linux"))]
fn punch(_file: &File, _range: &Range<u64>) -> io::Result<()> {
    Ok(())
}

/// What the file system has left for this user.
fn free_bytes(file: &File) -> io::Result<u64> {
    let of = rustix::fs::fstatvfs(file)?;
    Ok(of.f_bavail.saturating_mul(of.f_frsize))
}

#[cfg(target_os = "linux")]
fn retry(mut call: impl FnMut() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            done => return done,
        }
    }
}
