//! Bytes on their way from a rank.
//!
//! The MPI thread receives them into the inbox, as far as they are wanted: all else stays with its sender. A
//! thread of the rank copies them out. Memory that was lent to us is not given to MPI: a message whose sender
//! dies may never be complete, and MPI does not let go of the memory of one that it has begun to receive.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use zero_core::Rank;

use super::board::{Board, Order};
use super::engine::{DEPTH, Task, Turn};
use super::error::MpiError;
use super::memory::{Piece, Pool};
use super::news::News;
use super::raw::{Channel, Flight, Tag};
use crate::lock;

/// What is between the MPI thread and a reader.
#[derive(Debug)]
pub(super) struct Inbox {
    from: Rank,
    tag: Tag,
    /// Rings when more has come.
    news: Arc<News>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many bytes the reader will still take.
    wanted: usize,
    /// How many bytes are here, or being received.
    coming: usize,
    here: VecDeque<Piece>,
    /// Whether the MPI thread looks after this.
    tended: bool,
}

/// Takes bytes out of an inbox.
#[derive(Debug)]
pub(super) struct Reader {
    inbox: Arc<Inbox>,
    /// Taken out, and not given to anybody from this byte on.
    front: Option<(Piece, usize)>,
    /// Pieces that were here at the last look.
    here: VecDeque<Piece>,
}

impl Reader {
    pub(super) fn new(from: Rank, tag: Tag, news: &Arc<News>) -> Self {
        let inbox = Inbox { from, tag, news: Arc::clone(news), state: Mutex::default() };
        Self { inbox: Arc::new(inbox), front: None, here: VecDeque::new() }
    }

    /// Says how many bytes will be read.
    pub(super) fn want(&mut self, board: &Board, bytes: usize) {
        let front = self.front.as_ref().map_or(0, |(piece, start)| piece.bytes().len() - start);
        let ours = front + self.here.iter().map(|piece| piece.bytes().len()).sum::<usize>();
        let mut state = lock(&self.inbox.state);
        state.wanted = bytes.saturating_sub(ours);
        if !state.tended && state.coming < state.wanted {
            state.tended = true;
            board.submit(Order::Receive(Arc::clone(&self.inbox)));
        }
    }

    /// Looks for what has come.
    pub(super) fn look(&mut self, board: &Board) {
        let mut state = lock(&self.inbox.state);
        if state.here.len() == DEPTH {
            // It has waited for room.
            board.nudge();
        }
        while let Some(piece) = state.here.pop_front() {
            let len = piece.bytes().len();
            state.coming -= len;
            state.wanted = state.wanted.saturating_sub(len);
            self.here.push_back(piece);
        }
    }

    /// Fills what is not `done` of `bytes`, as far as that was here at the last look; whether it was any.
    pub(super) fn read(&mut self, board: &Board, bytes: &mut [u8], done: &mut usize) -> bool {
        let before = *done;
        while *done < bytes.len() {
            let front = self.front.take().or_else(|| self.here.pop_front().map(|piece| (piece, 0)));
            let Some((piece, start)) = front else { break };
            let rest = &piece.bytes()[start..];
            let len = rest.len().min(bytes.len() - *done);
            bytes[*done..][..len].copy_from_slice(&rest[..len]);
            *done += len;
            if len < rest.len() {
                self.front = Some((piece, start + len));
            } else {
                board.pool.give(piece);
            }
        }
        *done > before
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The MPI thread lets go of the inbox then.
        lock(&self.inbox.state).wanted = 0;
    }
}

/// Receives into an inbox, until that has what it wants.
pub(super) struct Receiving {
    inbox: Arc<Inbox>,
    flying: VecDeque<Flight<Piece>>,
}

impl Receiving {
    pub(super) const fn new(inbox: Arc<Inbox>) -> Self {
        Self { inbox, flying: VecDeque::new() }
    }

    fn wants_more(&self) -> bool {
        let state = lock(&self.inbox.state);
        state.coming < state.wanted && self.flying.len() < DEPTH && state.here.len() < DEPTH
    }
}

impl Task for Receiving {
    fn peer(&self) -> Rank {
        self.inbox.from
    }

    fn turn(&mut self, channel: &Channel, pool: &Pool) -> Result<Turn, MpiError> {
        let Inbox { from, tag, news, state } = &*self.inbox;
        let mut moved = false;
        while self.wants_more() {
            let Some(arrival) = channel.probe(Some(*from), *tag)? else { break };
            lock(state).coming += arrival.len;
            self.flying.push_back(channel.receive(arrival, pool)?);
            moved = true;
        }
        while let Some(flight) = self.flying.front_mut() {
            let Some(piece) = flight.landed()? else { break };
            self.flying.pop_front();
            lock(state).here.push_back(piece);
            news.ring();
            moved = true;
        }
        let mut state = lock(state);
        state.tended = !self.flying.is_empty() || state.coming < state.wanted;
        Ok(Turn { moved, over: !state.tended })
    }
}
