//! Checkpoints in a folder of the file system.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};

use crate::storage::{ReadFile, Storage, Usage, WriteFile};

/// What the system transfers past its cache: multiples of this, from and to memory that begins at one.
const PAGE: usize = 4096;

/// The file in each folder that carries the marks.
const MARK: &str = ".lock";

/// A folder of the file system.
///
/// Files are written past the page cache where the file system can do that, and read past it if they are not in it. Marks are `flock`s: on a
/// file system that does not carry them between hosts, they are seen on their own host only.
#[derive(Clone, Debug)]
pub struct LocalStorage {
    root: PathBuf,
}

impl LocalStorage {
    /// The folder at `root`, which is made with the first checkpoint if it does not exist.
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().to_path_buf() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self, path: &str) -> PathBuf {
        // Joining the empty path would append a separator.
        if path.is_empty() { self.root.clone() } else { self.root.join(path) }
    }
}

impl fmt::Display for LocalStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.root.display().fmt(f)
    }
}

impl Storage for LocalStorage {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.path(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is no text is none of ours.
            names.extend(entry?.file_name().into_string().ok().filter(|name| name != MARK));
        }
        names.sort();
        Ok(names)
    }

    fn create_folder(&self, folder: &str) -> io::Result<()> {
        let path = self.path(folder);
        create_durably(&self.root)?;
        fs::create_dir_all(&path)?;
        if !folder.is_empty() {
            File::create(path.join(MARK))?;
        }
        Ok(())
    }

    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        let path = self.path(path);
        let (file, direct) = create(&path, bytes >= PAGE as u64)?;
        reserve(&file, bytes)?;
        Ok(Box::new(Writing { file, direct, written: 0, reserved: bytes }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        let path = self.path(path);
        // A link could lead anywhere, and a pipe would make its reader wait.
        if !fs::symlink_metadata(&path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let file = File::open(&path)?;
        let bytes = file.metadata()?.len();
        let direct = if bytes >= PAGE as u64 { open_direct(&path)? } else { None };
        Ok(Box::new(Reading { file, direct, bytes }))
    }

    fn sync_folder(&self, folder: &str) -> io::Result<()> {
        File::open(self.path(folder))?.sync_all()
    }

    fn renames(&self) -> bool {
        true
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (self.path(from), self.path(to));
        if !to.try_exists()? {
            return fs::rename(from, to);
        }
        exchange(&from, &to)
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.path(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn mark(&self, folder: &str, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let path = self.path(folder).join(MARK);
        let file = match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
            // What cannot be written to is not going to be removed either.
            Err(error) if usage == Usage::Shared && is_read_only(&error) => match File::open(&path) {
                Err(_) => return Ok(Some(Box::new(()))),
                file => file?,
            },
            file => file?,
        };
        let operation = match usage {
            Usage::Shared => FlockOperation::NonBlockingLockShared,
            Usage::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        match rustix::fs::flock(&file, operation) {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Makes a folder and those that it is in; the names of those that were not there are durable.
fn create_durably(folder: &Path) -> io::Result<()> {
    if folder.try_exists()? {
        return Ok(());
    }
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create_durably(parent)?;
    match fs::create_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    File::open(parent)?.sync_all()
}

fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(target_os = "linux")]
fn exchange(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};

    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?)
}

#[cfg(not(target_os = "linux"))]
fn exchange(_from: &Path, to: &Path) -> io::Result<()> {
    let text = format!("{} is there already, and two folders cannot be exchanged here", to.display());
    Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
}

/// The new file, and whether it is written to past the page cache.
#[cfg(target_os = "linux")]
fn create(path: &Path, direct: bool) -> io::Result<(File, bool)> {
    let open = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).custom_flags(flags.bits() as i32).open(path)
    };
    if direct {
        match open(OFlags::DIRECT) {
            // This file system cannot.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            file => return Ok((file?, true)),
        }
    }
    Ok((open(OFlags::empty())?, false))
}

#[cfg(not(target_os = "linux"))]
fn create(path: &Path, _direct: bool) -> io::Result<(File, bool)> {
    Ok((File::create(path)?, false))
}

/// Takes the room for a file, so that a full disk is found before hours of writing.
#[cfg(target_os = "linux")]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;

    if bytes == 0 {
        return Ok(());
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP) => return Ok(()),
            done => return Ok(done?),
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn reserve(_file: &File, _bytes: u64) -> io::Result<()> {
    Ok(())
}

struct Writing {
    file: File,
    direct: bool,
    written: u64,
    reserved: u64,
}

impl Writing {
    /// Writes through the page cache from here on.
    fn leave_direct(&mut self) -> io::Result<()> {
        if self.direct {
            let flags = rustix::fs::fcntl_getfl(&self.file)?;
            rustix::fs::fcntl_setfl(&self.file, flags - direct_flag())?;
            self.direct = false;
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn direct_flag() -> OFlags {
    OFlags::DIRECT
}

#[cfg(not(target_os = "linux"))]
fn direct_flag() -> OFlags {
    OFlags::empty()
}

impl WriteFile for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        if self.direct && rest.as_ptr().addr() % PAGE == 0 {
            let whole = rest.len() / PAGE * PAGE;
            match self.file.write_all(&rest[..whole]) {
                Ok(()) => rest = &rest[whole..],
                // Some file systems say so only now, before anything is written.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput && self.written == 0 => {}
                Err(error) => return Err(error),
            }
        }
        if !rest.is_empty() {
            self.leave_direct()?;
            self.file.write_all(rest)?;
        }
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.written < self.reserved {
            self.file.set_len(self.written)?;
        }
        self.file.sync_all()
    }
}

/// The file for reads past the page cache, where the file system can do that.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<Option<File>> {
    match OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(None),
        file => file.map(Some),
    }
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

struct Reading {
    file: File,
    direct: Option<File>,
    bytes: u64,
}

impl Reading {
    /// Reads whole pages past the page cache, unless they are in it; how many bytes that were.
    #[cfg(target_os = "linux")]
    fn read_direct(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let Some(direct) = &self.direct else { return Ok(0) };
        let whole = into.len() / PAGE * PAGE;
        if whole == 0
            || offset % PAGE as u64 != 0
            || into.as_ptr().addr() % PAGE != 0
            || self.is_cached(offset)
        {
            return Ok(0);
        }
        let mut done = 0;
        while done < whole {
            match direct.read_at(&mut into[done..whole], offset + done as u64) {
                // The file is shorter than it was; who reads the rest finds out.
                Ok(read) if read < PAGE => return Ok(done),
                // A part that ends within a page is read again from the page's beginning.
                Ok(read) => done += read / PAGE * PAGE,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Some file systems say so only now.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(done),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    #[cfg(not(target_os = "linux"))]
    fn read_direct(&self, _offset: u64, _into: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }

    /// Whether the byte at `offset` can be had without the disk.
    #[cfg(target_os = "linux")]
    fn is_cached(&self, offset: u64) -> bool {
        use rustix::io::{ReadWriteFlags, preadv2};

        let mut byte = [0];
        let mut buffers = [io::IoSliceMut::new(&mut byte)];
        preadv2(&self.file, &mut buffers, offset, ReadWriteFlags::NOWAIT).is_ok_and(|read| read == 1)
    }
}

impl ReadFile for Reading {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let done = self.read_direct(offset, into)?;
        self.file.read_exact_at(&mut into[done..], offset + done as u64)
    }
}
