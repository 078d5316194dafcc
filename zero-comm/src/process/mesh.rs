//! Collective operations between members that are linked each with each.
//!
//! Everything goes straight from who has it to who needs it, all pairs at the same time: a reduce-scatter and
//! an all-gather send `(W - 1) / W` of the buffer per member, an all-reduce twice that. A link's index is its
//! member's position, without the own one.

use std::ops::Range;

use zero_core::DType;

use super::aligned::Aligned;
use super::fabric::{Incoming, Links, Outgoing};
use super::plane::{Cast, Exchange, cut, stripes};
use super::wait::Wait;
use crate::arguments::Place;
use crate::reduce::{self, TooNarrow};
use crate::{CommError, ReduceOp};

/// How much of a part is reduced at once. While that is done, the next comes into the network's buffers.
const BLOCK_BYTES: usize = 256 << 10;

/// Broadcasts of more are dealt out by the root in parts, which the members then pass on to each other.
const DIRECT_BYTES: usize = 64 << 10;

impl Place {
    /// The members other than this one with their links, beginning with the next, so that not all send to one
    /// at once.
    fn peers(self) -> impl Iterator<Item = (usize, usize)> {
        let size = self.size.get();
        (1..size).map(move |step| {
            let member = (self.position + step) % size;
            (member, self.link(member))
        })
    }

    /// The link to another member.
    pub(crate) fn link(self, member: usize) -> usize {
        member - usize::from(member > self.position)
    }
}

/// Moves all, in both directions.
pub(crate) fn exchange(
    links: &dyn Links,
    sends: &mut [Outgoing<'_>],
    receives: &mut [Incoming<'_>],
    wait: &mut Wait<'_>,
) -> Result<(), CommError> {
    links.transfer(sends, receives, wait)?;
    links.transfer(sends, &mut [], wait)
}

pub(crate) const fn outgoing(peer: usize, bytes: &[u8]) -> Outgoing<'_> {
    Outgoing { peer, bytes, done: 0 }
}

pub(crate) const fn incoming(peer: usize, bytes: &mut [u8]) -> Incoming<'_> {
    Incoming { peer, bytes, done: 0 }
}

/// See [`Plane::all_gather`](super::plane::Plane::all_gather).
pub(crate) fn all_gather(
    links: &dyn Links,
    place: Place,
    mine: &[u8],
    receive: &mut [u8],
    ranges: &[Range<usize>],
    wait: &mut Wait<'_>,
) -> Result<(), CommError> {
    let mut receives = Vec::new();
    for (member, part) in cut(receive, ranges) {
        if member == place.position {
            part.copy_from_slice(mine);
        } else {
            receives.push(incoming(place.link(member), part));
        }
    }
    let mut sends: Vec<_> = place.peers().map(|(_, link)| outgoing(link, mine)).collect();
    exchange(links, &mut sends, &mut receives, wait)
}

/// See [`Plane::broadcast`](super::plane::Plane::broadcast).
pub(crate) fn broadcast(
    links: &dyn Links,
    place: Place,
    root: usize,
    cast: Cast<'_>,
    wait: &mut Wait<'_>,
) -> Result<(), CommError> {
    let size = place.size.get();
    if cast.len() <= DIRECT_BYTES || size <= 2 {
        return match cast {
            Cast::Give(bytes) => {
                let mut sends: Vec<_> = place.peers().map(|(_, link)| outgoing(link, bytes)).collect();
                links.transfer(&mut sends, &mut [], wait)
            }
            Cast::Take(bytes) => links.transfer(&mut [], &mut [incoming(place.link(root), bytes)], wait),
        };
    }
    let ranges = stripes(cast.len(), size);
    let bytes = match cast {
        Cast::Give(bytes) => {
            let dealt = place.peers().map(|(member, link)| outgoing(link, &bytes[ranges[member].clone()]));
            let own = &bytes[ranges[root].clone()];
            let mut sends: Vec<_> = dealt.collect();
            sends.extend(place.peers().map(|(_, link)| outgoing(link, own)));
            return links.transfer(&mut sends, &mut [], wait);
        }
        Cast::Take(bytes) => bytes,
    };
    let mut receives = Vec::new();
    let mut own = &mut [][..];
    for (member, part) in cut(bytes, &ranges) {
        if member == place.position {
            own = part;
        } else {
            receives.push(incoming(place.link(member), part));
        }
    }
    links.transfer(&mut [], &mut [incoming(place.link(root), &mut *own)], wait)?;
    let own = &*own;
    let mut sends: Vec<_> =
        place.peers().filter(|(member, _)| *member != root).map(|(_, link)| outgoing(link, own)).collect();
    exchange(links, &mut sends, &mut receives, wait)
}

/// See [`Plane::all_to_all`](super::plane::Plane::all_to_all).
pub(crate) fn all_to_all(
    links: &dyn Links,
    place: Place,
    Exchange { send, out, receive, back, .. }: Exchange<'_>,
    wait: &mut Wait<'_>,
) -> Result<(), CommError> {
    let mut receives = Vec::new();
    for (member, part) in cut(receive, back) {
        if member == place.position {
            part.copy_from_slice(&send[out[member].clone()]);
        } else {
            receives.push(incoming(place.link(member), part));
        }
    }
    let mut sends: Vec<_> =
        place.peers().map(|(member, link)| outgoing(link, &send[out[member].clone()])).collect();
    exchange(links, &mut sends, &mut receives, wait)
}

/// See [`Plane::reduce_scatter`](super::plane::Plane::reduce_scatter).
pub(crate) fn reduce_scatter(
    links: &dyn Links,
    place: Place,
    (op, dtype): (ReduceOp, DType),
    send: &[u8],
    ranges: &[Range<usize>],
    receive: &mut [u8],
    wait: &mut Wait<'_>,
) -> Result<Result<(), TooNarrow>, CommError> {
    let own = &send[ranges[place.position].clone()];
    let mut outcome = Ok(());
    let part = |member: usize| &send[ranges[member].clone()];
    reduce_parts(links, place, &part, receive.len(), wait, |block, sources| {
        let sources: Vec<_> = sources.iter().map(|source| source.unwrap_or(&own[block.clone()])).collect();
        outcome = outcome.and(reduce::into(op, dtype, &sources, &mut receive[block]));
    })?;
    Ok(outcome)
}

/// See [`Plane::all_reduce`](super::plane::Plane::all_reduce).
pub(crate) fn all_reduce(
    links: &dyn Links,
    place: Place,
    (op, dtype): (ReduceOp, DType),
    buffer: &mut [u8],
    wait: &mut Wait<'_>,
) -> Result<Result<(), TooNarrow>, CommError> {
    let mut outcome = Ok(());
    let mut rooms: Vec<Aligned> = place.peers().map(|_| Aligned::default()).collect();
    let mut pieces = buffer.chunks_mut(links.piece_bytes()).map(|piece| Piece::new(piece, place));
    let mut last: Option<Piece<'_>> = None;
    loop {
        let next = pieces.next();
        // What has become of one piece travels with the parts of the next.
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        if let Some(Piece { own, others }) = &mut last {
            let own = &**own;
            sends.extend(place.peers().map(|(_, link)| outgoing(link, own)));
            receives.extend(others.iter_mut().enumerate().map(|(link, part)| incoming(link, part)));
        }
        if let Some(piece) = &next {
            sends.extend(place.peers().map(|(_, link)| outgoing(link, piece.others[link])));
            let rooms = rooms.iter_mut().enumerate();
            receives.extend(rooms.map(|(link, room)| incoming(link, room.room(piece.own.len()))));
        }
        exchange(links, &mut sends, &mut receives, wait)?;
        let Some(piece) = next else { return Ok(outcome) };
        let mut sources: Vec<_> = rooms.iter().map(|room| Some(room.bytes(piece.own.len()))).collect();
        sources.insert(place.position, None);
        outcome = outcome.and(reduce::into_own(op, dtype, &sources, piece.own));
        last = Some(piece);
    }
}

/// A piece of a buffer that is all-reduced, a part for each member.
struct Piece<'a> {
    own: &'a mut [u8],
    /// By link.
    others: Vec<&'a mut [u8]>,
}

impl<'a> Piece<'a> {
    fn new(piece: &'a mut [u8], place: Place) -> Self {
        let ranges = stripes(piece.len(), place.size.get());
        let mut others: Vec<_> = cut(piece, &ranges).into_iter().map(|(_, part)| part).collect();
        let own = others.remove(place.position);
        Self { own, others }
    }
}

/// Sends every other member its part, and lets `act` see each block of this member's, of `length` bytes, with
/// what each member has for it; `None` for this one. Blocks come in order.
fn reduce_parts<'a>(
    links: &dyn Links,
    place: Place,
    part: &dyn Fn(usize) -> &'a [u8],
    length: usize,
    wait: &mut Wait<'_>,
    mut act: impl FnMut(Range<usize>, &[Option<&[u8]>]),
) -> Result<(), CommError> {
    let mut sends: Vec<_> = place.peers().map(|(member, link)| outgoing(link, part(member))).collect();
    let mut blocks: Vec<Aligned> = place.peers().map(|_| Aligned::default()).collect();
    for start in (0..length).step_by(BLOCK_BYTES) {
        let range = start..length.min(start + BLOCK_BYTES);
        let rooms = blocks.iter_mut().enumerate();
        let mut receives: Vec<_> =
            rooms.map(|(link, block)| incoming(link, block.room(range.len()))).collect();
        links.transfer(&mut sends, &mut receives, wait)?;
        let mut sources: Vec<_> = blocks.iter().map(|block| Some(block.bytes(range.len()))).collect();
        sources.insert(place.position, None);
        act(range, &sources);
    }
    links.transfer(&mut sends, &mut [], wait)
}
