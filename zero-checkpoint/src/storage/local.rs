//! Checkpoints in a folder of the file system.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use crate::folder;
use crate::memory::PAGE;
use crate::storage::{ReadFile, ReadFolder, Storage, Usage, WriteFile};

/// The file in each folder that carries the marks.
const MARK: &str = ".lock";

/// How often a folder is made or marked that somebody else removes or replaces meanwhile.
const ATTEMPTS: usize = 10;

/// A folder of the file system.
///
/// Files are written past the page cache where the file system can do that, and read past it if they are not in it. Marks
/// are `flock`s: on a file system that does not carry them between hosts, they are seen on their own host only. Where two
/// folders cannot exchange their names at once, as on NFS, a checkpoint that is replaced has none for a moment; if its
/// process dies in it, the old one is found as `step-….replaced-…`.
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
        if folder.is_empty() {
            return Ok(());
        }
        for _ in 0..ATTEMPTS {
            fs::create_dir_all(&path)?;
            match File::create(path.join(MARK)) {
                // Somebody sweeps what is not marked yet.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                made => return made.map(drop),
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "somebody removes it as soon as it is there"))
    }

    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        let path = self.path(path);
        let (file, direct) = create(&path, bytes >= PAGE as u64)?;
        reserve(&file, bytes)?;
        Ok(Box::new(Writing { file, direct, written: 0, reserved: bytes }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        Ok(Box::new(Reading::open(CWD, &self.path(path))?))
    }

    fn open_folder(&self, folder: &str) -> io::Result<Option<Box<dyn ReadFolder>>> {
        Ok(Some(Box::new(OpenFolder(File::open(self.path(folder))?))))
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
        let path = self.path(folder);
        for _ in 0..ATTEMPTS {
            let folder = OpenFolder(File::open(&path)?);
            let Some(mark) = folder.mark_for(usage)? else { return Ok(None) };
            // Else another folder has got the name before the mark was there.
            if is_at(&folder.0, &path)? {
                return Ok(Some(mark));
            }
        }
        Err(io::Error::other("its name goes from folder to folder; let one run save here"))
    }
}

struct OpenFolder(File);

impl OpenFolder {
    fn mark_for(&self, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let open = |flags| openat(&self.0, MARK, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o666));
        let file = match open(OFlags::RDWR | OFlags::CREATE) {
            // What cannot be written to is not going to be removed either.
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) if usage == Usage::Shared => {
                match open(OFlags::RDONLY) {
                    Err(_) => return Ok(Some(Box::new(()))),
                    Ok(file) => file,
                }
            }
            file => file?,
        };
        let file = File::from(file);
        // Without a name, it belongs to a folder that has been removed.
        let marked = lock(&file, usage)? && file.metadata()?.nlink() > 0;
        Ok(marked.then(|| Box::new(file) as Box<dyn Send + Sync>))
    }
}

impl ReadFolder for OpenFolder {
    fn open(&self, name: &str) -> io::Result<Box<dyn ReadFile>> {
        Ok(Box::new(Reading::open(self.0.as_fd(), Path::new(name))?))
    }

    fn mark(&self) -> io::Result<Option<Box<dyn Send + Sync>>> {
        self.mark_for(Usage::Shared)
    }
}

/// Whether a file could be locked; not if somebody else's lock does not go with it.
fn lock(file: &File, usage: Usage) -> io::Result<bool> {
    let operation = match usage {
        Usage::Shared => FlockOperation::NonBlockingLockShared,
        Usage::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this file system has no locks (flock), which tell what is in use; mount it with locks, as Lustre with \
             `-o flock`, or keep checkpoints elsewhere",
        )),
        Err(error) => Err(error.into()),
    }
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|found| (found.dev(), found.ino()) == (own.dev(), own.ino())),
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

#[cfg(target_os = "linux")]
fn exchange(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{RenameFlags, renameat_with};

    match renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE) {
        // This file system cannot, or this kernel.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => step_aside(from, to),
        done => Ok(done?),
    }
}

#[cfg(not(target_os = "linux"))]
fn exchange(from: &Path, to: &Path) -> io::Result<()> {
    step_aside(from, to)
}

/// Exchanges two folders' names one after the other.
fn step_aside(from: &Path, to: &Path) -> io::Result<()> {
    let mut aside = to.as_os_str().to_owned();
    // Not the name of a leftover: after a crash, it may be the only complete one.
    aside.push(format!(".replaced-{}", folder::nonce()));
    fs::rename(to, &aside)?;
    if let Err(error) = fs::rename(from, to) {
        // What is wrong is told already.
        let _ = fs::rename(&aside, to);
        return Err(error);
    }
    fs::rename(&aside, from)
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
            match self.file.write_all_at(&rest[..whole], self.written) {
                Ok(()) => {
                    self.written += whole as u64;
                    rest = &rest[whole..];
                }
                // Some file systems say so only now, or after a part that ends within a page: all of it is written again.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                Err(error) => return Err(error),
            }
        }
        if !rest.is_empty() {
            self.leave_direct()?;
            self.file.write_all_at(rest, self.written)?;
            self.written += rest.len() as u64;
        }
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
fn open_direct(folder: BorrowedFd<'_>, path: &Path) -> io::Result<Option<File>> {
    match openat(folder, path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::INVAL) => Ok(None),
        file => Ok(Some(file?.into())),
    }
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_folder: BorrowedFd<'_>, _path: &Path) -> io::Result<Option<File>> {
    Ok(None)
}

struct Reading {
    file: File,
    direct: Option<File>,
    bytes: u64,
}

impl Reading {
    /// The file at a path that is counted from a folder.
    fn open(folder: BorrowedFd<'_>, path: &Path) -> io::Result<Self> {
        // A link could lead anywhere, and a pipe would make its reader wait.
        let found = statat(folder, path, AtFlags::SYMLINK_NOFOLLOW)?;
        if !FileType::from_raw_mode(found.st_mode).is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(openat(folder, path, flags, Mode::empty())?);
        let bytes = file.metadata()?.len();
        let direct = if bytes >= PAGE as u64 { open_direct(folder, path)? } else { None };
        Ok(Self { file, direct, bytes })
    }

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

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::{LocalStorage, OpenFolder, is_at, step_aside};
    use crate::storage::{ReadFolder, Storage, Usage};

    #[test]
    fn names_are_exchanged_one_after_the_other_where_they_cannot_be_at_once() {
        let root = TempDir::new().unwrap();
        let (from, to) = (root.path().join("new"), root.path().join("step"));
        for folder in [&from, &to] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("content"), folder.as_os_str().as_encoded_bytes()).unwrap();
        }
        let content = |folder| fs::read_to_string(root.path().join(folder).join("content")).unwrap();
        step_aside(&from, &to).unwrap();
        assert!(content("step").ends_with("new") && content("new").ends_with("step"));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);

        step_aside(&root.path().join("nothing"), &to).unwrap_err();
        assert!(content("step").ends_with("new"), "it is back in its place");
    }

    #[test]
    fn a_lock_on_what_has_lost_its_name_is_no_mark() {
        let root = TempDir::new().unwrap();
        let storage = LocalStorage::new(root.path());
        ["old", "new"].iter().for_each(|folder| storage.create_folder(folder).unwrap());
        let path = root.path().join("old");
        let folder = OpenFolder(fs::File::open(&path).unwrap());
        assert!(folder.mark().unwrap().is_some() && is_at(&folder.0, &path).unwrap());
        storage.rename("new", "old").unwrap();
        assert!(!is_at(&folder.0, &path).unwrap());
        assert!(storage.mark("old", Usage::Exclusive).unwrap().is_some());
        fs::remove_dir_all(root.path().join("new")).unwrap();
        folder.mark().map(drop).unwrap_err();
    }
}
