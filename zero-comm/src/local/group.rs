//! Ranks that do things together.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use zero_core::{Rank, WorldSize};

use super::health::Health;
use super::rendezvous::Rendezvous;
use crate::flight::GroupId;
use crate::lock;
use crate::request::Request;
use crate::windows::Windows;

/// What all members of one group share. Positions in it are the ranks within the group.
pub(super) struct Group {
    id: GroupId,
    /// How often this group was split.
    splits: AtomicU64,
    health: Arc<Health>,
    size: WorldSize,
    /// The rank in the world of each member.
    members: Vec<Rank>,
    hall: Arc<Rendezvous>,
    /// Where a sender (seat 0) meets a receiver (seat 1).
    pairs: Mutex<HashMap<(usize, usize), Arc<Rendezvous>>>,
    windows: Vec<Windows>,
}

/// Where each member of a split group belongs: its new group and its position there.
pub(super) type Seating = Vec<Option<(Arc<Group>, usize)>>;

impl Group {
    /// The group of all ranks of a world.
    pub(super) fn whole(size: WorldSize, health: &Arc<Health>) -> Arc<Self> {
        Self::new(GroupId::WORLD, size, size.ranks().collect(), health)
    }

    fn new(id: GroupId, size: WorldSize, members: Vec<Rank>, health: &Arc<Health>) -> Arc<Self> {
        Arc::new(Self {
            id,
            splits: AtomicU64::new(0),
            health: Arc::clone(health),
            size,
            hall: Rendezvous::new(health, members.clone()),
            pairs: Mutex::default(),
            windows: members.iter().map(|_| Windows::default()).collect(),
            members,
        })
    }

    pub(super) const fn id(&self) -> GroupId {
        self.id
    }

    pub(super) const fn size(&self) -> WorldSize {
        self.size
    }

    /// The ranks in the world, by position.
    pub(super) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Where all members meet.
    pub(super) fn hall(&self) -> &Rendezvous {
        &self.hall
    }

    /// Where the sender at position `from` meets the receiver at position `to`.
    pub(super) fn pair(&self, from: usize, to: usize) -> Arc<Rendezvous> {
        let mut pairs = lock(&self.pairs);
        let pair = pairs
            .entry((from, to))
            .or_insert_with(|| Rendezvous::new(&self.health, vec![self.members[from], self.members[to]]));
        Arc::clone(pair)
    }

    pub(super) fn windows(&self, position: usize) -> &Windows {
        &self.windows[position]
    }

    /// Makes the groups that the members ask for with their requests, which are in order of position.
    pub(super) fn split<'a>(&self, requests: impl Iterator<Item = &'a Request>) -> Seating {
        let mut colors: BTreeMap<u64, Vec<(u64, usize)>> = BTreeMap::new();
        for (position, request) in requests.enumerate() {
            if let Request::Split { color: Some(color), key } = request {
                colors.entry(*color).or_default().push((*key, position));
            }
        }
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let mut seating = vec![None; self.members.len()];
        for (color, mut positions) in colors {
            positions.sort_unstable();
            let Some(size) = WorldSize::new(positions.len()) else { continue };
            let members = positions.iter().map(|(_, position)| self.members[*position]).collect();
            let group = Self::new(self.id.child(split, color), size, members, &self.health);
            for (rank, (_, position)) in positions.into_iter().enumerate() {
                seating[position] = Some((Arc::clone(&group), rank));
            }
        }
        seating
    }
}
