//! Tensors in files.

mod arena;
mod batch;
mod blocking;
mod directory;
mod driver;
mod error;
mod file;
mod options;
mod queue;
mod slot;
mod space;
mod span;
mod ticket;
mod transfer;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use zero_core::Bytes;

pub use error::{Direction, StoreError};
pub use options::{Engine, StoreOptions};
pub use slot::Slot;
pub use ticket::{ReadTicket, WriteTicket};

pub(crate) use batch::Batch;
pub(crate) use queue::Queue;
pub(crate) use slot::Staged;
pub(crate) use span::Span;

use crate::store::arena::Arena;
use crate::store::directory::RunDirectory;
use crate::store::file::DataFile;

/// Tensors in a file on a fast disk, for state that is too large for memory.
///
/// A store makes a directory of its own, `zero-offload-<run>-<rank>-<number>`, within the one it is given, and locks
/// it. The directory goes with the store and its slots. What a killed process left is removed when the next store
/// is opened beside it; what belongs to a living store, or to somebody else, is never touched. Nothing outlives the
/// process on purpose: this is memory, not a checkpoint.
///
/// Bytes pass by the page cache where the file system can do that, in transfers of one block, many at once. Every
/// transfer is checked: what was cut short is resumed, what was interrupted is tried again, each block read must
/// hash to what was written.
///
/// A handle is cheap to clone, and all clones are the same store. Every method may be called from any thread.
///
/// ```
/// use zero_offload::{NvmeStore, StoreOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// let store = NvmeStore::open(StoreOptions::new(directory.path()))?;
/// let mut moment = store.reserve("layers.0.weight/moment1", 5)?;
/// moment.write(1, b"abc")?;
///
/// let mut bytes = [1; 5];
/// moment.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"\0abc\0");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct NvmeStore {
    pub(crate) inner: Arc<Inner>,
}

/// What the handles of a store, its slots and its pipelines share.
pub(crate) struct Inner {
    // Dropped first: it ends all transfers.
    pub(crate) queue: Queue,
    /// Registered with the queue's driver.
    pub(crate) arena: Arena,
    pub(crate) file: Arc<DataFile>,
    pub(crate) block: usize,
    pub(crate) depth: usize,
    pub(crate) engine: Engine,
}

impl NvmeStore {
    /// Opens a new store, and removes what dead ones have left in the same directory.
    ///
    /// # Errors
    ///
    /// If an option has no meaning, the directory cannot be used, or [`Engine::Uring`] is asked for where there is
    /// none.
    pub fn open(options: StoreOptions) -> Result<Self, StoreError> {
        Self::with_queue(options, new_queue)
    }

    /// The same over another queue, for tests.
    fn with_queue(
        options: StoreOptions,
        make: impl FnOnce(Engine, usize, Span) -> Result<(Queue, Engine), StoreError>,
    ) -> Result<Self, StoreError> {
        options.check()?;
        let depth = options.depth;
        let file = DataFile::create(RunDirectory::create(&options)?, options.direct)?;
        // Checked above: at most 1 GiB.
        let block = options.block.get() as usize;
        let buffers = usize::try_from(options.buffers.get()).ok();
        let arena = buffers.and_then(|buffers| Arena::new(buffers, block));
        let arena = arena.ok_or(StoreError::NoMemory { wanted: options.buffers })?;
        let (queue, engine) = make(options.engine, depth, arena.span())?;
        let inner = Inner { queue, arena, file: Arc::new(file), block, depth, engine };
        let store = Self { inner: Arc::new(inner) };
        tracing::info!(path = %store.path().display(), %engine, direct = store.direct(), "store opened");
        Ok(store)
    }

    /// Reserves space for a tensor of `bytes` bytes, which are zeros at first. The name is for errors.
    ///
    /// # Errors
    ///
    /// If the disk is too full, which is told here and not by a later write.
    pub fn reserve(&self, name: &str, bytes: u64) -> Result<Slot, StoreError> {
        Slot::reserve(Arc::clone(&self.inner), name, bytes)
    }

    /// Who moves the bytes: [`Engine::Uring`] or [`Engine::Threads`].
    pub fn engine(&self) -> Engine {
        self.inner.engine
    }

    /// Whether they go past the page cache.
    pub fn direct(&self) -> bool {
        self.inner.file.direct()
    }

    /// The directory that this store has made for itself.
    pub fn path(&self) -> &Path {
        self.inner.file.directory()
    }

    /// How much of the disk is left; a tensor takes twice its size. Nothing if the system does not say.
    pub fn free(&self) -> Bytes {
        Bytes::new(self.inner.file.unused())
    }

    /// How much of the disk is reserved: twice the size of all slots, in whole pages.
    pub fn reserved(&self) -> Bytes {
        Bytes::new(self.inner.file.used())
    }
}

impl fmt::Debug for NvmeStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeStore")
            .field("path", &self.path())
            .field("engine", &self.engine())
            .field("direct", &self.direct())
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}

/// A queue over the engine asked for, and which that turned out to be. `registered` must outlive it.
pub(crate) fn new_queue(
    engine: Engine,
    depth: usize,
    registered: Span,
) -> Result<(Queue, Engine), StoreError> {
    Queue::new(depth, |sink| driver::make(engine, depth, registered, sink))
}
