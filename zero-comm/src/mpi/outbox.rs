//! Bytes on their way to a rank.
//!
//! A thread of the rank copies them into the outbox, and the MPI thread sends them from there. They are copied
//! because memory that was lent to us has to be given back at the end of a call, and MPI can't be made to let
//! go of it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use zero_core::Rank;

use super::board::{Board, Order};
use super::engine::{DEPTH, Task, Turn};
use super::error::MpiError;
use super::memory::{PIECE, Piece, Pool};
use super::news::News;
use super::raw::{Channel, Flight, Tag};
use crate::lock;

/// What is between a writer and the MPI thread.
#[derive(Debug)]
pub(super) struct Outbox {
    to: Rank,
    tag: Tag,
    /// Rings when there is more room.
    news: Arc<News>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Piece>,
    /// How many pieces are queued, or on their way.
    used: usize,
    /// Whether the MPI thread looks after the queue.
    tended: bool,
}

/// Puts bytes into an outbox.
#[derive(Debug)]
pub(super) struct Writer {
    outbox: Arc<Outbox>,
    /// How many pieces there is room for.
    room: usize,
}

impl Writer {
    pub(super) fn new(to: Rank, tag: Tag, news: &Arc<News>) -> Self {
        let outbox = Outbox { to, tag, news: Arc::clone(news), state: Mutex::default() };
        Self { outbox: Arc::new(outbox), room: DEPTH }
    }

    /// Looks for how much there is room.
    pub(super) fn look(&mut self) {
        self.room = DEPTH - lock(&self.outbox.state).used;
    }

    /// Takes what is not `done` of `bytes`, as far as there was room at the last look; whether it took any.
    pub(super) fn write(&mut self, board: &Board, bytes: &[u8], done: &mut usize) -> bool {
        let before = *done;
        while *done < bytes.len() && self.room > 0 {
            let end = bytes.len().min(*done + PIECE);
            let piece = board.pool.copy_of(&bytes[*done..end]);
            *done = end;
            self.room -= 1;
            let mut state = lock(&self.outbox.state);
            state.queue.push_back(piece);
            state.used += 1;
            if state.tended {
                board.nudge();
            } else {
                state.tended = true;
                board.submit(Order::Send(Arc::clone(&self.outbox)));
            }
        }
        *done > before
    }
}

/// Sends what is in an outbox, until nothing is.
pub(super) struct Sending {
    outbox: Arc<Outbox>,
    flying: VecDeque<Flight<Piece>>,
}

impl Sending {
    pub(super) const fn new(outbox: Arc<Outbox>) -> Self {
        Self { outbox, flying: VecDeque::new() }
    }
}

impl Task for Sending {
    fn peer(&self) -> Rank {
        self.outbox.to
    }

    fn turn(&mut self, channel: &Channel, pool: &Pool) -> Result<Turn, MpiError> {
        let mut moved = false;
        while let Some(flight) = self.flying.front_mut() {
            let Some(piece) = flight.landed()? else { break };
            pool.give(piece);
            self.flying.pop_front();
            moved = true;
        }
        let Outbox { to, tag, news, state } = &*self.outbox;
        loop {
            // Not locked while MPI is called.
            let next = lock(state).queue.pop_front();
            let Some(piece) = next else { break };
            self.flying.push_back(channel.send(*to, *tag, piece)?);
            moved = true;
        }
        let mut state = lock(state);
        let used = state.queue.len() + self.flying.len();
        if used < state.used {
            news.ring();
        }
        state.used = used;
        state.tended = used > 0;
        Ok(Turn { moved, over: !state.tended })
    }
}
