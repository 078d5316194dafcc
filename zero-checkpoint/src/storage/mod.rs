//! Where checkpoints are kept.

#[cfg(unix)]
mod local;
mod marks;
mod memory;
#[cfg(feature = "object_store")]
mod object;

use std::fmt::{Debug, Display};
use std::io;

#[cfg(unix)]
pub use local::LocalStorage;
pub use memory::MemoryStorage;
#[cfg(feature = "object_store")]
pub use object::ObjectStorage;

/// A place for checkpoints: a folder, a bucket, memory.
///
/// Paths are names joined by `/`, counted from the place's root, which is the empty path; there are folders of files, and
/// none in folders. What has been written counts as durable when [`WriteFile::finish`] has returned for a file and
/// [`sync_folder`](Self::sync_folder) for the folder that names it. Its display is where it is, for messages.
pub trait Storage: Debug + Display + Send + Sync {
    /// What is in a folder, sorted; nothing if there is no such folder.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn list(&self, folder: &str) -> io::Result<Vec<String>>;

    /// Makes a folder.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn create_folder(&self, folder: &str) -> io::Result<()>;

    /// Makes a file, `bytes` long in the end, in place of what was there.
    ///
    /// # Errors
    ///
    /// Those of the medium; it may find out here that there is no room.
    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>>;

    /// Opens a file for reading.
    ///
    /// # Errors
    ///
    /// Those of the medium; [`io::ErrorKind::NotFound`] if there is no such file.
    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>>;

    /// Opens a folder for reading, as itself and not by its name, which another folder may get. `None` where folders are
    /// known by their names only.
    ///
    /// # Errors
    ///
    /// Those of the medium; [`io::ErrorKind::NotFound`] if there is no such folder.
    fn open_folder(&self, _folder: &str) -> io::Result<Option<Box<dyn ReadFolder>>> {
        Ok(None)
    }

    /// Makes the names in a folder durable.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn sync_folder(&self, folder: &str) -> io::Result<()>;

    /// Whether a folder can be given another name at once. Where it cannot, a checkpoint is written where it will be, and is
    /// there from the moment when its manifest is: files must appear as a whole.
    fn renames(&self) -> bool;

    /// Gives the folder `from` the name `to`, at once: if there is a `to` already, it becomes `from`, at once too if the medium
    /// can do that.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a folder and what is in it; where folders cannot be renamed, the manifest first.
    ///
    /// # Errors
    ///
    /// Those of the medium; none if there is no such folder.
    fn remove_folder(&self, folder: &str) -> io::Result<()>;

    /// Marks a folder as in use until the guard is dropped or its process ends, however it ends; `None` if somebody else's
    /// mark does not go with it: [`Usage::Exclusive`] goes with none. A folder keeps its marks when it gets another name.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn mark(&self, folder: &str, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>>;
}

/// What a folder is marked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Usage {
    /// To be read, or written to by several.
    Shared,
    /// To be removed.
    Exclusive,
}

/// A file that is being written, from its beginning to its end.
pub trait WriteFile: Send {
    /// Appends `bytes`. Fastest by multiples of 4096 in memory that begins at one.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes what was written durable. A file that was not finished counts as not written.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn finish(&mut self) -> io::Result<()>;
}

/// A folder that is being read, whatever it is called by now.
pub trait ReadFolder: Send + Sync {
    /// Opens a file in it for reading.
    ///
    /// # Errors
    ///
    /// Those of the medium; [`io::ErrorKind::NotFound`] if there is no such file.
    fn open(&self, name: &str) -> io::Result<Box<dyn ReadFile>>;

    /// Marks it for [`Usage::Shared`], as [`Storage::mark`] does.
    ///
    /// # Errors
    ///
    /// Those of the medium.
    fn mark(&self) -> io::Result<Option<Box<dyn Send + Sync>>>;
}

/// A file that is being read.
pub trait ReadFile: Send + Sync {
    /// Its length in bytes.
    fn bytes(&self) -> u64;

    /// Fills `into` from the byte at `offset` on.
    ///
    /// # Errors
    ///
    /// Those of the medium; [`io::ErrorKind::UnexpectedEof`] if the file ends before.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}
