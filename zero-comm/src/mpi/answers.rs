//! How the MPI thread lets other ranks read this rank's windows.
//!
//! It holds the region for as long as it sends from it, so a region that was replaced meanwhile goes in this thread.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use zero_core::Rank;

use super::board::Board;
use super::engine::{Breakdown, DEPTH, sweep};
use super::error::MpiError;
use super::memory::{PIECE, Piece, SHORT};
use super::raw::{Channel, Flight, Tag};
use super::wire::{Answer, Found, Request};
use crate::{Region, WindowKey, lock};

/// How many reads are answered at once.
const AT_ONCE: usize = 64;

/// The answers to reads: those that are given, and those that have to wait.
#[derive(Default)]
pub(super) struct Answers {
    given: Vec<Giving>,
    waiting: VecDeque<(Rank, Request)>,
}

impl Answers {
    /// Takes a reader's request.
    pub(super) fn ask(&mut self, reader: Rank, request: Request) {
        self.waiting.push_back((reader, request));
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
            let Some((reader, request)) = self.waiting.pop_front() else { break };
            let (head, giving) = begin(board, reader, request);
            let head = board.pool.copy_of(&head);
            posts.push(channel.send(reader, request.tag, head).map_err(Breakdown::at(reader))?);
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
fn begin(board: &Board, to: Rank, request: Request) -> (Vec<u8>, Option<Giving>) {
    let Request { tag, group, key, offset, len } = request;
    let refuse = |found, available| (Answer { found, available }.encode(), None);
    let windows = lock(&board.windows).get(&group).cloned();
    let Some(region) = windows.and_then(|windows| windows.get(WindowKey::new(key))) else {
        return refuse(Found::Missing, 0);
    };
    // A region is the user's own code. That it is whole after a panic is its own affair.
    let Ok(bytes) = catch_unwind(AssertUnwindSafe(|| region.bytes())) else {
        return refuse(Found::Panicked, 0);
    };
    let available = bytes.len() as u64;
    let Some(end) = offset.checked_add(len).filter(|end| *end <= available) else {
        return refuse(Found::OutOfBounds, available);
    };
    // Within the region, so within `usize`.
    let (start, end) = (offset as usize, end as usize);
    let first = end.min(start + SHORT);
    let mut head = Answer { found: Found::Bytes, available }.encode();
    head.extend_from_slice(&bytes[start..first]);
    (head, Some(Giving { to, tag, region, rest: first..end, flying: VecDeque::new() }))
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
