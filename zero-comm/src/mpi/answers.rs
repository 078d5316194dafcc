//! How the MPI thread lets other ranks read this rank's windows.
//!
//! It holds the region for as long as it sends from it, so a region that was replaced meanwhile goes in this thread.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use zero_core::Rank;

use super::board::Board;
use super::engine::{Breakdown, DEPTH, sweep};
use super::error::MpiError;
use super::memory::{PIECE, Piece, SHORT};
use super::raw::{Channel, Flight, Tag};
use super::wire::Read;
use crate::reading::{Part, ReadAnswer};
use crate::{Region, lock};

/// How many reads are answered at once.
const AT_ONCE: usize = 64;

/// The answers to reads: those that are given, and those that have to wait.
#[derive(Default)]
pub(super) struct Answers {
    given: Vec<Giving>,
    waiting: VecDeque<(Rank, Read)>,
}

impl Answers {
    /// Takes a reader's request.
    pub(super) fn ask(&mut self, reader: Rank, read: Read) {
        self.waiting.push_back((reader, read));
    }

    pub(super) fn are_given(&self) -> bool {
        self.given.is_empty() && self.waiting.is_empty()
    }

    /// Goes on; whether anything moved.
    pub(super) fn turn(
        &mut self,
        channel: &Channel,
        board: &Board,
        posts: &mut Vec<Flight<Piece>>,
    ) -> Result<bool, Breakdown> {
        let mut moved = false;
        while self.given.len() < AT_ONCE {
            let Some((reader, read)) = self.waiting.pop_front() else { break };
            let (head, giving) = begin(board, reader, read);
            let head = board.pool.copy_of(&head);
            posts.push(channel.send(reader, read.tag, head).map_err(Breakdown::at(reader))?);
            self.given.extend(giving);
            moved = true;
        }
        sweep(&mut self.given, |giving| {
            moved |= giving.turn(channel).map_err(Breakdown::at(giving.to))?;
            Ok(giving.rest.is_empty() && giving.flying.is_empty())
        })?;
        Ok(moved)
    }
}

/// The first message of the answer, and what is to follow. All of a short one is in the first message.
fn begin(board: &Board, to: Rank, Read { tag, request }: Read) -> (Vec<u8>, Option<Giving>) {
    let windows = lock(&board.windows).get(&request.group.get()).cloned();
    let Part { region, range } = match request.find(windows.as_deref()) {
        Ok(part) => part,
        Err(answer) => return (answer.encode().to_vec(), None),
    };
    let first = range.end.min(range.start + SHORT);
    let mut head = ReadAnswer::Bytes.encode().to_vec();
    head.extend_from_slice(&region.bytes()[range.start..first]);
    (head, Some(Giving { to, tag, region, rest: first..range.end, flying: VecDeque::new() }))
}

/// Bytes of a window on their way to a reader, from where they are.
struct Giving {
    to: Rank,
    tag: Tag,
    region: Arc<dyn Region>,
    /// What MPI does not know of yet.
    rest: Range<usize>,
    flying: VecDeque<Flight<Arc<dyn Region>>>,
}

impl Giving {
    /// Goes on; whether anything moved.
    fn turn(&mut self, channel: &Channel) -> Result<bool, MpiError> {
        let mut moved = false;
        while let Some(flight) = self.flying.front_mut() {
            if flight.landed()?.is_none() {
                break;
            }
            self.flying.pop_front();
            moved = true;
        }
        while !self.rest.is_empty() && self.flying.len() < DEPTH {
            let end = self.rest.end.min(self.rest.start + PIECE);
            let piece = self.rest.start..end;
            self.flying.push_back(channel.send_region(self.to, self.tag, &self.region, piece)?);
            self.rest.start = end;
            moved = true;
        }
        Ok(moved)
    }
}
