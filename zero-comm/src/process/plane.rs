//! How the members of a group move bytes together.

use std::fmt::Debug;
use std::ops::Range;

use zero_core::DType;

use super::wait::Wait;
use crate::reduce::TooNarrow;
use crate::{CommError, ReduceOp};

/// A side of a broadcast.
#[derive(Debug)]
pub(crate) enum Cast<'a> {
    /// The root's.
    Give(&'a [u8]),
    /// Everybody else's.
    Take(&'a mut [u8]),
}

impl Cast<'_> {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::Give(bytes) => bytes.len(),
            Self::Take(bytes) => bytes.len(),
        }
    }
}

/// What an all-to-all moves, for one member. Ranges are in bytes, one per member, and ascend.
pub(crate) struct Exchange<'a> {
    pub(crate) send: &'a [u8],
    pub(crate) out: &'a [Range<usize>],
    pub(crate) receive: &'a mut [u8],
    pub(crate) back: &'a [Range<usize>],
    /// How many bytes go from one member to another; equal on all.
    pub(crate) lengths: &'a dyn Fn(usize, usize) -> usize,
}

/// How the members of a group move bytes together. One operation at a time.
///
/// All members call the same methods in the same order with arguments that fit together: that they do has
/// been found out by a [`post`](Self::post) before. `ranges` are in bytes, one per member, ascending,
/// adjacent and equal on all.
///
/// # Errors
///
/// Those of [`Wait::check`] and [`Wait::broken`]; after an error the plane is of no use, unless the error is
/// that of a post.
pub(crate) trait Plane: Send + Sync + Debug {
    /// How much a member can post.
    fn post_bytes(&self) -> usize;

    /// Shows the concatenation of `parts` to all, and lets `read` see what every member posted, by position.
    fn post(
        &self,
        parts: &[&[u8]],
        wait: &mut Wait<'_>,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<(), CommError>;

    /// Puts `mine` at this member's range of everybody's `receive`.
    fn all_gather(
        &self,
        mine: &[u8],
        receive: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError>;

    /// Gives the `root`'s bytes to all.
    fn broadcast(&self, root: usize, cast: Cast<'_>, wait: &mut Wait<'_>) -> Result<(), CommError>;

    /// Gives each member its range of `send`.
    fn all_to_all(&self, exchange: Exchange<'_>, wait: &mut Wait<'_>) -> Result<(), CommError>;

    /// Reduces `send` over all members, in their order, and gives each its range of the result.
    fn reduce_scatter(
        &self,
        how: (ReduceOp, DType),
        send: &[u8],
        ranges: &[Range<usize>],
        receive: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError>;

    /// Replaces `buffer` by its reduction over all members, in their order.
    fn all_reduce(
        &self,
        how: (ReduceOp, DType),
        buffer: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError>;
}

/// Cuts `length` bytes into one range per member, of nearly equal length, at whole cache lines.
pub(crate) fn stripes(length: usize, members: usize) -> Vec<Range<usize>> {
    const LINE: usize = 64;
    let stripe = length.div_ceil(members).next_multiple_of(LINE);
    let end = |member: usize| (member * stripe).min(length);
    (0..members).map(|member| end(member)..end(member + 1)).collect()
}

/// The ranges, in bytes, of adjacent parts of `counts` elements of `size` bytes.
pub(crate) fn ranges(counts: &[usize], size: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    counts
        .iter()
        .map(|count| {
            let start = end;
            end += count * size;
            start..end
        })
        .collect()
}

/// What two ranges have in common, if they have.
pub(crate) fn overlap(first: &Range<usize>, second: &Range<usize>) -> Option<Range<usize>> {
    let common = first.start.max(second.start)..first.end.min(second.end);
    (!common.is_empty()).then_some(common)
}

/// The parts of `whole` at `ranges`, which ascend and do not overlap, each with its place among them.
pub(crate) fn cut<'a>(whole: &'a mut [u8], ranges: &[Range<usize>]) -> Vec<(usize, &'a mut [u8])> {
    let (mut rest, mut at) = (whole, 0);
    let mut parts = Vec::with_capacity(ranges.len());
    for (member, range) in ranges.iter().enumerate() {
        let (_, tail) = rest.split_at_mut(range.start - at);
        let (part, tail) = tail.split_at_mut(range.len());
        parts.push((member, part));
        (rest, at) = (tail, range.end);
    }
    parts
}
