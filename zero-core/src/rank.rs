//! Who takes part: ranks and the size of their world.

use std::fmt;
use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

/// The position of one participant in a group, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(usize);

impl Rank {
    /// The rank that does what only one may do: it draws initial values, writes manifests, prints.
    pub const ROOT: Self = Self(0);

    /// The rank at `index`.
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// The position, counted from 0.
    pub const fn index(self) -> usize {
        self.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// The number of ranks in a group; at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorldSize(NonZeroUsize);

impl WorldSize {
    /// A world of one: nothing is sharded, nothing is sent.
    pub const ONE: Self = Self(NonZeroUsize::MIN);

    /// A world of `size` ranks; `None` for zero.
    pub const fn new(size: usize) -> Option<Self> {
        match NonZeroUsize::new(size) {
            Some(size) => Some(Self(size)),
            None => None,
        }
    }

    /// The number of ranks.
    pub const fn get(self) -> usize {
        self.0.get()
    }

    /// Every rank, in order.
    pub fn ranks(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + Clone {
        (0..self.get()).map(Rank::new)
    }

    /// Whether `rank` belongs to a world of this size.
    pub const fn contains(self, rank: Rank) -> bool {
        rank.index() < self.get()
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
