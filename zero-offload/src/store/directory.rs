//! The directory of one store, which nobody else touches while it is there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;

use rustix::fs::{FlockOperation, OFlags, flock};

use crate::store::error::StoreError;
use crate::store::options::StoreOptions;

/// What the directories of all stores are called, before the run, the rank and a number.
const PREFIX: &str = "zero-offload-";
/// Locked as long as its store lives, also if the process is killed. Holds the id of the process, for people.
const LOCK: &str = "lock";
/// Holds the tensors.
const DATA: &str = "data";

/// A directory that this store alone uses; dropping it removes it.
#[derive(Debug)]
pub(crate) struct RunDirectory {
    path: PathBuf,
    /// Closing it gives up the lock.
    _lock: File,
}

impl RunDirectory {
    /// Makes a directory of its own within the one that the options name, after removing what dead stores left.
    pub(crate) fn create(options: &StoreOptions) -> Result<Self, StoreError> {
        let parent = &options.directory;
        let failed = |source| StoreError::Directory { path: parent.clone(), source };
        // Relative paths would break if the process changed its directory.
        let parent = parent.canonicalize().map_err(failed)?;
        sweep(&parent).map_err(failed)?;
        let rank = options.rank.index();
        // Every number is tried once: what is in the way stays.
        let mut number = 0_u64;
        loop {
            let path = parent.join(format!("{PREFIX}{}-{rank}-{number}", options.run));
            number += 1;
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(StoreError::Directory { path, source }),
            }
            match claim(&path) {
                Ok(Some(lock)) => return Ok(Self { path, _lock: lock }),
                Ok(None) => {}
                Err(source) => {
                    // If nobody else has put anything there.
                    let _ = fs::remove_dir(&path);
                    return Err(StoreError::Directory { path, source });
                }
            }
        }
    }

    /// Where the tensors are.
    pub(crate) fn data(&self) -> PathBuf {
        self.path.join(DATA)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Locks a directory that was just made. None if somebody who swept took it for a dead store's: then it is gone, or
/// another store's by now.
fn claim(path: &Path) -> io::Result<Option<File>> {
    let path = path.join(LOCK);
    let mut lock = match File::create_new(&path) {
        Ok(lock) => lock,
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::AlreadyExists].contains(&error.kind()) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let claimed = try_lock(&lock).and_then(|locked| {
        if locked {
            writeln!(lock, "{}", process::id())?;
        }
        Ok(locked)
    });
    if claimed.is_err() {
        // Nobody sweeps where locks do not work, or a lock is ours.
        let _ = fs::remove_file(&path);
    }
    Ok(claimed?.then_some(lock))
}

/// Whether the lock could be had, and is still that of its directory: whoever had it before may have removed both.
fn try_lock(lock: &File) -> io::Result<bool> {
    loop {
        return match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(lock.metadata()?.nlink() > 0),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => Err(error.into()),
        };
    }
}

/// Removes the directories of stores whose processes are gone.
fn sweep(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        match options.open(path.join(LOCK)) {
            Ok(lock) => {
                // Held until the directory is gone.
                if try_lock(&lock)? {
                    tracing::info!(path = %path.display(), "removing what a dead store left");
                    remove(&path);
                }
            }
            // Its store died before it had a lock, or is about to make one and will try again. Only an empty
            // directory can be removed so.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let _ = fs::remove_dir(&path);
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot tell whether its store lives")
            }
        }
    }
    Ok(())
}

/// Removes a store's directory, but nothing that a store did not put there. The lock goes last: until then
/// nobody else takes the directory for theirs.
fn remove(path: &Path) {
    let removed = [DATA, LOCK].iter().try_for_each(|name| match fs::remove_file(path.join(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    });
    if let Err(error) = removed.and_then(|()| fs::remove_dir(path))
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "cannot remove the directory of a store");
    }
}
