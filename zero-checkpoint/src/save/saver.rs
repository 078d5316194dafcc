//! Who saves.

use std::fmt;
use std::sync::Arc;

use zero_core::Bytes;

use crate::coordinator::Coordinator;
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::memory::Memory;
use crate::save::contents::Contents;
use crate::save::image::Image;
use crate::save::job::Job;
use crate::save::outcome::{Outcome, Pending, Promise};
use crate::save::protocol::{Content, Saved, Session};
use crate::save::retention::Retention;
use crate::save::worker::{Task, Worker};
use crate::save::write::{self, LEAST_BUFFER, Stopped};
use crate::storage::{Storage, WriteFile};

/// How a [`Saver`] works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SaverOptions {
    /// What [`Saver::save`] may buffer, in bytes: from 2 MiB on; more than 16 MiB is not used.
    pub buffer: Bytes,
    /// Which checkpoints are kept.
    pub retention: Retention,
    /// What becomes of a save that begins before the last one has ended.
    pub on_busy: OnBusy,
}

impl Default for SaverOptions {
    fn default() -> Self {
        Self { buffer: Bytes::new(16 << 20), retention: Retention::default(), on_busy: OnBusy::Wait }
    }
}

/// What becomes of a save that begins before the last one has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnBusy {
    /// It waits for it.
    #[default]
    Wait,
    /// It is refused, on all ranks if on one: [`CheckpointError::Busy`] at once on this rank,
    /// [`Elsewhere`](CheckpointError::Elsewhere) from the save on the ranks that were not busy.
    Refuse,
}

/// One rank's part in saving checkpoints to a place.
///
/// Every rank has one and calls the same methods in the same order. A checkpoint is there for all to see or not at all, and
/// a save fails on all ranks or on none, with the exception of a root that is lost in the moment between the two. A save
/// that fails to make the checkpoint's name durable leaves the checkpoint in its place: it can be loaded, but a power
/// failure may take it away.
pub struct Saver {
    storage: Arc<dyn Storage>,
    coordinator: Arc<dyn Coordinator>,
    options: SaverOptions,
    buffer: Option<Memory>,
    /// The memory of snapshots while none is being written.
    arena: Option<Memory>,
    worker: Option<Worker>,
    running: Option<(u64, Arc<Outcome>)>,
    /// The last word to the other ranks that this one does not save, until it has been said.
    refusal: Option<Arc<Outcome>>,
}

impl Saver {
    /// A saver to `storage`. For [`save_async`](Self::save_async), `coordinator` must be one that nothing else uses
    /// before [`finish`](Self::finish) has returned, on all ranks.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BufferTooSmall`].
    pub fn new(
        storage: Arc<dyn Storage>,
        coordinator: Arc<dyn Coordinator>,
        options: SaverOptions,
    ) -> Result<Self, CheckpointError> {
        let least = LEAST_BUFFER as u64;
        if options.buffer.get() < least {
            return Err(CheckpointError::BufferTooSmall { bytes: options.buffer, least: Bytes::new(least) });
        }
        Ok(Self {
            storage,
            coordinator,
            options,
            buffer: None,
            arena: None,
            worker: None,
            running: None,
            refusal: None,
        })
    }

    /// Saves, and returns when the checkpoint is there. Nothing is copied but through the buffer.
    ///
    /// # Errors
    ///
    /// The error of an earlier asynchronous save, if nobody has it yet: then nothing is saved. Else what is wrong with the
    /// contents or the storage; [`CheckpointError::Elsewhere`] if it is so on another rank.
    pub fn save(&mut self, contents: &Contents<'_>) -> Result<Saved, CheckpointError> {
        let settled = self.settle().and_then(|_| {
            let buffer = match self.buffer.take() {
                Some(buffer) => buffer,
                None => write::buffer(self.options.buffer.get())?,
            };
            Ok((Job::new(contents, self.coordinator.as_ref())?, buffer))
        });
        let (job, buffer) =
            settled.map_or_else(|error| (Err(error), None), |(job, buffer)| (Ok(job), Some(buffer)));
        let mut content = Streamed { contents, buffer };
        let session = Session::new(self.storage.as_ref(), self.coordinator.as_ref(), self.options.retention);
        let saved = match job {
            Ok(job) => session.run(Ok(&job), &mut content),
            Err(error) => session.run(Err(error), &mut content),
        };
        self.buffer = content.buffer;
        saved
    }

    /// Copies what is to be saved, and returns; it is written beside training. The copy lies in memory that every save
    /// uses again.
    ///
    /// # Errors
    ///
    /// The error of an earlier save, if nobody has it yet: then nothing is saved. [`CheckpointError::Busy`] as
    /// [`OnBusy`] says. What is wrong with this rank's contents. What goes wrong later, the handle returns, or the
    /// next call.
    pub fn save_async(&mut self, contents: &Contents<'_>) -> Result<Pending, CheckpointError> {
        let step = contents.facts.step;
        match self.snapshot(contents) {
            Ok((job, snapshot)) => {
                let (promise, outcome) = Promise::new();
                self.worker()?.send(Task::Save { job: Box::new(job), snapshot, promise })?;
                self.running = Some((step, Arc::clone(&outcome)));
                Ok(Pending { step, outcome })
            }
            Err(error) => {
                // The other ranks do not wait in vain, and this one does not wait for them.
                let told = CheckpointError::NotSaved { step, reason: error.to_string() };
                let (promise, outcome) = Promise::new();
                self.worker()?.send(Task::Refuse { error: told, promise })?;
                self.refusal = Some(outcome);
                Err(error)
            }
        }
    }

    /// Takes the memory for snapshots of such contents now, so that the first one takes no longer than others.
    ///
    /// # Errors
    ///
    /// What is wrong with this rank's contents; [`CheckpointError::NoMemory`].
    pub fn reserve(&mut self, contents: &Contents<'_>) -> Result<(), CheckpointError> {
        let bytes = Job::new(contents, self.coordinator.as_ref())?.image.bytes;
        self.take_back();
        if self.running.as_ref().is_none_or(|(_, outcome)| outcome.is_done()) {
            self.arena = Some(arena(self.arena.take(), bytes)?);
        }
        Ok(())
    }

    /// Waits until nothing goes on beside training any more, and returns what the last asynchronous save wrote, if there was
    /// one since the last call that waited.
    ///
    /// # Errors
    ///
    /// Its error, if nobody has it yet.
    pub fn finish(&mut self) -> Result<Option<Saved>, CheckpointError> {
        self.settle()
    }

    /// Waits until nothing else uses the coordinator.
    fn settle(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let result = self.last_save();
        if let Some(refusal) = self.refusal.take() {
            // The error is known to whom it concerns here.
            let _ = refusal.wait();
        }
        result
    }

    /// Waits for the last save.
    fn last_save(&mut self) -> Result<Option<Saved>, CheckpointError> {
        let result = self.running.take().and_then(|(_, outcome)| outcome.wait());
        self.take_back();
        result.transpose()
    }

    fn take_back(&mut self) {
        if let Some(arena) = self.worker.as_ref().and_then(Worker::take_back) {
            self.arena = Some(arena);
        }
    }

    fn snapshot(&mut self, contents: &Contents<'_>) -> Result<(Job, Memory), CheckpointError> {
        let going_on = self.running.as_ref().filter(|(_, outcome)| !outcome.is_done());
        if let (OnBusy::Refuse, Some((saving, _))) = (self.options.on_busy, going_on) {
            return Err(CheckpointError::Busy { step: contents.facts.step, saving: *saving });
        }
        // A refusal may still wait for the other ranks: what follows it is said after it.
        self.last_save()?;
        let job = Job::new(contents, self.coordinator.as_ref())?;
        let mut memory = arena(self.arena.take(), job.image.bytes)?;
        match job.image.read(contents, 0, &mut memory) {
            Ok(()) => Ok((job, memory)),
            Err(error) => {
                self.arena = Some(memory);
                Err(error)
            }
        }
    }

    fn worker(&mut self) -> Result<&Worker, CheckpointError> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => {
                let (storage, coordinator) = (Arc::clone(&self.storage), Arc::clone(&self.coordinator));
                Worker::start(storage, coordinator, self.options.retention)
                    .map_err(|source| CheckpointError::NoThread { source })?
            }
        };
        Ok(self.worker.insert(worker))
    }
}

fn arena(old: Option<Memory>, bytes: u64) -> Result<Memory, CheckpointError> {
    let len = usize::try_from(bytes).ok();
    let memory = len.and_then(|len| old.unwrap_or_default().at_least(len));
    memory.ok_or(CheckpointError::NoMemory { bytes })
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(storage = %self.storage, %error, "the last checkpoint was not saved");
        }
    }
}

impl fmt::Debug for Saver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saver")
            .field("storage", &self.storage)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Numbers that are written from where they lie.
struct Streamed<'a> {
    contents: &'a Contents<'a>,
    buffer: Option<Memory>,
}

impl Content for Streamed<'_> {
    fn write(&mut self, image: &Image, file: &mut dyn WriteFile) -> Result<Vec<Digest>, Stopped> {
        let Some(buffer) = &mut self.buffer else { return Ok(Vec::new()) };
        write::stream(file, image.bytes, |offset, into| image.read(self.contents, offset, into), buffer)
    }
}
