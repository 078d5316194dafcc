//! The fabric whose links and windows go over MPI.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ::mpi::environment::Universe;
use zero_core::{Rank, WorldSize};

use super::board::{Board, Meeting, Order};
use super::directory::Purpose;
use super::engine;
use super::error::MpiError;
use super::links::MpiLinks;
use super::news::News;
use super::raw::{self, Channel, Tag};
use super::wire::{self, Message, Read, tags};
use crate::flight::GroupId;
use crate::process::{Fabric, Incoming, Links, Wait};
use crate::reading::{ReadAnswer, ReadRequest};
use crate::windows::Windows;
use crate::{CommError, WindowKey, lock};

/// How long to wait for the MPI thread beyond the deadline that it has itself, and for its end.
const GRACE: Duration = Duration::from_secs(1);

/// Links and windows over MPI, for all ranks of one job. Ranks of the world are MPI's.
pub(crate) struct MpiFabric {
    board: Arc<Board>,
    /// The tags for answers to reads that are free.
    answers: Mutex<Vec<Tag>>,
    /// Tells how the MPI thread came to its end.
    ended: Mutex<Receiver<Result<bool, MpiError>>>,
    /// There if it was this fabric that started MPI. Never dropped by chance: that would end MPI, which waits
    /// for all ranks.
    universe: Mutex<Option<ManuallyDrop<Universe>>>,
}

impl MpiFabric {
    /// How long the text of [`broadcast_text`](Self::broadcast_text) may be, in bytes.
    pub(crate) const TEXT_BYTES: usize = 1024;

    /// Starts MPI unless the program has, and waits up to `deadline` for all ranks of the job to do the same.
    ///
    /// Starting MPI itself is the library's affair: it knows no deadline, and ends the process if it fails.
    ///
    /// # Errors
    ///
    /// [`MpiError::Finalised`], [`MpiError::Threads`], [`MpiError::Timeout`], [`MpiError::Call`],
    /// [`MpiError::Thread`].
    pub(crate) fn start(deadline: Duration) -> Result<Self, MpiError> {
        let universe = raw::initialise()?.map(ManuallyDrop::new);
        let ((tell, told), (end, ended)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            let channel = match Channel::open(deadline) {
                Ok(channel) => channel,
                // Who has lost patience does not hear it.
                Err(error) => return drop(tell.send(Err(error))),
            };
            let board = Arc::new(Board::new(channel.place(), thread::current()));
            if tell.send(Ok(Arc::clone(&board))).is_ok() {
                let finished = engine::run(&channel, &board);
                let freed = if finished { channel.free() } else { Ok(()) };
                // The fabric may be gone.
                let _ = end.send(freed.map(|()| finished));
            }
        };
        thread::Builder::new().name("zero-comm mpi".to_owned()).spawn(work).map_err(MpiError::Thread)?;
        let late = |_| MpiError::Timeout { what: raw::FIRST_MEETING, after: deadline };
        let board = told.recv_timeout(deadline.saturating_add(GRACE)).map_err(late)??;
        Ok(Self {
            board,
            answers: Mutex::new((tags::FIRST_ANSWER..tags::FIRST_LINK).rev().collect()),
            ended: Mutex::new(ended),
            universe: Mutex::new(universe),
        })
    }

    /// This process among those of the MPI job.
    pub(crate) fn rank(&self) -> Rank {
        self.board.place.rank
    }

    /// The number of processes of the MPI job.
    pub(crate) fn size(&self) -> WorldSize {
        self.board.place.size
    }

    /// Checks that the world counts its ranks as MPI does.
    ///
    /// # Errors
    ///
    /// [`MpiError::Place`].
    pub(crate) fn check_place(&self, rank: Rank, size: WorldSize) -> Result<(), MpiError> {
        let (mpi_rank, mpi_size) = (self.rank(), self.size());
        if (rank, size) == (mpi_rank, mpi_size) {
            Ok(())
        } else {
            Err(MpiError::Place { rank, size, mpi_rank, mpi_size })
        }
    }

    /// Gives all ranks the `text` of rank 0, which alone has one. All ranks call it, in one order with
    /// [`finalize`](Self::finalize).
    ///
    /// # Errors
    ///
    /// [`MpiError::Text`] on rank 0, [`MpiError::Timeout`], [`MpiError::Malformed`], [`MpiError::Broken`].
    pub(crate) fn broadcast_text(&self, text: Option<&str>, deadline: Duration) -> Result<String, MpiError> {
        const LENGTH: usize = size_of::<u64>();
        let mut message = vec![0; LENGTH + Self::TEXT_BYTES];
        if self.rank() == Rank::ROOT {
            let text = text.unwrap_or_default();
            if text.is_empty() || text.len() > Self::TEXT_BYTES {
                return Err(MpiError::Text { bytes: text.len(), limit: Self::TEXT_BYTES });
            }
            message[..LENGTH].copy_from_slice(&wire::encode([text.len() as u64]));
            message[LENGTH..][..text.len()].copy_from_slice(text.as_bytes());
        }
        let message = self.meet(Meeting::Broadcast(message), "a broadcast", deadline)?;
        let (length, text) = message.split_at(LENGTH);
        wire::decode(length)
            .and_then(|[length]: [u64; 1]| text.get(..length as usize))
            .and_then(|text| String::from_utf8(text.to_vec()).ok())
            .ok_or(MpiError::Malformed { peer: Rank::ROOT, what: "a broadcast that is no text" })
    }

    /// Ends what the fabric does. If the world ended `healthy`, so that all ranks call this, also gives back
    /// what MPI gave to it, and ends MPI if this fabric started it; it should then be the thread that did.
    ///
    /// After a failure MPI is left as it is: it could only end together with ranks that may be gone.
    ///
    /// # Errors
    ///
    /// [`MpiError::Timeout`] if not all ranks have called it within `deadline`, or messages of theirs are
    /// still on their way after it, [`MpiError::Broken`], [`MpiError::Call`]. MPI goes on then.
    pub(crate) fn finalize(&self, healthy: bool, deadline: Duration) -> Result<(), MpiError> {
        self.board.close();
        if !healthy {
            self.stop();
            return Ok(());
        }
        // Until all have come, some may still read this rank's windows.
        self.meet(Meeting::Barrier, "the last meeting", deadline)?;
        self.board.raise(&self.board.finish);
        match lock(&self.ended).recv_timeout(deadline) {
            Ok(Ok(true)) => {
                drop(lock(&self.universe).take().map(ManuallyDrop::into_inner));
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Ok(Ok(false)) | Err(RecvTimeoutError::Disconnected) => Err(self.broken()),
            Err(RecvTimeoutError::Timeout) => {
                Err(MpiError::Timeout { what: "the last messages", after: deadline })
            }
        }
    }

    /// Does something together with all ranks; `what` it is.
    fn meet(&self, meeting: Meeting, what: &'static str, deadline: Duration) -> Result<Vec<u8>, MpiError> {
        if let Some(error) = self.board.breakdown() {
            return Err(error);
        }
        let (end, ended) = mpsc::channel();
        self.board.submit(Order::Meet { meeting, end });
        ended.recv_timeout(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => MpiError::Timeout { what, after: deadline },
            RecvTimeoutError::Disconnected => self.broken(),
        })
    }

    fn broken(&self) -> MpiError {
        self.board.breakdown().unwrap_or_else(|| MpiError::Broken { why: "it was stopped".to_owned() })
    }

    /// Ends the MPI thread, unless MPI does not let it go.
    fn stop(&self) {
        self.board.raise(&self.board.stop);
        // An error says that it is late, or had ended before.
        let _ = lock(&self.ended).recv_timeout(GRACE);
    }

    /// Chooses the tags of new links to `peers`, and tells them.
    fn announce(
        &self,
        peers: &[Rank],
        group: GroupId,
        purpose: Purpose,
        wait: &Wait<'_>,
    ) -> Result<Vec<Tag>, CommError> {
        let board = &self.board;
        board.check(wait)?;
        let announce = |peer: &Rank| {
            let hello = board.directory.hello(board.place, *peer, group, purpose);
            let hello = hello.map_err(|error| wait.broken(*peer, &error.to_string()))?;
            board.post(*peer, tags::MESSAGE, &Message::Hello(hello).encode());
            Ok(hello.tag)
        };
        peers.iter().map(announce).collect()
    }

    fn links(&self, peers: &[Rank], outgoing: &[Tag], incoming: &[Tag]) -> Box<dyn Links> {
        Box::new(MpiLinks::new(&self.board, peers, outgoing, incoming))
    }

    /// A tag for the answer to a read that no other read has.
    fn answer_tag(&self, peer: Rank, wait: &mut Wait<'_>) -> Result<Tag, CommError> {
        loop {
            let free = lock(&self.answers).pop();
            if let Some(tag) = free {
                return Ok(tag);
            }
            // Looks again after a while: so many reads at once are rare.
            self.board.rest(false, &News::default(), wait, || vec![peer])?;
        }
    }
}

impl Fabric for MpiFabric {
    fn end(&self, healthy: bool, deadline: Duration) {
        if let Err(error) = self.finalize(healthy, deadline) {
            tracing::warn!(%error, "MPI was not finalised");
        }
    }

    fn collective(
        &self,
        group: GroupId,
        peers: &[Rank],
        wait: &mut Wait<'_>,
    ) -> Result<Box<dyn Links>, CommError> {
        let outgoing = self.announce(peers, group, Purpose::Collective, wait)?;
        let directory = &self.board.directory;
        let incoming = directory.await_from(&self.board, peers, group, Purpose::Collective, wait)?;
        Ok(self.links(peers, &outgoing, &incoming))
    }

    fn sender(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError> {
        let outgoing = self.announce(&[peer], group, Purpose::Messages, wait)?;
        let directory = &self.board.directory;
        let incoming = directory.await_from(&self.board, &[peer], group, Purpose::Replies, wait)?;
        Ok(self.links(&[peer], &outgoing, &incoming))
    }

    fn receiver(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError> {
        let outgoing = self.announce(&[peer], group, Purpose::Replies, wait)?;
        let directory = &self.board.directory;
        let incoming = directory.await_from(&self.board, &[peer], group, Purpose::Messages, wait)?;
        Ok(self.links(&[peer], &outgoing, &incoming))
    }

    fn serve(&self, group: GroupId, windows: Arc<Windows>) {
        lock(&self.board.windows).insert(group.get(), windows);
    }

    fn forget(&self, group: GroupId) -> Option<Arc<Windows>> {
        lock(&self.board.windows).remove(&group.get())
    }

    fn read(
        &self,
        group: GroupId,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let board = &self.board;
        board.check(wait)?;
        let tag = self.answer_tag(peer, wait)?;
        let request = ReadRequest::new(group, key, offset, into);
        board.post(peer, tags::MESSAGE, &Message::Read(Read { tag, request }).encode());
        let links = MpiLinks::new(board, &[peer], &[], &[tag]);
        let receive = |bytes: &mut [u8], wait: &mut Wait<'_>| {
            links.transfer(&mut [], &mut [Incoming { peer: 0, bytes, done: 0 }], wait)
        };

        let mut head = [0; ReadAnswer::BYTES];
        receive(&mut head, wait)?;
        let Some(answer) = ReadAnswer::decode(&head) else {
            let error = MpiError::Malformed { peer, what: "an unknown answer" };
            return Err(wait.broken(peer, &error.to_string()));
        };
        if answer == ReadAnswer::Bytes {
            receive(into, wait)?;
        }
        // After an error above, more of the answer may still come under this tag; so it stays out of use.
        lock(&self.answers).push(tag);
        answer.check(peer, &request, wait)
    }
}

impl Drop for MpiFabric {
    fn drop(&mut self) {
        self.board.close();
        self.stop();
    }
}

impl fmt::Debug for MpiFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiFabric")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
