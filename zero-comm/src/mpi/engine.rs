//! The one thread that calls MPI.
//!
//! A call of MPI may take for ever: Open MPI's can, once a rank is gone that it had a connection to. All other
//! threads have deadlines, so they never call MPI, and talk to this one over the [`Board`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use zero_core::Rank;

use super::answers::Answers;
use super::backoff::Backoff;
use super::board::{Board, Meeting, Order};
use super::error::MpiError;
use super::inbox::Receiving;
use super::memory::{Piece, Pool};
use super::outbox::Sending;
use super::raw::{Channel, Flight};
use super::wire::{Mailbox, Message};

/// How many messages of a stream are on their way at once: while one is copied, the others move.
pub(super) const DEPTH: usize = 4;

/// One direction between this rank and another, for as long as something moves in it.
pub(super) trait Task {
    fn peer(&self) -> Rank;

    /// Goes on as far as is possible now.
    fn turn(&mut self, channel: &Channel, pool: &Pool) -> Result<Turn, MpiError>;
}

/// What a turn came to.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) moved: bool,
    /// Whether it was the last.
    pub(super) over: bool,
}

/// At which rank MPI failed, and how. MPI does not promise that anything works after an error.
pub(super) struct Breakdown(Rank, MpiError);

impl Breakdown {
    pub(super) fn at(rank: Rank) -> impl FnOnce(MpiError) -> Self {
        move |error| Self(rank, error)
    }
}

/// What the MPI thread works at.
#[derive(Default)]
struct Engine {
    mailbox: Mailbox,
    answers: Answers,
    tasks: Vec<Box<dyn Task>>,
    /// Messages that nobody waits for.
    posts: Vec<Flight<Piece>>,
    gatherings: Vec<Gathering>,
}

/// A meeting of all ranks, and who waits for its end.
struct Gathering {
    flight: Flight<Vec<u8>>,
    end: Sender<Vec<u8>>,
}

/// Follows the orders on the board until it says to end; whether all were followed to their end.
pub(super) fn run(channel: &Channel, board: &Board) -> bool {
    let mut engine = Engine::default();
    // Regions are the user's own code.
    let (at, why) = match catch_unwind(AssertUnwindSafe(|| engine.work(channel, board))) {
        Ok(Ok(finished)) => return finished,
        Ok(Err(Breakdown(at, error))) => (at, error.to_string()),
        Err(_) => (board.place.rank, "the thread that calls MPI panicked".to_owned()),
    };
    tracing::error!(%at, why, "MPI failed");
    board.give_up(at, why);
    false
}

impl Engine {
    /// Works until told to stop (false), or until told to finish and all is done (true).
    fn work(&mut self, channel: &Channel, board: &Board) -> Result<bool, Breakdown> {
        let here = board.place.rank;
        let mut backoff = Backoff::default();
        while !board.stop.load(Ordering::Acquire) {
            // Before the orders, so that those which came before are followed.
            let finish = board.finish.load(Ordering::Acquire);
            let mut moved = false;
            for order in board.orders() {
                self.follow(order, channel).map_err(Breakdown::at(here))?;
                moved = true;
            }
            while let Some((from, message)) =
                self.mailbox.take(channel, &board.pool).map_err(Breakdown::at(here))?
            {
                match message {
                    Message::Hello(hello) => board.directory.add(from, hello),
                    Message::Read(read) => self.answers.ask(from, read),
                }
                moved = true;
            }
            moved |= self.answers.turn(channel, board, &mut self.posts)?;
            moved |= self.turn(channel, &board.pool)?;
            if moved {
                backoff.reset();
            } else if finish && self.tasks.is_empty() && self.posts.is_empty() && self.answers.are_given() {
                return Ok(true);
            } else {
                backoff.pause();
            }
        }
        Ok(false)
    }

    fn follow(&mut self, order: Order, channel: &Channel) -> Result<(), MpiError> {
        match order {
            Order::Send(outbox) => self.tasks.push(Box::new(Sending::new(outbox))),
            Order::Receive(inbox) => self.tasks.push(Box::new(Receiving::new(inbox))),
            Order::Post { to, tag, piece } => self.posts.push(channel.send(to, tag, piece)?),
            Order::Meet { meeting, end } => {
                let flight = match meeting {
                    Meeting::Broadcast(bytes) => channel.broadcast(bytes)?,
                    Meeting::Barrier => channel.barrier()?,
                };
                self.gatherings.push(Gathering { flight, end });
            }
        }
        Ok(())
    }

    /// Goes on with everything; whether anything moved.
    fn turn(&mut self, channel: &Channel, pool: &Pool) -> Result<bool, Breakdown> {
        let mut moved = false;
        sweep(&mut self.tasks, |task| {
            let turn = task.turn(channel, pool).map_err(Breakdown::at(task.peer()))?;
            moved |= turn.moved;
            Ok(turn.over)
        })?;
        let here = channel.rank();
        sweep(&mut self.posts, |flight| {
            let landed = flight.landed().map_err(Breakdown::at(here))?;
            Ok(landed.map(|piece| pool.give(piece)).is_some())
        })?;
        sweep(&mut self.gatherings, |gathering| {
            let landed = gathering.flight.landed().map_err(Breakdown::at(here))?;
            // Who waited may have lost patience.
            Ok(landed.map(|bytes| gathering.end.send(bytes)).is_some())
        })?;
        Ok(moved)
    }
}

/// Removes the items that are `over`; up to the first error.
pub(super) fn sweep<T>(
    items: &mut Vec<T>,
    mut over: impl FnMut(&mut T) -> Result<bool, Breakdown>,
) -> Result<(), Breakdown> {
    let mut index = 0;
    while let Some(item) = items.get_mut(index) {
        if over(item)? {
            items.swap_remove(index);
        } else {
            index += 1;
        }
    }
    Ok(())
}
