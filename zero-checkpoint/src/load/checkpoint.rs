//! A complete checkpoint, opened.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use crate::coordinator::{Coordinator, agree, consult};
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::folder::{self, StepFolder};
use crate::load::opened::OpenedFolder;
use crate::manifest::{MAX_BYTES, Manifest, NAME};
use crate::storage::{ReadFile, Storage};

/// A complete checkpoint. While it is open, no retention removes it, and no other save of its step takes its place in what is
/// read.
pub struct Checkpoint {
    folder: OpenedFolder,
    manifest: Manifest,
    files: Vec<OnceLock<Box<dyn ReadFile>>>,
}

impl Checkpoint {
    /// The newest complete checkpoint of a storage.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoCheckpoint`] if there is none; what is wrong with its manifest, if something is.
    pub fn open_latest(storage: Arc<dyn Storage>) -> Result<Self, CheckpointError> {
        loop {
            let before = folder::steps(storage.as_ref())?;
            for &step in before.iter().rev() {
                if let Some(checkpoint) = Self::open_if_complete(&storage, &StepFolder::of(step).to_string())?
                {
                    return Ok(checkpoint);
                }
            }
            // What was there may have been removed in favor of what came meanwhile.
            if folder::steps(storage.as_ref())? == before {
                return Err(CheckpointError::NoCheckpoint { place: storage.to_string() });
            }
        }
    }

    /// The checkpoint of a step.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoStep`] if it is not there or not complete; what is wrong with its manifest.
    pub fn open(storage: Arc<dyn Storage>, step: u64) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_if_complete(&storage, &StepFolder::of(step).to_string())?;
        if let Some(checkpoint) = checkpoint {
            return Ok(checkpoint);
        }
        Err(CheckpointError::NoStep { place: storage.to_string(), step, steps: complete_steps(&*storage)? })
    }

    /// The checkpoint in a folder of any name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoCheckpoint`] if there is no manifest; what is wrong with it.
    pub fn open_folder(storage: Arc<dyn Storage>, folder: &str) -> Result<Self, CheckpointError> {
        let missing = CheckpointError::NoCheckpoint { place: folder::shown(storage.as_ref(), folder) };
        Self::open_if_complete(&storage, folder)?.ok_or(missing)
    }

    /// The same checkpoint on all ranks: that of a step, or the newest one that the root finds. The root alone reads the
    /// manifest.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open) and [`open_latest`](Self::open_latest), on all ranks.
    pub fn open_together(
        storage: Arc<dyn Storage>,
        step: Option<u64>,
        coordinator: &dyn Coordinator,
    ) -> Result<Self, CheckpointError> {
        let mut opened = None;
        let reply = consult(coordinator, Ok(Vec::new()), |_| {
            let checkpoint = match step {
                Some(step) => Self::open(Arc::clone(&storage), step)?,
                None => Self::open_latest(Arc::clone(&storage))?,
            };
            let name = checkpoint.folder.name();
            let mut reply = (name.len() as u64).to_le_bytes().to_vec();
            reply.extend(name.as_bytes());
            reply.extend(checkpoint.manifest.to_bytes());
            opened = Some(checkpoint);
            Ok(reply)
        })?;
        let own = match opened {
            Some(checkpoint) => Ok(checkpoint),
            None => Self::from_root(&storage, &reply),
        };
        match own {
            // The root's mark is there until all have theirs.
            Ok(checkpoint) => agree(coordinator, Ok(())).map(|()| checkpoint),
            Err(error) => Err(agree(coordinator, Err(error)).err().unwrap_or(CheckpointError::WorkerGone)),
        }
    }

    fn from_root(storage: &Arc<dyn Storage>, reply: &[u8]) -> Result<Self, CheckpointError> {
        let odd = || CheckpointError::Coordination { source: "the root's answer is cut".into() };
        let (length, rest) = reply.split_first_chunk().ok_or_else(odd)?;
        let (name, manifest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize).ok_or_else(odd)?;
        let folder = String::from_utf8_lossy(name).into_owned();
        let manifest = Manifest::from_bytes(manifest, &folder::shown(storage.as_ref(), &folder))?;
        let place = folder::shown(storage.as_ref(), &folder);
        let opened = OpenedFolder::open(storage, &folder)?;
        Ok(Self::new(opened.ok_or(CheckpointError::NoCheckpoint { place })?, manifest))
    }

    fn new(folder: OpenedFolder, manifest: Manifest) -> Self {
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Self { folder, manifest, files }
    }

    /// `None` if there is no manifest, or if the folder is being removed.
    fn open_if_complete(storage: &Arc<dyn Storage>, folder: &str) -> Result<Option<Self>, CheckpointError> {
        let Some(opened) = OpenedFolder::open(storage, folder)? else { return Ok(None) };
        // Looked for under the mark: who removes it needs the folder unmarked.
        let Some(manifest) = read_manifest(opened.file(NAME), &opened.shown(NAME))? else { return Ok(None) };
        if let Ok(named) = folder.parse::<StepFolder>() {
            if named.step() != manifest.step {
                return Err(CheckpointError::Manifest {
                    path: opened.shown(NAME),
                    reason: format!("it is that of step {}, in the folder of another step", manifest.step),
                });
            }
        }
        Ok(Some(Self::new(opened, manifest)))
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where it is, for messages.
    pub fn place(&self) -> String {
        self.folder.place()
    }

    /// A file by its position in the manifest, which is as long as that says.
    pub(crate) fn file(&self, index: usize) -> Result<&dyn ReadFile, CheckpointError> {
        if let Some(file) = self.files[index].get() {
            return Ok(file.as_ref());
        }
        let record = &self.manifest.files[index];
        let file = self.folder.file(&record.name).map_err(self.folder.failed("open", &record.name))?;
        if file.bytes() != record.bytes {
            return Err(CheckpointError::FileLength {
                path: self.shown(index),
                expected: record.bytes,
                found: file.bytes(),
            });
        }
        Ok(self.files[index].get_or_init(|| file).as_ref())
    }

    /// Fills `into` from the chunk `first` of a file on, and checks the hashes. `into` ends where a chunk does.
    pub(crate) fn read_chunks(
        &self,
        file: usize,
        first: usize,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let chunk = self.manifest.chunk_bytes;
        let offset = first as u64 * chunk;
        let reader = self.file(file)?;
        let record = &self.manifest.files[file];
        reader.read(offset, into).map_err(self.folder.failed("read", &record.name))?;
        let expected = &record.chunks[first..];
        for (index, (bytes, expected)) in into.chunks(chunk as usize).zip(expected).enumerate() {
            let found = Digest::of(bytes);
            if found != *expected {
                return Err(CheckpointError::Corrupt {
                    path: self.shown(file),
                    offset: offset + index as u64 * chunk,
                    bytes: bytes.len() as u64,
                    expected: *expected,
                    found,
                });
            }
        }
        Ok(())
    }

    /// A file as errors call it.
    pub(crate) fn shown(&self, file: usize) -> String {
        self.folder.shown(&self.manifest.files[file].name)
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("place", &self.place()).finish_non_exhaustive()
    }
}

/// The manifest in a file; `None` if there is none. `path` is what errors call it.
fn read_manifest(
    opened: io::Result<Box<dyn ReadFile>>,
    path: &str,
) -> Result<Option<Manifest>, CheckpointError> {
    let failed = |action| move |source| CheckpointError::Storage { action, path: path.to_owned(), source };
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed("open"))?,
    };
    if file.bytes() > MAX_BYTES {
        let reason = format!("it has {} bytes, of {MAX_BYTES} allowed", file.bytes());
        return Err(CheckpointError::Manifest { path: path.to_owned(), reason });
    }
    let mut bytes = vec![0; file.bytes() as usize];
    file.read(0, &mut bytes).map_err(failed("read"))?;
    Manifest::from_bytes(&bytes, path).map(Some)
}

/// The steps whose checkpoints have a manifest, oldest first.
pub(crate) fn complete_steps(storage: &dyn Storage) -> Result<Vec<u64>, CheckpointError> {
    let mut complete = Vec::new();
    for step in folder::steps(storage)? {
        let folder = StepFolder::of(step).to_string();
        let names = storage.list(&folder).map_err(folder::failed(storage, "list", &folder))?;
        if names.iter().any(|name| name == NAME) {
            complete.push(step);
        }
    }
    Ok(complete)
}

/// Whether a step's manifest is valid and its files are there, as long as they should be.
pub(crate) fn is_good(storage: &dyn Storage, step: u64) -> bool {
    let folder = StepFolder::of(step).to_string();
    let path = format!("{folder}/{NAME}");
    let Ok(Some(manifest)) = read_manifest(storage.open(&path), &path) else { return false };
    let mut files = manifest.files.iter();
    files.all(|file| {
        let opened = storage.open(&format!("{folder}/{}", file.name));
        opened.is_ok_and(|opened| opened.bytes() == file.bytes)
    })
}
