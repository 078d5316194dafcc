//! A group over several hosts, with several members on some.
//!
//! The members of each host share memory, and the first of them, the *leader*, talks to the leaders of the
//! other hosts, so that what all members of a host need crosses the network once. Reductions pass from host
//! to host in the order of ranks: a host adds its members to what the hosts before it have summed up, so the
//! result is that of adding all ranks one after the other.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use zero_core::{DType, Rank, WorldSize};

use super::aligned::Aligned;
use super::fabric::Links;
use super::group::Surroundings;
use super::mesh::{self, incoming, outgoing};
use super::mesh_plane::MeshPlane;
use super::plane::{Cast, Exchange, Plane, cut, overlap};
use super::shm::Hall;
use super::wait::Wait;
use crate::arguments::Place;
use crate::flight::GroupId;
use crate::reduce::{self, TooNarrow};
use crate::{CommError, ReduceOp};

/// How much of a buffer goes through all hosts before the next part follows.
const BLOCK_BYTES: usize = 4 << 20;

/// Tells the connections of one group apart: those between leaders from those between all members.
const LEADERS: u64 = 1;
const EVERYONE: u64 = 2;

#[derive(Debug)]
pub(crate) struct HostsPlane {
    around: Arc<Surroundings>,
    id: GroupId,
    members: Vec<Rank>,
    position: usize,
    /// Where the members of this host meet.
    hall: Hall,
    /// The positions of each host's members, by host; hosts in the order of their first members.
    hosts: Vec<Vec<usize>>,
    /// This host.
    here: usize,
    /// For the leader: the plane of the leaders.
    leaders: Option<MeshPlane>,
    /// Links to all members, made when they are needed.
    everyone: OnceLock<Box<dyn Links>>,
}

impl HostsPlane {
    /// The place at `position` of the group `id`; `hall` is that of this host.
    pub(crate) fn form(
        around: &Arc<Surroundings>,
        id: GroupId,
        members: &[Rank],
        position: usize,
        hall: Hall,
        wait: &mut Wait<'_>,
    ) -> Result<Self, CommError> {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for member in 0..members.len() {
            let seats = around.seats(members, member);
            if seats[0] == member {
                hosts.push(seats);
            }
        }
        let here = hosts.iter().position(|seats| seats.contains(&position)).unwrap_or(0);
        let mut leaders = None;
        if hall.seat() == 0 {
            let ranks: Vec<_> = hosts.iter().map(|seats| members[seats[0]]).collect();
            let others = ranks.iter().copied().filter(|rank| *rank != members[position]).collect::<Vec<_>>();
            let links = around.fabric.collective(id.child(0, LEADERS), &others, wait)?;
            let most = hosts.iter().map(Vec::len).max().unwrap_or(1);
            let plane = MeshPlane::new(links, &ranks, here);
            leaders = Some(plane.with_post_bytes(most * (hall.post_bytes() + 2 * WORD)));
        }
        Ok(Self {
            around: Arc::clone(around),
            id,
            members: members.to_vec(),
            position,
            hall,
            hosts,
            here,
            leaders,
            everyone: OnceLock::new(),
        })
    }

    fn seats(&self) -> &[usize] {
        &self.hosts[self.here]
    }

    fn host_of(&self, position: usize) -> usize {
        self.hosts.iter().position(|seats| seats.contains(&position)).expect("each member is on a host")
    }

    /// Whether each host has members that follow each other, host after host.
    fn is_in_order(&self) -> bool {
        self.hosts.iter().flatten().copied().eq(0..self.members.len())
    }

    fn place(&self) -> Place {
        let size = WorldSize::new(self.members.len()).expect("this is a member");
        Place { position: self.position, size }
    }

    /// Links to all other members, by position without the own.
    fn everyone(&self, wait: &mut Wait<'_>) -> Result<&dyn Links, CommError> {
        if let Some(links) = self.everyone.get() {
            return Ok(&**links);
        }
        let own = self.members[self.position];
        let others = self.members.iter().copied().filter(|rank| *rank != own).collect::<Vec<_>>();
        let links = self.around.fabric.collective(self.id.child(0, EVERYONE), &others, wait)?;
        Ok(&**self.everyone.get_or_init(|| links))
    }

    /// Reduces the bytes of a block over all members, in their order. The last host's leader passes the
    /// result to `take`, piece by piece.
    fn chain(
        &self,
        (op, dtype): (ReduceOp, DType),
        block: &[u8],
        wait: &mut Wait<'_>,
        mut take: impl FnMut(Range<usize>, &[u8]) -> Result<(), TooNarrow>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        let (mut wide, mut narrow, mut outcome) = (Vec::<u128>::new(), Aligned::default(), Ok(()));
        self.hall.collect(block, wait, |wait, range, sources| {
            let Some(leaders) = &self.leaders else { return Ok(()) };
            let elements = range.len() / dtype.size();
            let length = elements * reduce::wide_size(dtype);
            wide.resize(length.div_ceil(size_of::<u128>()), 0);
            let wide = &mut bytemuck::cast_slice_mut::<_, u8>(&mut wide)[..length];
            if self.here > 0 {
                let mut before = [incoming(self.here - 1, wide)];
                leaders.links().transfer(&mut [], &mut before, wait)?;
            }
            let own = &block[range.clone()];
            let sources: Vec<_> = sources.iter().map(|source| source.unwrap_or(own)).collect();
            reduce::accumulate_more(op, dtype, &sources, wide, self.here == 0);
            if self.here + 1 < self.hosts.len() {
                let mut after = [outgoing(self.here, wide)];
                return leaders.links().transfer(&mut after, &mut [], wait);
            }
            let target = narrow.room(range.len());
            outcome = outcome.and(reduce::finish(op, dtype, self.members.len(), wide, target));
            outcome = outcome.and(take(range, target));
            Ok(())
        })?;
        Ok(outcome)
    }

    /// Gives what the leader has in `bytes` to the other members of its host.
    fn hand_out(&self, bytes: &mut [u8], wait: &mut Wait<'_>) -> Result<(), CommError> {
        let cast = if self.leaders.is_some() { Cast::Give(bytes) } else { Cast::Take(bytes) };
        self.hall.broadcast(0, cast, wait)
    }

    /// Gives a result that the last host's leader has to the leader of `host`.
    fn pass_on(&self, host: usize, result: &mut [u8], wait: &mut Wait<'_>) -> Result<(), CommError> {
        let (Some(leaders), last) = (&self.leaders, self.hosts.len() - 1) else { return Ok(()) };
        if host == last {
            return Ok(());
        }
        if self.here == last {
            let mut send = [outgoing(host, result)];
            return leaders.links().transfer(&mut send, &mut [], wait);
        }
        if self.here == host {
            let mut receive = [incoming(last - 1, result)];
            return leaders.links().transfer(&mut [], &mut receive, wait);
        }
        Ok(())
    }
}

/// What stands before a post that a leader passes on: its length. Posts begin at multiples of this.
const WORD: usize = 8;

/// Posts of several members, one after the other.
fn bundle<'a>(posts: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut bundle = Vec::new();
    for post in posts {
        bundle.extend((post.len() as u64).to_le_bytes());
        bundle.extend(post);
        bundle.resize(bundle.len().next_multiple_of(WORD), 0);
    }
    bundle
}

/// The posts in a bundle; what is garbled is left out.
pub(crate) fn unbundle(mut rest: &[u8]) -> Vec<&[u8]> {
    let mut posts = Vec::new();
    while let Some((length, tail)) = rest.split_first_chunk::<WORD>() {
        let Ok(length) = usize::try_from(u64::from_le_bytes(*length)) else { break };
        let Some(post) = tail.get(..length) else { break };
        posts.push(post);
        rest = tail.get(length.next_multiple_of(WORD)..).unwrap_or_default();
    }
    posts
}

impl Plane for HostsPlane {
    fn post_bytes(&self) -> usize {
        self.hall.post_bytes()
    }

    fn post(
        &self,
        parts: &[&[u8]],
        wait: &mut Wait<'_>,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<(), CommError> {
        let mut here = Vec::new();
        self.hall.post(parts, wait, |posts| {
            if self.leaders.is_some() {
                here = bundle((0..self.hall.seats()).map(|seat| posts.get(seat)));
            }
        })?;
        let (mut all, mut length) = (Aligned::default(), 0);
        if let Some(leaders) = &self.leaders {
            leaders.post(&[&here], wait, &mut |bundles| {
                let whole = bundles.concat();
                length = whole.len();
                all.room(length).copy_from_slice(&whole);
            })?;
        }
        let all = all.bytes(length);
        let mut deliver = |bundle: &[u8]| {
            let mut posts = vec![&[][..]; self.members.len()];
            for (position, post) in self.hosts.iter().flatten().zip(unbundle(bundle)) {
                posts[*position] = post;
            }
            read(&posts);
        };
        // The leader tells the others: at once if there is room, else how much there will be.
        let fits = WORD + length <= self.hall.post_bytes();
        let mut expected = 0;
        self.hall.post(&[&(length as u64).to_le_bytes(), if fits { all } else { &[] }], wait, |posts| {
            let Some((length, bundle)) = posts.get(0).split_first_chunk::<WORD>() else { return };
            let length = u64::from_le_bytes(*length) as usize;
            if bundle.len() == length {
                deliver(bundle);
            } else {
                expected = length;
            }
        })?;
        if expected > 0 {
            if self.leaders.is_some() {
                self.hall.broadcast(0, Cast::Give(all), wait)?;
                deliver(all);
            } else {
                let mut told = Aligned::default();
                self.hall.broadcast(0, Cast::Take(told.room(expected)), wait)?;
                deliver(told.bytes(expected));
            }
        }
        Ok(())
    }

    fn all_gather(
        &self,
        mine: &[u8],
        receive: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let seats: Vec<_> = self.seats().iter().map(|position| ranges[*position].clone()).collect();
        self.hall.all_gather(mine, receive, &seats, wait)?;
        if let Some(leaders) = &self.leaders {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for (position, part) in cut(receive, ranges) {
                match self.host_of(position) {
                    host if host == self.here => ours.push(&*part),
                    host => {
                        let peer = host - usize::from(host > self.here);
                        theirs.push(incoming(peer, part));
                    }
                }
            }
            let mut sends: Vec<_> = (0..self.hosts.len() - 1)
                .flat_map(|peer| ours.iter().map(move |bytes| outgoing(peer, bytes)))
                .collect();
            mesh::exchange(leaders.links(), &mut sends, &mut theirs, wait)?;
        }
        for (position, part) in cut(receive, ranges) {
            if self.host_of(position) != self.here {
                self.hand_out(part, wait)?;
            }
        }
        Ok(())
    }

    fn broadcast(&self, root: usize, cast: Cast<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        let host = self.host_of(root);
        if host == self.here {
            let seat = self.seats().iter().position(|position| *position == root);
            let seat = seat.expect("the root is on this host");
            return match cast {
                Cast::Give(bytes) => {
                    self.hall.broadcast(seat, Cast::Give(bytes), wait)?;
                    let Some(leaders) = &self.leaders else { return Ok(()) };
                    leaders.broadcast(host, Cast::Give(bytes), wait)
                }
                Cast::Take(bytes) => {
                    self.hall.broadcast(seat, Cast::Take(&mut *bytes), wait)?;
                    let Some(leaders) = &self.leaders else { return Ok(()) };
                    leaders.broadcast(host, Cast::Give(bytes), wait)
                }
            };
        }
        let Cast::Take(bytes) = cast else { return Ok(()) };
        if let Some(leaders) = &self.leaders {
            leaders.broadcast(host, Cast::Take(&mut *bytes), wait)?;
        }
        self.hand_out(bytes, wait)
    }

    fn all_to_all(&self, exchange: Exchange<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        let Exchange { send, out, receive, back, lengths } = exchange;
        let (links, place) = (self.everyone(wait)?, self.place());
        let seats = self.seats().to_vec();
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (position, part) in cut(receive, back) {
            if seats.contains(&position) {
                continue;
            }
            let peer = place.link(position);
            sends.push(outgoing(peer, &send[out[position].clone()]));
            receives.push(incoming(peer, part));
        }
        mesh::exchange(links, &mut sends, &mut receives, wait)?;
        let of_seats = |ranges: &[Range<usize>]| -> Vec<_> {
            seats.iter().map(|position| ranges[*position].clone()).collect()
        };
        let (out, back) = (of_seats(out), of_seats(back));
        let lengths = |from: usize, to: usize| lengths(seats[from], seats[to]);
        self.hall.all_to_all(Exchange { send, out: &out, receive, back: &back, lengths: &lengths }, wait)
    }

    fn reduce_scatter(
        &self,
        how: (ReduceOp, DType),
        send: &[u8],
        ranges: &[Range<usize>],
        receive: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        if !self.is_in_order() {
            let links = self.everyone(wait)?;
            return mesh::reduce_scatter(links, self.place(), how, send, ranges, receive, wait);
        }
        let mut outcome = Ok(());
        let mut result = Aligned::default();
        let own = &ranges[self.position];
        for (host, seats) in self.hosts.iter().enumerate() {
            let whole = ranges[seats[0]].start..ranges[seats[seats.len() - 1]].end;
            for start in whole.clone().step_by(BLOCK_BYTES) {
                let block = start..whole.end.min(start + BLOCK_BYTES);
                let result = result.room(block.len());
                outcome = outcome.and(self.chain(how, &send[block.clone()], wait, |range, piece| {
                    result[range].copy_from_slice(piece);
                    Ok(())
                })?);
                self.pass_on(host, result, wait)?;
                if host != self.here {
                    continue;
                }
                // Each member takes what of the block is its own; the leader has it.
                for (seat, position) in seats.iter().enumerate() {
                    let Some(common) = overlap(&ranges[*position], &block) else { continue };
                    let part = &mut result[common.start - block.start..common.end - block.start];
                    if seat > 0 {
                        self.hand_out(part, wait)?;
                    }
                    if *position == self.position {
                        receive[common.start - own.start..common.end - own.start].copy_from_slice(part);
                    }
                }
            }
        }
        Ok(outcome)
    }

    fn all_reduce(
        &self,
        how: (ReduceOp, DType),
        buffer: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        if !self.is_in_order() {
            let links = self.everyone(wait)?;
            return mesh::all_reduce(links, self.place(), how, buffer, wait);
        }
        let mut outcome = Ok(());
        let (mut result, last) = (Aligned::default(), self.hosts.len() - 1);
        for block in buffer.chunks_mut(BLOCK_BYTES) {
            let result = result.room(block.len());
            outcome = outcome.and(self.chain(how, block, wait, |range, piece| {
                result[range].copy_from_slice(piece);
                Ok(())
            })?);
            if let Some(leaders) = &self.leaders {
                if self.here == last {
                    block.copy_from_slice(result);
                    leaders.broadcast(last, Cast::Give(block), wait)?;
                } else {
                    leaders.broadcast(last, Cast::Take(&mut *block), wait)?;
                }
            }
            self.hand_out(block, wait)?;
        }
        Ok(outcome)
    }
}
