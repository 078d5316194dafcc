//! Who owns which elements.

use std::num::NonZeroUsize;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Rank, WorldSize};

/// The rule that splits a number of elements into one contiguous range, a *shard*, per rank.
///
/// Elements are dealt out in grains of [`alignment`](Self::alignment) elements, of which the last may be
/// short. Counted in grains, shards differ by at most one, and the first ranks hold the larger ones: rank 0's
/// shard is never smaller than another, and only the last ranks' shards may be empty.
///
/// Every method is total: any number of elements, zero and `usize::MAX` too, any world size, any rank.
///
/// ```
/// use zero_core::{Partition, Rank, WorldSize};
///
/// let partition = Partition::new(10, WorldSize::new(4).unwrap());
/// let shards: Vec<_> = partition.ranges().map(|(_, range)| range).collect();
/// assert_eq!(shards, [0..3, 3..6, 6..8, 8..10]);
/// assert_eq!(partition.owner(7), Some(Rank::new(2)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    numel: usize,
    world: WorldSize,
    alignment: NonZeroUsize,
}

impl Partition {
    /// `numel` elements over `world`, with an alignment of one element.
    pub const fn new(numel: usize, world: WorldSize) -> Self {
        Self { numel, world, alignment: NonZeroUsize::MIN }
    }

    /// The same elements, with shards that begin at multiples of `alignment` elements.
    pub const fn with_alignment(self, alignment: NonZeroUsize) -> Self {
        Self { alignment, ..self }
    }

    /// `numel` elements with one owner, in a world of one.
    pub const fn whole(numel: usize) -> Self {
        Self::new(numel, WorldSize::ONE)
    }

    /// The number of elements of all shards together.
    pub const fn numel(&self) -> usize {
        self.numel
    }

    /// The number of shards.
    pub const fn world_size(&self) -> WorldSize {
        self.world
    }

    /// The grain in which elements are dealt out, in elements.
    pub const fn alignment(&self) -> NonZeroUsize {
        self.alignment
    }

    /// The elements `rank` owns; empty at [`numel`](Self::numel) for a rank outside of the world.
    pub fn range(&self, rank: Rank) -> Range<usize> {
        if !self.world.contains(rank) {
            return self.numel..self.numel;
        }
        self.start(rank.index())..self.start(rank.index() + 1)
    }

    /// The number of elements `rank` owns.
    pub fn len(&self, rank: Rank) -> usize {
        self.range(rank).len()
    }

    /// Whether there are no elements at all.
    pub const fn is_empty(&self) -> bool {
        self.numel == 0
    }

    /// The number of elements of the largest shard.
    pub fn max_len(&self) -> usize {
        self.len(Rank::ROOT)
    }

    /// Every rank with its shard, in rank order, empty shards included.
    pub fn ranges(
        &self,
    ) -> impl DoubleEndedIterator<Item = (Rank, Range<usize>)> + ExactSizeIterator + use<> {
        let partition = *self;
        self.world.ranks().map(move |rank| (rank, partition.range(rank)))
    }

    /// The rank that owns the element at `index`, found in constant time; `None` past the last element.
    pub fn owner(&self, index: usize) -> Option<Rank> {
        if index >= self.numel {
            return None;
        }
        let grain = index / self.alignment.get();
        let (base, extra) = self.grains_per_rank();
        if extra == 0 {
            return Some(Rank::new(grain / base));
        }
        // Cannot overflow: a remainder means at least two ranks, and the product is at most the grains there
        // are.
        let in_larger_shards = extra * (base + 1);
        Some(Rank::new(if grain < in_larger_shards {
            grain / (base + 1)
        } else {
            extra + (grain - in_larger_shards) / base
        }))
    }

    /// The pieces of `range` by owner: in order, none empty, each within its owner's shard. What lies past
    /// the last element belongs to nobody and is left out.
    pub fn intersect(
        &self,
        range: Range<usize>,
    ) -> impl DoubleEndedIterator<Item = (Rank, Range<usize>)> + use<> {
        let partition = *self;
        let end = range.end.min(self.numel);
        let owners = match (self.owner(range.start), end.checked_sub(1).and_then(|last| self.owner(last))) {
            (Some(first), Some(last)) if range.start < end => first.index()..last.index() + 1,
            _ => 0..0,
        };
        // Shards between two owners are never empty: only the last ranks' are.
        owners.map(move |index| {
            let rank = Rank::new(index);
            let shard = partition.range(rank);
            (rank, shard.start.max(range.start)..shard.end.min(end))
        })
    }

    /// The first element of the shard at `index`, which is at most the world size.
    fn start(&self, index: usize) -> usize {
        let (base, extra) = self.grains_per_rank();
        let grains = index * base + index.min(extra);
        // The last grain may reach past the elements, and past `usize::MAX`.
        grains.saturating_mul(self.alignment.get()).min(self.numel)
    }

    /// Grains every rank gets, and how many of the first ranks get one more.
    fn grains_per_rank(&self) -> (usize, usize) {
        let grains = self.numel.div_ceil(self.alignment.get());
        (grains / self.world.get(), grains % self.world.get())
    }
}
