//! A file by which rank 0 tells the other ranks on its host an address.

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::search::{Miss, after, search};
use crate::open_files;

/// The longest address, in bytes. It may be followed by anything else that the others have to know.
const MAX_LENGTH: u64 = 4096;

/// Permission for others than the owner to write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A file by which rank 0 tells the other ranks on its host an address. It is removed when this is dropped.
///
/// It stands in a folder that only the user can enter and write, and appears there as a whole or not at all.
/// Neither a folder nor a file that somebody else owns or may write is trusted. A file that an earlier job left
/// under the same name is replaced; who reads it before finds nobody at its address and looks again.
#[derive(Debug)]
pub struct AddressFile {
    folder: OwnedFd,
    name: OsString,
    /// The file system and the number of the file within it.
    identity: (u64, u64),
}

/// Why an address could not be told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddressFileError {
    /// The file or its folder could have been made or changed by somebody else.
    #[error("{path:?} is not safe: {reason}; remove it, or set TMPDIR to a folder of your own")]
    Unsafe {
        /// The file or folder.
        path: PathBuf,
        /// Why it is not trusted.
        reason: &'static str,
    },

    /// What the file holds, or is to hold, is no address.
    #[error("{path:?} cannot hold an address that is {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },

    /// The operating system refused.
    #[error("{path:?} cannot be {action}: {source}{}", advice(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },

    /// Rank 0 did not come in time.
    #[error(
        "{path:?} did not appear within {after:?}; see what became of rank 0. If a script starts the program, \
         let it `exec` the program, or export MASTER_ADDR and MASTER_PORT"
    )]
    Missing {
        /// The file.
        path: PathBuf,
        /// How long it was waited for.
        after: Duration,
    },

    /// The file is there, but nobody answered at its address.
    #[error(
        "nobody answered at {found:?}, which {path:?} names, within {after:?}: {source}; see what became of rank 0"
    )]
    NobodyAnswers {
        /// The file.
        path: PathBuf,
        /// The address in it; what follows it there may be a secret, and is not shown.
        found: String,
        /// How long it was tried.
        after: Duration,
        /// The last failure to connect.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl AddressFile {
    /// Tells `address`, at which somebody listens already, to whoever looks at `path`. Makes the folder if there is
    /// none, and replaces a file that is there.
    ///
    /// # Errors
    ///
    /// [`AddressFileError::Unsafe`], [`AddressFileError::Io`]; [`AddressFileError::Malformed`] if the address is
    /// empty or longer than 4096 bytes.
    pub fn publish(path: &Path, address: &str) -> Result<Self, AddressFileError> {
        if let Some(reason) = flaw(address.len() as u64) {
            return Err(AddressFileError::Malformed { path: path.to_owned(), reason });
        }
        let (parent, name) = parts(path)?;
        match DirBuilder::new().mode(0o700).create(parent) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(parent, "made", error));
            }
            _ => {}
        }
        let folder = open_folder(parent)?.ok_or_else(|| failed(parent, "opened", Errno::NOENT.into()))?;
        let write = |action, error: Errno| failed(path, action, error.into());

        let mut draft = name.to_owned();
        draft.push(format!(".{}", process::id()));
        // Left over by a process that had the same id.
        match rustix::fs::unlinkat(&folder, &draft, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(write("replaced", error)),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&folder, &draft, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| write("written", error))?;
        let mut file = File::from(file);
        file.write_all(address.as_bytes()).map_err(|error| failed(path, "written", error))?;
        let identity = identity(&file).map_err(|error| failed(path, "written", error))?;
        rustix::fs::renameat(&folder, &draft, &folder, name).map_err(|error| write("written", error))?;
        Ok(Self { folder, name: name.to_owned(), identity })
    }

    /// Connects to the address in the file at `path`, for which it waits. What is found may have been left over by
    /// an earlier job, so if `connect` fails the file is read again, until `patience` is over.
    ///
    /// `connect` gets the address and the time left, and has to return within that time.
    ///
    /// # Errors
    ///
    /// All of [`AddressFileError`].
    pub fn find<T, E>(
        path: &Path,
        patience: Duration,
        connect: impl FnMut(&str, Duration) -> Result<T, E>,
    ) -> Result<T, AddressFileError>
    where
        E: Error + Send + Sync + 'static,
    {
        let found = search(after(patience), || read(path), connect)?;
        let (path, after) = (path.to_owned(), patience);
        found.map_err(|miss| match miss {
            Miss::Nothing => AddressFileError::Missing { path, after },
            Miss::Silent { address: found, cause } => {
                AddressFileError::NobodyAnswers { path, found, after, source: Box::new(cause) }
            }
        })
    }
}

/// How the file is opened to look at it: not where a link leads, and without waiting, as a pipe would make us.
const LOOK: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

impl Drop for AddressFile {
    fn drop(&mut self) {
        // A later job may have replaced the file. What cannot be removed does no harm: nobody answers there.
        let Ok(file) = rustix::fs::openat(&self.folder, &self.name, LOOK, Mode::empty()) else { return };
        if identity(&File::from(file)).is_ok_and(|identity| identity == self.identity) {
            let _ = rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// The address in the file at `path`; `None` if there is no file yet.
fn read(path: &Path) -> Result<Option<String>, AddressFileError> {
    let (parent, name) = parts(path)?;
    let Some(folder) = open_folder(parent)? else { return Ok(None) };
    let file = match rustix::fs::openat(&folder, name, LOOK, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(suspicious(path, "it is a link")),
        Err(error) => return Err(failed(path, "opened", error.into())),
    };
    if !check(path, &file)?.is_file() {
        return Err(suspicious(path, "it is not a file"));
    }
    let mut bytes = Vec::new();
    let length = file.take(MAX_LENGTH + 1).read_to_end(&mut bytes);
    let length = length.map_err(|error| failed(path, "read", error))?;
    let malformed = |reason| AddressFileError::Malformed { path: path.to_owned(), reason };
    match (flaw(length as u64), String::from_utf8(bytes)) {
        (None, Ok(address)) => Ok(Some(address)),
        (None, Err(_)) => Err(malformed("not text")),
        (Some(reason), _) => Err(malformed(reason)),
    }
}

/// What is wrong with an address of this length.
fn flaw(length: u64) -> Option<&'static str> {
    match length {
        0 => Some("empty"),
        1..=MAX_LENGTH => None,
        _ => Some("longer than 4096 bytes"),
    }
}

fn parts(path: &Path) -> Result<(&Path, &OsStr), AddressFileError> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !parent.as_os_str().is_empty() => Ok((parent, name)),
        _ => Err(failed(
            path,
            "used",
            io::Error::new(io::ErrorKind::InvalidInput, "it names no file in a folder"),
        )),
    }
}

/// Opens a folder of the user's own; `None` if there is none yet.
fn open_folder(path: &Path) -> Result<Option<OwnedFd>, AddressFileError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(folder) => {
            let folder = File::from(folder);
            check(path, &folder)?;
            Ok(Some(folder.into()))
        }
        Err(Errno::NOENT) => Ok(None),
        // Which of them a link gives depends on the system.
        Err(Errno::NOTDIR | Errno::LOOP) => Err(suspicious(path, "it is a link or no folder")),
        Err(error) => Err(failed(path, "opened", error.into())),
    }
}

/// Whether an open file or folder is in the hands of this user alone.
fn check(path: &Path, file: &File) -> Result<Metadata, AddressFileError> {
    let metadata = file.metadata().map_err(|error| failed(path, "examined", error))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(suspicious(path, "somebody else owns it"));
    }
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(suspicious(path, "others may write to it"));
    }
    Ok(metadata)
}

fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

fn suspicious(path: &Path, reason: &'static str) -> AddressFileError {
    AddressFileError::Unsafe { path: path.to_owned(), reason }
}

fn failed(path: &Path, action: &'static str, error: io::Error) -> AddressFileError {
    AddressFileError::Io { path: path.to_owned(), action, source: open_files::advised(error) }
}

/// What to do where the system refuses, unless the error says that itself.
fn advice(error: &io::Error) -> &'static str {
    if open_files::are_exhausted(error) { "" } else { "; set TMPDIR to a folder of your own that has room" }
}
