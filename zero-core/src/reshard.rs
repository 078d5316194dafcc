//! From the shards of one partition to the shards of another.

use std::ops::Range;

use thiserror::Error;

use crate::{Partition, Rank};

/// A run of elements that has one owner before and one after.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    /// The owner in the old partition.
    pub from: Rank,
    /// The owner in the new partition; it may be the same rank.
    pub to: Rank,
    /// The elements, counted from the first one of the whole; never empty.
    pub range: Range<usize>,
}

/// Why two partitions cannot be resharded into each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReshardError {
    /// The partitions do not split the same number of elements.
    #[error(
        "cannot reshard {from} elements into {to}: both partitions must split the same parameter, so check \
         that its shape has not changed"
    )]
    Numel {
        /// Elements of the old partition.
        from: usize,
        /// Elements of the new partition.
        to: usize,
    },
}

/// The moves that turn the shards of `from` into the shards of `to`.
///
/// They come in element order and cover each element exactly once, those that stay with their rank included;
/// a move ends where either partition changes owner, so there are fewer moves than both world sizes together.
///
/// ```
/// use zero_core::{Move, Partition, Rank, WorldSize, reshard};
///
/// let (two, three) = (WorldSize::new(2).unwrap(), WorldSize::new(3).unwrap());
/// let moves: Vec<_> = reshard(&Partition::new(6, two), &Partition::new(6, three))?.collect();
/// let (a, b, c) = (Rank::new(0), Rank::new(1), Rank::new(2));
/// assert_eq!(moves[0], Move { from: a, to: a, range: 0..2 });
/// assert_eq!(moves[1], Move { from: a, to: b, range: 2..3 });
/// assert_eq!(moves[2], Move { from: b, to: b, range: 3..4 });
/// assert_eq!(moves[3], Move { from: b, to: c, range: 4..6 });
/// # Ok::<(), zero_core::ReshardError>(())
/// ```
///
/// # Errors
///
/// [`ReshardError::Numel`] when the partitions split different numbers of elements.
pub fn reshard(from: &Partition, to: &Partition) -> Result<impl Iterator<Item = Move> + use<>, ReshardError> {
    if from.numel() != to.numel() {
        return Err(ReshardError::Numel { from: from.numel(), to: to.numel() });
    }
    let target = *to;
    Ok(from.intersect(0..from.numel()).flat_map(move |(owner, shard)| {
        target.intersect(shard).map(move |(to, range)| Move { from: owner, to, range })
    }))
}
