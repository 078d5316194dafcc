//! The two phases of a save: every rank writes its file, then the root makes the checkpoint of them.
//!
//! What holds at every moment, so that a crash anywhere leaves the newest complete checkpoint: a folder has a checkpoint's
//! name only from the rename on, which comes after the manifest and every file are durable, as is the folder that names
//! them. Where folders cannot be renamed, a manifest is what makes a checkpoint, and it comes last, as a whole.

use std::io;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use crate::coordinator::{Coordinator, consult};
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::folder::{self, StepFolder};
use crate::manifest::{FileRecord, Manifest, NAME};
use crate::save::image::Image;
use crate::save::job::{Job, Report};
use crate::save::leftovers;
use crate::save::retention::{self, Retention};
use crate::save::write::Stopped;
use crate::storage::{Storage, Usage, WriteFile};

/// How often, and how long each time, a save waits for who takes away the name that it wants.
const PATIENCE: usize = 1000;
const PAUSE: Duration = Duration::from_millis(5);

/// What a save wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The step.
    pub step: u64,
    /// The checkpoint's folder, in its storage.
    pub folder: String,
    /// What this rank wrote, in bytes.
    pub bytes: u64,
    /// What all ranks wrote, in bytes.
    pub total_bytes: u64,
}

/// Where a job's numbers are written from.
pub(crate) trait Content {
    fn write(&mut self, image: &Image, file: &mut dyn WriteFile) -> Result<Vec<Digest>, Stopped>;
}

/// Where to write.
#[derive(Serialize, Deserialize)]
struct Staging {
    folder: String,
    /// Distinguishes the files from those of another attempt, where they cannot have a folder of their own.
    suffix: String,
}

/// One rank's part in one save.
pub(crate) struct Session<'a> {
    storage: &'a dyn Storage,
    coordinator: &'a dyn Coordinator,
    retention: Retention,
    /// On the folder that is written to.
    mark: Option<Box<dyn Send + Sync>>,
    /// That folder, on the root, which made it, while it may be removed when something fails.
    staged: Option<String>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        storage: &'a dyn Storage,
        coordinator: &'a dyn Coordinator,
        retention: Retention,
    ) -> Self {
        Self { storage, coordinator, retention, mark: None, staged: None }
    }

    /// Saves together with all ranks: on all of them or on none. `job` is an error where a rank cannot take part.
    pub(crate) fn run(
        mut self,
        job: Result<&Job, CheckpointError>,
        content: &mut dyn Content,
    ) -> Result<Saved, CheckpointError> {
        let saved = self.phases(job, content);
        if let (Err(_), Some(folder)) = (&saved, &self.staged) {
            // What cannot be removed, a later save sweeps.
            let _ = self.storage.remove_folder(folder);
        }
        saved
    }

    fn phases(
        &mut self,
        job: Result<&Job, CheckpointError>,
        content: &mut dyn Content,
    ) -> Result<Saved, CheckpointError> {
        let coordinator = self.coordinator;
        let job = match job {
            Ok(job) => job,
            Err(error) => {
                let told = consult(coordinator, Err(error), |_| Ok(Vec::new()));
                return Err(told.err().unwrap_or(CheckpointError::WorkerGone));
            }
        };
        let staging = consult(coordinator, Ok(to_bytes(&job.opening())), |openings| {
            job.check_openings(each(&openings)?)?;
            let staging = self.stage(job.facts.step)?;
            self.staged = Some(staging.folder.clone());
            Ok(to_bytes(&staging))
        })?;
        let staging: Staging = from_bytes(&staging)?;

        let written = self.write_file(job, &staging, content).map(|file| job.report(file));
        let file = written.as_ref().ok().and_then(|report| report.file.as_ref());
        let bytes = file.map_or(0, |file| file.bytes);
        let total = consult(coordinator, written.map(|report| to_bytes(&report)), |reports| {
            let manifest = job.manifest(each::<Report>(&reports)?);
            self.complete(&staging, &manifest)?;
            Ok(manifest.bytes().to_le_bytes().to_vec())
        })?;
        if coordinator.rank() == Rank::ROOT {
            self.tidy(job.facts.step);
        }
        let total_bytes = u64::from_le_bytes(total.try_into().unwrap_or_default());
        let folder = StepFolder::of(job.facts.step).to_string();
        Ok(Saved { step: job.facts.step, folder, bytes, total_bytes })
    }

    /// Removes what need not be there after a save: when all ranks have their answer, for it may take its time.
    fn tidy(&mut self, saved: u64) {
        retention::apply(self.storage, self.retention, saved);
        // A checkpoint of the same step that this one has replaced.
        leftovers::sweep(self.storage);
    }

    /// A folder to write into, marked as in use.
    fn stage(&mut self, step: u64) -> Result<Staging, CheckpointError> {
        let storage = self.storage;
        // While all ranks wait: what a crash has left may take the room that they need.
        leftovers::sweep(storage);
        if !storage.renames() {
            return in_place(storage, step, &mut self.mark);
        }
        let (folder, mark) = folder::make_temporary(storage, step)?;
        self.mark = Some(mark);
        Ok(Staging { folder, suffix: String::new() })
    }

    /// Writes this rank's file, if it has something to write.
    fn write_file(
        &mut self,
        job: &Job,
        staging: &Staging,
        content: &mut dyn Content,
    ) -> Result<Option<FileRecord>, CheckpointError> {
        if job.image.entries.is_empty() {
            return Ok(None);
        }
        let storage = self.storage;
        if self.mark.is_none() {
            let marked = storage.mark(&staging.folder, Usage::Shared);
            self.mark = marked.map_err(folder::failed(storage, "mark", &staging.folder))?;
        }
        let (rank, world) = (self.coordinator.rank().index(), self.coordinator.world_size().get());
        let name = format!("rank-{rank:05}-of-{world:05}{}.safetensors", staging.suffix);
        let path = format!("{}/{name}", staging.folder);
        let failed = folder::failed(storage, "write", &path);
        let bytes = job.image.bytes;
        let mut file = storage.create(&path, bytes).map_err(&failed)?;
        let chunks = content.write(&job.image, file.as_mut()).map_err(|stopped| match stopped {
            Stopped::File(source) => failed(source),
            Stopped::Source(error) => error,
        })?;
        Ok(Some(FileRecord { name, bytes, hash: Digest::of_chunks(&chunks), chunks }))
    }

    /// Makes the files in a folder a checkpoint.
    fn complete(&mut self, staging: &Staging, manifest: &Manifest) -> Result<(), CheckpointError> {
        let storage = self.storage;
        let folder = &staging.folder;
        let path = format!("{folder}/{NAME}");
        let bytes = manifest
            .to_readable_bytes()
            .map_err(|reason| CheckpointError::Facts { step: manifest.step, reason })?;
        let write = || {
            let mut file = storage.create(&path, bytes.len() as u64)?;
            file.write(&bytes)?;
            file.finish()
        };
        write().map_err(folder::failed(storage, "write", &path))?;
        storage.sync_folder(folder).map_err(folder::failed(storage, "sync", folder))?;
        if !storage.renames() {
            self.staged = None;
            return Ok(());
        }
        let at_last = StepFolder::of(manifest.step).to_string();
        let replaced = self.hold(&at_last, manifest.step)?;
        storage.rename(folder, &at_last).map_err(folder::failed(storage, "rename", folder))?;
        drop(replaced);
        // It is the checkpoint now, or has become the one that it replaces.
        self.staged = None;
        storage.sync_folder("").map_err(folder::failed(storage, "sync", ""))
    }

    /// Marks the checkpoint that is about to be replaced, if there is one: who removes it, removes what has its name.
    fn hold(&self, folder: &str, step: u64) -> Result<Option<Box<dyn Send + Sync>>, CheckpointError> {
        for _ in 0..PATIENCE {
            match self.storage.mark(folder, Usage::Shared) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Ok(None) => thread::sleep(PAUSE),
                mark => return mark.map_err(folder::failed(self.storage, "mark", folder)),
            }
        }
        Err(CheckpointError::Swept { place: self.storage.to_string(), step })
    }
}

/// The final folder, empty and marked.
fn in_place(
    storage: &dyn Storage,
    step: u64,
    mark: &mut Option<Box<dyn Send + Sync>>,
) -> Result<Staging, CheckpointError> {
    let folder = StepFolder::of(step).to_string();
    let names = storage.list(&folder).map_err(folder::failed(storage, "list", &folder))?;
    if names.iter().any(|name| name == NAME) {
        return Err(CheckpointError::StepExists { place: storage.to_string(), step });
    }
    storage.remove_folder(&folder).map_err(folder::failed(storage, "empty", &folder))?;
    *mark = storage.mark(&folder, Usage::Shared).map_err(folder::failed(storage, "mark", &folder))?;
    Ok(Staging { folder, suffix: format!("-{}", folder::nonce()) })
}

/// Messages between ranks of one job, which have the same code.
fn to_bytes(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

fn from_bytes<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, CheckpointError> {
    serde_json::from_slice(bytes).map_err(|error| CheckpointError::Coordination { source: error.into() })
}

fn each<'a, T: Deserialize<'a>>(messages: &'a [Vec<u8>]) -> Result<Vec<T>, CheckpointError> {
    messages.iter().map(|bytes| from_bytes(bytes)).collect()
}
