//! Checkpoints in object storage.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, mpsc};

use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use crate::manifest::NAME;
use crate::storage::marks::Marks;
use crate::storage::{ReadFile, Storage, Usage, WriteFile};

/// The length of the parts that large objects are sent in: above what services ask for at least (5 MiB).
const PART: usize = 8 << 20;

/// How many parts are on their way at once; so many and one more are in memory.
const ON_THEIR_WAY: usize = 4;

/// A place below a prefix of an [`ObjectStore`]: S3, Google Cloud Storage, Azure, a folder, memory.
///
/// Nothing can be renamed there, so a checkpoint is written where it will be, and its manifest, put last, makes it one.
/// Marks are seen in this process only: give retention room for what other processes may be reading, and let no two runs
/// save below one prefix. A `LocalFileSystem` keeps empty folders unless it is told to clean up.
///
/// ```
/// use std::sync::Arc;
///
/// use object_store::memory::InMemory;
/// use zero_checkpoint::{ObjectStorage, Storage};
///
/// let storage = ObjectStorage::new(Arc::new(InMemory::new()), "runs/7")?;
/// assert!(storage.list("")?.is_empty());
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct ObjectStorage {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    marks: Marks<String>,
    runtime: Arc<Tasks>,
}

impl ObjectStorage {
    /// The place below `prefix`, which may be empty.
    ///
    /// # Errors
    ///
    /// A prefix that is no path; threads that cannot be started.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: &str) -> io::Result<Self> {
        let prefix =
            Path::parse(prefix).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("zero-checkpoint-io")
            .enable_all()
            .build()?;
        Ok(Self { store, prefix, marks: Marks::default(), runtime: Arc::new(Tasks(Some(runtime))) })
    }

    fn path(&self, path: &str) -> Path {
        let parts = path.split('/').filter(|part| !part.is_empty());
        self.prefix.parts().chain(parts.map(Into::into)).collect()
    }
}

impl fmt::Debug for ObjectStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStorage").field("store", &self.store).field("prefix", &self.prefix).finish()
    }
}

impl fmt::Display for ObjectStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.store)?;
        if self.prefix.as_ref().is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// Threads that wait for services, whatever thread asks.
struct Tasks(Option<Runtime>);

impl Tasks {
    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<JoinHandle<T>> {
        self.0.as_ref().map(|runtime| runtime.spawn(task))
    }

    /// Runs a task to its end. Not by blocking on it, which is a panic where the caller is a task itself.
    fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let (answer, answered) = mpsc::sync_channel(1);
        let task = self.spawn(async move {
            // Who asked waits.
            let _ = answer.send(task.await);
        });
        drop(task);
        answered.recv().map_err(|_| io::Error::other("the task panicked"))?.map_err(into_io)
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        // To wait for it would be a panic in a task.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn into_io(error: object_store::Error) -> io::Error {
    let kind = match &error {
        object_store::Error::NotFound { .. } => io::ErrorKind::NotFound,
        object_store::Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
            io::ErrorKind::Unsupported
        }
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

impl Storage for ObjectStorage {
    fn list(&self, folder: &str) -> io::Result<Vec<String>> {
        let (store, prefix) = (Arc::clone(&self.store), self.path(folder));
        let found = self.runtime.run(async move { store.list_with_delimiter(Some(&prefix)).await })?;
        let objects = found.objects.into_iter().map(|object| object.location);
        let mut names: Vec<_> = found
            .common_prefixes
            .into_iter()
            .chain(objects)
            .filter_map(|path| path.filename().map(str::to_owned))
            .collect();
        names.sort();
        Ok(names)
    }

    fn create_folder(&self, _folder: &str) -> io::Result<()> {
        Ok(())
    }

    fn create(&self, path: &str, bytes: u64) -> io::Result<Box<dyn WriteFile>> {
        let (store, path) = (Arc::clone(&self.store), self.path(path));
        let upload = if bytes > PART as u64 {
            let (store, path) = (Arc::clone(&store), path.clone());
            Some(self.runtime.run(async move { store.put_multipart(&path).await })?)
        } else {
            None
        };
        let runtime = Arc::clone(&self.runtime);
        Ok(Box::new(Writing { store, path, runtime, part: Vec::new(), upload, sent: VecDeque::new() }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn ReadFile>> {
        let (store, path) = (Arc::clone(&self.store), self.path(path));
        let found = {
            let (store, path) = (Arc::clone(&store), path.clone());
            self.runtime.run(async move { store.head(&path).await })?
        };
        Ok(Box::new(Reading { store, path, runtime: Arc::clone(&self.runtime), bytes: found.size }))
    }

    fn sync_folder(&self, _folder: &str) -> io::Result<()> {
        Ok(())
    }

    fn renames(&self) -> bool {
        false
    }

    fn rename(&self, _from: &str, _to: &str) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "object storage does not rename"))
    }

    fn remove_folder(&self, folder: &str) -> io::Result<()> {
        let mut names = self.list(folder)?;
        // What is half removed must not look like a checkpoint.
        names.sort_by_key(|name| name != NAME);
        for name in names {
            let (store, path) = (Arc::clone(&self.store), self.path(&format!("{folder}/{name}")));
            match self.runtime.run(async move { store.delete(&path).await }) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
        }
        Ok(())
    }

    fn mark(&self, folder: &str, usage: Usage) -> io::Result<Option<Box<dyn Send + Sync>>> {
        let mark = self.marks.mark(folder.to_owned(), usage);
        Ok(mark.map(|mark| Box::new(mark) as Box<dyn Send + Sync>))
    }
}

struct Writing {
    store: Arc<dyn ObjectStore>,
    path: Path,
    runtime: Arc<Tasks>,
    /// What is not sent yet.
    part: Vec<u8>,
    /// `None` for what is put at once.
    upload: Option<Box<dyn MultipartUpload>>,
    sent: VecDeque<mpsc::Receiver<object_store::Result<()>>>,
}

impl Writing {
    fn send_part(&mut self) -> io::Result<()> {
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let part = upload.put_part(PutPayload::from(std::mem::take(&mut self.part)));
        let (answer, answered) = mpsc::sync_channel(1);
        let task = self.runtime.spawn(async move {
            // An upload that was given up waits for no answer.
            let _ = answer.send(part.await);
        });
        drop(task);
        self.sent.push_back(answered);
        if self.sent.len() > ON_THEIR_WAY { self.wait_for_part() } else { Ok(()) }
    }

    fn wait_for_part(&mut self) -> io::Result<()> {
        let Some(answered) = self.sent.pop_front() else { return Ok(()) };
        answered.recv().map_err(|_| io::Error::other("the task panicked"))?.map_err(into_io)
    }
}

impl WriteFile for Writing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = if self.upload.is_some() { PART - self.part.len() } else { rest.len() };
            let (part, later) = rest.split_at(rest.len().min(room));
            self.part.extend_from_slice(part);
            rest = later;
            if self.part.len() == PART {
                self.send_part()?;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.upload.is_none() {
            let (store, path) = (Arc::clone(&self.store), self.path.clone());
            let payload = PutPayload::from(std::mem::take(&mut self.part));
            return self.runtime.run(async move { store.put(&path, payload).await }).map(drop);
        }
        if !self.part.is_empty() {
            self.send_part()?;
        }
        while !self.sent.is_empty() {
            self.wait_for_part()?;
        }
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        self.runtime.run(async move { upload.complete().await }).map(drop)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(mut upload) = self.upload.take() {
            // Parts of an upload that was given up cost money.
            let task = self.runtime.spawn(async move { upload.abort().await });
            drop(task);
        }
    }
}

struct Reading {
    store: Arc<dyn ObjectStore>,
    path: Path,
    runtime: Arc<Tasks>,
    bytes: u64,
}

impl ReadFile for Reading {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let (store, path) = (Arc::clone(&self.store), self.path.clone());
        let range = offset..offset + into.len() as u64;
        let found = self.runtime.run(async move { store.get_range(&path, range).await })?;
        // Stores answer with less where an object ends.
        if found.len() != into.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into.copy_from_slice(&found);
        Ok(())
    }
}
