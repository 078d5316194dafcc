//! What the threads of a rank share with the one that calls MPI.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;

use zero_core::{Rank, WorldSize};

use super::directory::Directory;
use super::error::MpiError;
use super::inbox::Inbox;
use super::memory::{Piece, Pool};
use super::news::News;
use super::outbox::Outbox;
use super::raw::Tag;
use crate::process::Wait;
use crate::windows::Windows;
use crate::{CommError, LossCause, lock};

/// This process among the MPI ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: Rank,
    pub(super) size: WorldSize,
    /// What all tags are below.
    pub(super) tags_end: Tag,
}

/// Something for the MPI thread to do.
#[derive(Debug)]
pub(super) enum Order {
    /// Send what is in the outbox, until nothing is.
    Send(Arc<Outbox>),
    /// Receive into the inbox, until it has what it wants.
    Receive(Arc<Inbox>),
    /// Send a message that nobody waits for.
    Post { to: Rank, tag: Tag, piece: Piece },
    /// Do something that all ranks do together.
    Meet { meeting: Meeting, end: Sender<Vec<u8>> },
}

/// What all ranks do together.
#[derive(Debug)]
pub(super) enum Meeting {
    /// Gives everybody these bytes of rank 0.
    Broadcast(Vec<u8>),
    /// Ends when all have come.
    Barrier,
}

/// Why the MPI thread takes no more orders.
#[derive(Debug)]
enum Closed {
    /// The fabric has come to its end.
    Finished,
    /// MPI does not work any more, which showed at this rank.
    Broken(Rank, String),
}

/// What the threads of a rank share with the one that calls MPI.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) place: Place,
    pub(super) pool: Pool,
    pub(super) directory: Directory,
    /// What this rank shows, by group.
    pub(super) windows: Mutex<HashMap<u64, Arc<Windows>>>,
    orders: Mutex<Vec<Order>>,
    /// Whether the MPI thread is to end when it has nothing left to do.
    pub(super) finish: AtomicBool,
    /// Whether it is to end at once.
    pub(super) stop: AtomicBool,
    closed: OnceLock<Closed>,
    engine: Thread,
}

impl Board {
    /// For the MPI thread, which makes the board.
    pub(super) fn new(place: Place, engine: Thread) -> Self {
        Self {
            place,
            pool: Pool::default(),
            directory: Directory::new(place.size),
            windows: Mutex::default(),
            orders: Mutex::default(),
            finish: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            closed: OnceLock::new(),
            engine,
        }
    }

    pub(super) fn submit(&self, order: Order) {
        lock(&self.orders).push(order);
        self.nudge();
    }

    /// Makes the MPI thread look at what it is about.
    pub(super) fn nudge(&self) {
        self.engine.unpark();
    }

    /// Sends a message that nobody waits for.
    pub(super) fn post(&self, to: Rank, tag: Tag, bytes: &[u8]) {
        self.submit(Order::Post { to, tag, piece: self.pool.copy_of(bytes) });
    }

    /// Tells the MPI thread by one of the flags how to end.
    pub(super) fn raise(&self, flag: &AtomicBool) {
        flag.store(true, Ordering::Release);
        self.nudge();
    }

    /// For the MPI thread: what is to be done.
    pub(super) fn orders(&self) -> Vec<Order> {
        std::mem::take(&mut *lock(&self.orders))
    }

    /// Refuses all operations from now on: the fabric has come to its end.
    pub(super) fn close(&self) {
        // What came first counts.
        let _ = self.closed.set(Closed::Finished);
    }

    /// For the MPI thread: nothing works any more.
    pub(super) fn give_up(&self, at: Rank, why: String) {
        let _ = self.closed.set(Closed::Broken(at, why));
    }

    /// Why MPI does not work any more, if it does not.
    pub(super) fn breakdown(&self) -> Option<MpiError> {
        match self.closed.get() {
            Some(Closed::Broken(_, why)) => Some(MpiError::Broken { why: why.clone() }),
            _ => None,
        }
    }

    /// Whether operations are possible.
    pub(super) fn check(&self, wait: &Wait<'_>) -> Result<(), CommError> {
        match self.closed.get() {
            None => Ok(()),
            Some(Closed::Finished) => {
                let (operation, label) = (wait.operation().kind, wait.operation().label.to_owned());
                wait.standing().check(operation, &label)?;
                let (rank, cause) = (self.place.rank, LossCause::Finished);
                Err(CommError::PeerLost { rank, cause, operation, label })
            }
            Some(Closed::Broken(at, why)) => Err(wait.broken(*at, why)),
        }
    }

    /// Whether to wait on for those that are `missing`.
    ///
    /// # Errors
    ///
    /// Those of [`Wait::check`].
    pub(super) fn check_wait(
        &self,
        wait: &Wait<'_>,
        missing: impl FnOnce() -> Vec<Rank>,
    ) -> Result<(), CommError> {
        self.check(wait)?;
        wait.check(missing)
    }

    /// After a look: waits for news if nothing has `moved`.
    ///
    /// # Errors
    ///
    /// Those of [`check_wait`](Self::check_wait).
    pub(super) fn rest(
        &self,
        moved: bool,
        news: &News,
        wait: &mut Wait<'_>,
        missing: impl FnOnce() -> Vec<Rank>,
    ) -> Result<(), CommError> {
        if moved {
            wait.progressed();
            return Ok(());
        }
        self.check_wait(wait, missing)?;
        news.wait(wait.slice());
        Ok(())
    }
}
