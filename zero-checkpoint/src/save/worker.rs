//! The thread that saves beside training.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use crate::coordinator::Coordinator;
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::memory::Memory;
use crate::save::image::Image;
use crate::save::job::Job;
use crate::save::outcome::Promise;
use crate::save::protocol::{Content, Session};
use crate::save::retention::Retention;
use crate::save::write::{self, Stopped};
use crate::storage::{Storage, WriteFile};

/// What the thread does, in the order in which it was asked to.
pub(crate) enum Task {
    /// Saves what a snapshot holds.
    Save { job: Box<Job>, snapshot: Memory, promise: Promise },
    /// Tells the other ranks that this one does not save.
    Refuse { error: CheckpointError, promise: Promise },
}

/// The thread; dropping it waits for what it has to do.
pub(crate) struct Worker {
    tasks: Option<Sender<Task>>,
    snapshots: Receiver<Memory>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(
        storage: Arc<dyn Storage>,
        coordinator: Arc<dyn Coordinator>,
        retention: Retention,
    ) -> io::Result<Self> {
        let (tasks, to_do) = mpsc::channel();
        let (back, snapshots) = mpsc::channel();
        let work = move || {
            let session = || Session::new(storage.as_ref(), coordinator.as_ref(), retention);
            for task in to_do {
                match task {
                    Task::Save { job, snapshot, promise } => {
                        let mut content = Snapshot(&snapshot);
                        let saved = session().run(Ok(&job), &mut content);
                        // First, so that who has seen the end finds the snapshot's memory and no other.
                        drop(job);
                        let _ = back.send(snapshot);
                        promise.keep(saved);
                    }
                    Task::Refuse { error, promise } => {
                        let mut content = Snapshot(&[]);
                        promise.keep(session().run(Err(error), &mut content));
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("zero-checkpoint".to_owned()).spawn(work)?;
        Ok(Self { tasks: Some(tasks), snapshots, thread: Some(thread) })
    }

    /// Adds a task; an error if the thread has panicked.
    pub(crate) fn send(&self, task: Task) -> Result<(), CheckpointError> {
        let sent = self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok());
        if sent { Ok(()) } else { Err(CheckpointError::WorkerGone) }
    }

    /// The memory of the last snapshot, if the thread is done with it.
    pub(crate) fn take_back(&self) -> Option<Memory> {
        self.snapshots.try_recv().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been printed, and there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

struct Snapshot<'a>(&'a [u8]);

impl Content for Snapshot<'_> {
    fn write(&mut self, image: &Image, file: &mut dyn WriteFile) -> Result<Vec<Digest>, Stopped> {
        write::whole(file, &self.0[..image.bytes as usize])
    }
}
