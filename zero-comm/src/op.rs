//! What ranks do together.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How elements at one position, one from each rank, become one element.
///
/// Elements are combined in rank order 0, 1, 2, ..., so results are bitwise the same on every rank and on
/// every run. Floating point rules:
///
/// - `bf16` and `f16` are combined in `f32` and rounded once, to nearest even, at the end.
/// - A result that is not a number is the canonical NaN of its type. `Max` and `Min` propagate NaN: one NaN
///   among the ranks makes the result NaN.
/// - The sum of negative zeros is negative zero; for `Max` and `Min` negative zero is less than zero.
///
/// Integer sums that do not fit their type are [`CommError::Overflow`](crate::CommError::Overflow), never
/// a wrapped value; the mean of integers is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum, in the type it is accumulated in, divided by the number of ranks, then rounded.
    Mean,
    /// The greatest.
    Max,
    /// The least.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// The name of an operation of a [`Communicator`](crate::Communicator), as it stands in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum OpKind {
    /// Every rank gets the reduction of all buffers.
    AllReduce,
    /// Every rank gets all buffers, one after the other.
    AllGather,
    /// Every rank gets its part of the reduction of all buffers.
    ReduceScatter,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Every rank gets its part of each buffer.
    AllToAll,
    /// No rank goes on before all have come.
    Barrier,
    /// A group becomes several.
    Split,
    /// Changes to windows become what reads see.
    Fence,
    /// One rank gives a buffer to another.
    Send,
    /// One rank takes a buffer from another.
    Receive,
    /// A rank opens a window.
    Expose,
    /// A rank closes a window.
    Withdraw,
    /// A rank reads from a window.
    Read,
    /// Ranks become a world.
    Join,
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Fence => "fence",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Expose => "expose",
            Self::Withdraw => "withdraw",
            Self::Read => "read",
            Self::Join => "join",
        })
    }
}
