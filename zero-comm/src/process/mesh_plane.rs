//! A group whose members share no memory: each has a link to each.

use std::ops::Range;
use std::sync::Mutex;

use zero_core::{DType, Rank, WorldSize};

use super::aligned::Aligned;
use super::fabric::Links;
use super::mesh::{self, exchange, incoming, outgoing};
use super::plane::{Cast, Exchange, Plane};
use super::wait::Wait;
use crate::arguments::Place;
use crate::reduce::TooNarrow;
use crate::{CommError, ReduceOp, lock};

/// What stands before a post: its length.
const LENGTH: usize = size_of::<u64>();

/// How much a member can post.
pub(crate) const POST_BYTES: usize = 96 << 10;

/// Members that are linked each with each. A link's index is the member's position, without the own one.
#[derive(Debug)]
pub(crate) struct MeshPlane {
    links: Box<dyn Links>,
    /// The rank in the world of each member.
    members: Vec<Rank>,
    place: Place,
    post_bytes: usize,
    posts: Mutex<Vec<Aligned>>,
}

impl MeshPlane {
    /// The place at `position` among `members`; `links` leads to the others, in their order.
    pub(crate) fn new(links: Box<dyn Links>, members: &[Rank], position: usize) -> Self {
        Self {
            links,
            place: Place { position, size: WorldSize::new(members.len()).expect("this is a member") },
            members: members.to_vec(),
            post_bytes: POST_BYTES,
            posts: Mutex::default(),
        }
    }

    /// The same, where a member can post so much.
    #[must_use]
    pub(crate) fn with_post_bytes(self, post_bytes: usize) -> Self {
        Self { post_bytes, ..self }
    }

    pub(crate) fn links(&self) -> &dyn Links {
        &*self.links
    }
}

impl Plane for MeshPlane {
    fn post_bytes(&self) -> usize {
        self.post_bytes
    }

    fn post(
        &self,
        parts: &[&[u8]],
        wait: &mut Wait<'_>,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<(), CommError> {
        // The length before it is as long as the alignment.
        let mine: usize = parts.iter().map(|part| part.len()).sum();
        let mut own = Aligned::default();
        let (head, mut body) = own.room(LENGTH + mine).split_at_mut(LENGTH);
        head.copy_from_slice(&(mine as u64).to_le_bytes());
        for part in parts {
            let (start, rest) = body.split_at_mut(part.len());
            start.copy_from_slice(part);
            body = rest;
        }
        let own = own.bytes(LENGTH + mine);
        let peers = self.members.len() - 1;
        let mut sends: Vec<_> = (0..peers).map(|peer| outgoing(peer, own)).collect();
        let mut lengths = vec![[0; LENGTH]; peers];
        let mut heads: Vec<_> =
            lengths.iter_mut().enumerate().map(|(peer, length)| incoming(peer, length)).collect();
        if peers > 0 {
            self.links.transfer(&mut sends, &mut heads, wait)?;
        }
        let lengths: Vec<_> = lengths.into_iter().map(|length| u64::from_le_bytes(length) as usize).collect();
        if let Some(peer) = lengths.iter().position(|length| *length > self.post_bytes) {
            let rank = self.members[peer + usize::from(peer >= self.place.position)];
            let how =
                format!("it announced {} bytes where at most {} may come", lengths[peer], self.post_bytes);
            return Err(wait.broken(rank, &how));
        }
        let mut posts = lock(&self.posts);
        posts.resize_with(peers, Aligned::default);
        let mut bodies: Vec<_> = posts
            .iter_mut()
            .zip(&lengths)
            .enumerate()
            .map(|(peer, (post, length))| incoming(peer, post.room(*length)))
            .collect();
        if peers > 0 {
            exchange(&*self.links, &mut sends, &mut bodies, wait)?;
        }
        let mut all: Vec<_> = posts.iter().zip(lengths).map(|(post, length)| post.bytes(length)).collect();
        all.insert(self.place.position, &own[LENGTH..]);
        read(&all);
        Ok(())
    }

    fn all_gather(
        &self,
        mine: &[u8],
        receive: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        mesh::all_gather(&*self.links, self.place, mine, receive, ranges, wait)
    }

    fn broadcast(&self, root: usize, cast: Cast<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        mesh::broadcast(&*self.links, self.place, root, cast, wait)
    }

    fn all_to_all(&self, exchange: Exchange<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        mesh::all_to_all(&*self.links, self.place, exchange, wait)
    }

    fn reduce_scatter(
        &self,
        how: (ReduceOp, DType),
        send: &[u8],
        ranges: &[Range<usize>],
        receive: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        mesh::reduce_scatter(&*self.links, self.place, how, send, ranges, receive, wait)
    }

    fn all_reduce(
        &self,
        how: (ReduceOp, DType),
        buffer: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        mesh::all_reduce(&*self.links, self.place, how, buffer, wait)
    }
}
