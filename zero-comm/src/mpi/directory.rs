//! Which tag belongs to which link.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};

use zero_core::{Rank, WorldSize};

use super::board::{Board, Place};
use super::error::MpiError;
use super::raw::Tag;
use super::wire::{Hello, tags};
use crate::flight::GroupId;
use crate::process::Wait;
use crate::{CommError, lock};

/// What a link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The collective operations of a group.
    Collective,
    /// Messages of one rank of the group to another.
    Messages,
    /// What the receiver of messages says to their sender.
    Replies,
}

/// Gives each direction of each link a tag of its own. The sender chooses one that it has not used for the
/// receiver before, and says so in a first message, the hello.
#[derive(Debug)]
pub(super) struct Directory {
    /// The next free tag to each rank.
    next: Mutex<Vec<Tag>>,
    /// The tags of links that other ranks have made and this one has not.
    known: Mutex<HashMap<Name, VecDeque<Tag>>>,
    changed: Condvar,
}

/// The sender, the group and the purpose of a link.
type Name = (Rank, u64, u64);

impl Directory {
    pub(super) fn new(size: WorldSize) -> Self {
        let next = Mutex::new(vec![tags::FIRST_LINK; size.get()]);
        Self { next, known: Mutex::default(), changed: Condvar::new() }
    }

    /// Chooses the tag of a new link to `peer`, which has to be told.
    pub(super) fn hello(
        &self,
        place: Place,
        peer: Rank,
        group: GroupId,
        purpose: Purpose,
    ) -> Result<Hello, MpiError> {
        let tag = {
            let next = &mut lock(&self.next)[peer.index()];
            if *next >= place.tags_end {
                return Err(MpiError::Tags { tags: (place.tags_end - tags::FIRST_LINK).max(0) as usize });
            }
            let tag = *next;
            *next += 1;
            tag
        };
        Ok(Hello { group: group.get(), purpose: purpose as u64, tag })
    }

    /// For the MPI thread: takes a hello.
    pub(super) fn add(&self, from: Rank, hello: Hello) {
        let name = (from, hello.group, hello.purpose);
        lock(&self.known).entry(name).or_default().push_back(hello.tag);
        self.changed.notify_all();
    }

    /// Waits for the tags of new links from `peers`, in their order.
    pub(super) fn await_from(
        &self,
        board: &Board,
        peers: &[Rank],
        group: GroupId,
        purpose: Purpose,
        wait: &mut Wait<'_>,
    ) -> Result<Vec<Tag>, CommError> {
        let mut found: Vec<Option<Tag>> = vec![None; peers.len()];
        loop {
            let mut known = lock(&self.known);
            let mut missing = Vec::new();
            for (tag, peer) in found.iter_mut().zip(peers).filter(|(tag, _)| tag.is_none()) {
                *tag = take(&mut known, (*peer, group.get(), purpose as u64));
                match tag {
                    Some(_) => wait.progressed(),
                    None => missing.push(*peer),
                }
            }
            if missing.is_empty() {
                return Ok(found.into_iter().flatten().collect());
            }
            drop(self.changed.wait_timeout(known, wait.slice()).unwrap_or_else(PoisonError::into_inner));
            board.check_wait(wait, || missing)?;
        }
    }
}

fn take(known: &mut HashMap<Name, VecDeque<Tag>>, name: Name) -> Option<Tag> {
    let tags = known.get_mut(&name)?;
    let tag = tags.pop_front();
    if tags.is_empty() {
        known.remove(&name);
    }
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_one_rank_have_tags_of_their_own_until_there_are_no_more() {
        let size = WorldSize::new(2).unwrap();
        let place = Place { rank: Rank::ROOT, size, tags_end: tags::FIRST_LINK + 2 };
        let directory = Directory::new(size);
        let tag = |peer| {
            directory.hello(place, Rank::new(peer), GroupId::WORLD, Purpose::Messages).map(|hello| hello.tag)
        };
        assert_eq!(tag(1).unwrap(), tags::FIRST_LINK);
        assert_eq!(tag(0).unwrap(), tags::FIRST_LINK);
        assert_eq!(tag(1).unwrap(), tags::FIRST_LINK + 1);
        assert!(matches!(tag(1), Err(MpiError::Tags { tags: 2 })));
    }
}
