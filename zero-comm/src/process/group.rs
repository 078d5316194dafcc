//! Ranks that do things together.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use zero_core::{Rank, WorldSize};

use super::fabric::Fabric;
use super::host::HostPlane;
use super::hosts::HostsPlane;
use super::mesh_plane::MeshPlane;
use super::plane::Plane;
use super::shm::{Arena, Hall, Segment, Shape, SharedFile};
use super::standing::Standing;
use super::wait::Wait;
use super::world::WITHOUT_SHARED_MEMORY;
use crate::failure::Failure;
use crate::flight::{GroupId, Lane};
use crate::request::Request;
use crate::windows::Windows;
use crate::{CommError, lock, open_files};

/// What a rank has of its world.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) standing: Arc<Standing>,
    pub(crate) fabric: Arc<dyn Fabric>,
    /// By rank: which host it is on. Ranks of one host share memory.
    pub(crate) hosts: Vec<usize>,
}

/// One rank's part of a group. Positions are the ranks within the group.
pub(crate) struct Group {
    pub(crate) around: Arc<Surroundings>,
    pub(crate) id: GroupId,
    /// The rank in the world of each member.
    pub(crate) members: Vec<Rank>,
    pub(crate) position: usize,
    /// The members and their lane of collective operations.
    pub(crate) expected: Vec<(Rank, Lane)>,
    /// Held during a collective operation.
    pub(crate) turn: Mutex<()>,
    pub(crate) plane: Box<dyn Plane>,
    /// What this rank shows to members on other hosts, and to itself where nobody shares its memory.
    pub(crate) windows: Arc<Windows>,
    shared: Option<Shared>,
    messages: Mutex<HashMap<(Direction, usize), MessagesCell>>,
}

/// What members on one host share.
struct Shared {
    file: SharedFile,
    /// By seat: the position.
    seats: Vec<usize>,
    arenas: Vec<Arena>,
}

/// Which way messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Out,
    In,
}

/// Made with the first message. Locked meanwhile, which may last until the peer comes.
type MessagesCell = Arc<Mutex<Option<Arc<Messages>>>>;

/// Where messages of one direction between two members pass, one at a time. The sender has position 0.
pub(crate) struct Messages {
    pub(crate) turn: Mutex<()>,
    pub(crate) plane: Box<dyn Plane>,
}

/// The measures of a group's hall.
const fn hall(seats: usize) -> Shape {
    Shape { seats, post_bytes: 96 << 10, chunk_bytes: 128 << 10, chunks: 8 }
}

/// The measures of a hall for two that exchange messages.
const PAIR: Shape = Shape { seats: 2, post_bytes: 32 << 10, chunk_bytes: 128 << 10, chunks: 4 };

impl Group {
    /// The group `id` of `members`. All of them call this at the same time.
    ///
    /// `file` is empty memory of the members on this host; it is not used if no two members share memory.
    pub(crate) fn form(
        around: &Arc<Surroundings>,
        id: GroupId,
        members: Vec<Rank>,
        position: usize,
        file: Option<SharedFile>,
        wait: &mut Wait<'_>,
    ) -> Result<Arc<Self>, CommError> {
        let seats = around.seats(&members, position);
        let shared = match file.filter(|_| around.is_shared(&members)) {
            None => None,
            // The file is there until the world knows of an error: others that found none would report that.
            Some(file) => match Shared::new(file.clone(), seats.clone()) {
                Ok(shared) => Some(shared),
                Err(error) => return Err(around.no_shared_memory(&error, wait)),
            },
        };
        let plane = match &shared {
            None => {
                let others = members.iter().copied().filter(|rank| *rank != members[position]);
                let links = around.fabric.collective(id, &others.collect::<Vec<_>>(), wait)?;
                Box::new(MeshPlane::new(links, &members, position)) as Box<dyn Plane>
            }
            Some(shared) => {
                let ranks = seats.iter().map(|position| members[*position]).collect();
                let hall = match shared.hall(position, ranks) {
                    Ok(hall) => hall,
                    Err(error) => return Err(around.no_shared_memory(&error, wait)),
                };
                if seats.len() == members.len() {
                    Box::new(HostPlane::new(hall)) as Box<dyn Plane>
                } else {
                    Box::new(HostsPlane::form(around, id, &members, position, hall, wait)?)
                }
            }
        };
        let windows = Arc::default();
        if seats.len() < members.len() {
            around.fabric.serve(id, Arc::clone(&windows));
        }
        Ok(Arc::new(Self {
            around: Arc::clone(around),
            id,
            expected: members.iter().map(|rank| (*rank, Lane::Collective(id))).collect(),
            turn: Mutex::new(()),
            plane,
            windows,
            shared,
            messages: Mutex::default(),
            members,
            position,
        }))
    }

    pub(crate) fn standing(&self) -> &Standing {
        &self.around.standing
    }

    pub(crate) fn size(&self) -> WorldSize {
        WorldSize::new(self.members.len()).expect("this is a member")
    }

    /// The rank of this member in the world.
    pub(crate) fn rank(&self) -> Rank {
        self.members[self.position]
    }

    /// The arena of the member at `position`, if it shares memory with this one.
    pub(crate) fn arena(&self, position: usize) -> Option<&Arena> {
        let shared = self.shared.as_ref()?;
        let seat = shared.seats.iter().position(|member| *member == position)?;
        shared.arenas.get(seat)
    }

    /// The positions of the members on this one's host.
    pub(crate) fn seats(&self) -> Vec<usize> {
        self.around.seats(&self.members, self.position)
    }

    /// Whether some members share no memory with this one.
    pub(crate) fn has_members_elsewhere(&self) -> bool {
        let here = self.shared.as_ref().map_or(1, |shared| shared.seats.len());
        here < self.members.len()
    }

    /// Whether it is `windows` that some member reads.
    pub(crate) fn shows_windows(&self) -> bool {
        self.shared.is_none() || self.has_members_elsewhere()
    }

    /// Where messages to, or from, the member at `peer` pass.
    pub(crate) fn messages(
        &self,
        direction: Direction,
        peer: usize,
        wait: &mut Wait<'_>,
    ) -> Result<Arc<Messages>, CommError> {
        let cell = Arc::clone(lock(&self.messages).entry((direction, peer)).or_default());
        let mut messages = lock(&cell);
        if let Some(messages) = &*messages {
            return Ok(Arc::clone(messages));
        }
        let (from, to) = match direction {
            Direction::Out => (self.position, peer),
            Direction::In => (peer, self.position),
        };
        let (ranks, end) = ([self.members[from], self.members[to]], usize::from(direction == Direction::In));
        let local = self.shared.as_ref().and_then(|shared| shared.pair(from, to, ranks, end));
        let plane: Box<dyn Plane> = match local {
            Some(Ok(hall)) => Box::new(HostPlane::new(hall)),
            Some(Err(error)) => return Err(self.around.no_shared_memory(&error, wait)),
            None => {
                let links = match direction {
                    Direction::Out => self.around.fabric.sender(self.id, ranks[1], wait)?,
                    Direction::In => self.around.fabric.receiver(self.id, ranks[0], wait)?,
                };
                Box::new(MeshPlane::new(links, &ranks, end))
            }
        };
        Ok(Arc::clone(messages.insert(Arc::new(Messages { turn: Mutex::new(()), plane }))))
    }

    /// Joins the group that the members at `positions` make with `color`, as the `sequence`-th operation of
    /// this group. Every member of this group calls this, with `None` if it joins none.
    pub(crate) fn split(
        &self,
        sequence: u64,
        place: Option<(u64, Vec<usize>)>,
        wait: &mut Wait<'_>,
    ) -> Result<Option<Arc<Self>>, CommError> {
        let own = |positions: &[usize]| positions.iter().position(|position| *position == self.position);
        let place = place.and_then(|(color, positions)| Some((color, own(&positions)?, positions)));
        let members = |positions: &[usize]| positions.iter().map(|at| self.members[*at]).collect::<Vec<_>>();
        let seats = place.as_ref().map_or_else(Vec::new, |(_, position, positions)| {
            self.around.seats(&members(positions), *position)
        });
        // The first of each host makes the memory, and tells the others where it is.
        let mut file = None;
        if let Some((_, position, positions)) = &place {
            if self.around.is_shared(&members(positions)) && seats[0] == *position {
                match SharedFile::create() {
                    Ok(created) => file = Some(created),
                    Err(error) => return Err(self.around.no_shared_memory(&error, wait)),
                }
            }
        }
        let path = file.as_ref().map(SharedFile::path).unwrap_or_default();
        let mut told = String::new();
        self.plane.post(&[path.as_bytes()], wait, &mut |posts| {
            if let (Some((_, _, positions)), Some(seat)) = (&place, seats.first()) {
                told = String::from_utf8_lossy(posts[positions[*seat]]).into_owned();
            }
        })?;
        if file.is_none() && seats.len() > 1 {
            match SharedFile::open(&told) {
                Ok(opened) => file = Some(opened),
                Err(error) => return Err(self.around.no_shared_memory(&error, wait)),
            }
        }
        let group = match place {
            None => None,
            Some((color, position, positions)) => {
                let id = self.id.child(sequence, color);
                Some(Self::form(&self.around, id, members(&positions), position, file, wait)?)
            }
        };
        // Whoever made the memory must not go before all have opened it.
        self.plane.post(&[], wait, &mut |_| ())?;
        Ok(group)
    }
}

/// Whom the requests of a split, by position, put together with the member at `position`.
pub(crate) fn seating(requests: &[Request], position: usize) -> Option<(u64, Vec<usize>)> {
    let color_of = |request: &Request| match request {
        Request::Split { color: Some(color), key } => Some((*color, *key)),
        _ => None,
    };
    let (own, _) = color_of(requests.get(position)?)?;
    let mut members: Vec<_> = requests
        .iter()
        .enumerate()
        .filter_map(|(position, request)| {
            color_of(request).filter(|(color, _)| *color == own).map(|(_, key)| (key, position))
        })
        .collect();
    members.sort_unstable();
    Some((own, members.into_iter().map(|(_, position)| position).collect()))
}

impl Surroundings {
    /// The positions of those `members` that share memory with the one at `position`, in ascending order.
    pub(crate) fn seats(&self, members: &[Rank], position: usize) -> Vec<usize> {
        let host = |position: usize| self.hosts[members[position].index()];
        (0..members.len()).filter(|member| host(*member) == host(position)).collect()
    }

    /// Whether any two `members` share memory.
    fn is_shared(&self, members: &[Rank]) -> bool {
        (0..members.len()).any(|position| self.seats(members, position).len() > 1)
    }

    /// Fails the world, because this rank cannot share memory with those of its host.
    fn no_shared_memory(&self, error: &io::Error, wait: &Wait<'_>) -> CommError {
        // TCP would need still more files.
        let otherwise = if open_files::are_exhausted(error) { "" } else { WITHOUT_SHARED_MEMORY };
        let reason = format!("it cannot share memory with the other ranks of its host: {error}{otherwise}");
        let failure = self.standing.fail(Failure::Aborted { rank: self.standing.rank(), reason });
        failure.error(wait.operation().kind, wait.operation().label)
    }
}

impl Shared {
    fn new(file: SharedFile, seats: Vec<usize>) -> io::Result<Self> {
        file.set_length(Arena::BYTES * (seats.len() as u64 + 1))?;
        // Nobody else would read the windows of the only one.
        let arenas = (0..if seats.len() > 1 { seats.len() } else { 0 })
            .map(|seat| Arena::new(file.clone(), Arena::BYTES, seat))
            .collect::<io::Result<_>>()?;
        Ok(Self { file, seats, arenas })
    }

    /// The seat of the member at `position` in the hall of all.
    fn hall(&self, position: usize, ranks: Vec<Rank>) -> io::Result<Hall> {
        let shape = hall(self.seats.len());
        let segment = Arc::new(Segment::map(&self.file, 0, shape.bytes())?);
        let seat = self.seats.iter().position(|member| *member == position);
        let seat = seat.expect("this member shares its own memory");
        Ok(Hall::new(segment, 0, shape, seat, ranks))
    }

    /// The seat of `end` in the hall for messages between two positions, if both are here.
    fn pair(&self, from: usize, to: usize, ranks: [Rank; 2], end: usize) -> Option<io::Result<Hall>> {
        let seat = |position: usize| self.seats.iter().position(|member| *member == position);
        let index = seat(from)? * self.seats.len() + seat(to)?;
        let offset = hall(self.seats.len()).bytes() + index * PAIR.bytes();
        let segment = Segment::map(&self.file, offset as u64, PAIR.bytes());
        Some(segment.map(|segment| Hall::new(Arc::new(segment), 0, PAIR, end, ranks.to_vec())))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let standing = self.standing();
        standing.recorder().leave(self.id);
        if self.has_members_elsewhere() {
            // They may go on reading what this member shows.
            standing.leave(self.id, self.members.len());
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("id", &self.id)
            .field("members", &self.members)
            .field("plane", &self.plane)
            .finish_non_exhaustive()
    }
}
