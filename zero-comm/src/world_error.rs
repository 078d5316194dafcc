//! Why a world did not come to its end.

use std::error::Error;
use std::fmt::{self, Debug, Display};
use std::io;

use zero_core::Rank;

use crate::ConnectError;

/// Why a world did not come to its end: the first failure, and what followed from it.
///
/// First is the rank that the failure originated from; where that cannot be told, because all ranks learnt
/// of it together, the rank that returned first. `E` is what the ranks return; it need not implement
/// [`Error`], so `anyhow::Error` and boxed errors do.
#[derive(Debug)]
#[non_exhaustive]
pub enum WorldError<E> {
    /// A rank returned an error.
    Failed {
        /// Which rank.
        rank: Rank,
        /// What it returned.
        source: E,
        /// How other ranks failed, in the order in which they did.
        others: Vec<(Rank, RankFailure<E>)>,
    },
    /// A rank panicked.
    Panicked {
        /// Which rank.
        rank: Rank,
        /// The panic's message.
        message: String,
        /// How other ranks failed, in the order in which they did.
        others: Vec<(Rank, RankFailure<E>)>,
    },
    /// This process did not become a rank of its world.
    Connect {
        /// Which rank it was to be.
        rank: Rank,
        /// Why.
        source: Box<ConnectError>,
    },
    /// The system did not give a rank a thread.
    Spawn {
        /// Which rank.
        rank: Rank,
        /// Why.
        source: io::Error,
    },
}

/// How one rank failed.
#[derive(Debug)]
pub enum RankFailure<E> {
    /// It returned this error.
    Error(E),
    /// It panicked with this message.
    Panic(String),
}

impl<E> WorldError<E> {
    /// The error for `failures`, which are in order of time; `None` if there are none. The rank that is
    /// `blamed` goes first.
    pub(crate) fn from_failures(
        mut failures: Vec<(Rank, RankFailure<E>)>,
        blamed: Option<Rank>,
    ) -> Option<Self> {
        let first = failures.iter().position(|(rank, _)| Some(*rank) == blamed).unwrap_or(0);
        if failures.is_empty() {
            return None;
        }
        let (rank, failure) = failures.remove(first);
        Some(match failure {
            RankFailure::Error(source) => Self::Failed { rank, source, others: failures },
            RankFailure::Panic(message) => Self::Panicked { rank, message, others: failures },
        })
    }

    /// The error for the one rank of this process.
    pub(crate) fn from_one(rank: Rank, failure: RankFailure<E>) -> Self {
        match failure {
            RankFailure::Error(source) => Self::Failed { rank, source, others: Vec::new() },
            RankFailure::Panic(message) => Self::Panicked { rank, message, others: Vec::new() },
        }
    }

    /// The rank that failed first, of those in this process.
    pub const fn rank(&self) -> Rank {
        match self {
            Self::Failed { rank, .. }
            | Self::Panicked { rank, .. }
            | Self::Connect { rank, .. }
            | Self::Spawn { rank, .. } => *rank,
        }
    }
}

impl<E: Display> Display for WorldError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = match self {
            // The alternate form is how anyhow shows the whole chain.
            Self::Failed { rank, source, others } => {
                write!(f, "{rank} failed: {source:#}")?;
                others
            }
            Self::Panicked { rank, message, others } => {
                write!(f, "{rank} panicked: {message}")?;
                others
            }
            Self::Connect { rank, source } => return write!(f, "{rank} did not join its world: {source}"),
            Self::Spawn { rank, source } => return write!(f, "{rank} has no thread: {source}"),
        };
        for (position, (rank, _)) in others.iter().enumerate() {
            write!(f, "{}{rank}", if position == 0 { "; after it failed " } else { ", " })?;
        }
        Ok(())
    }
}

impl<E: Display + Debug> Error for WorldError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Connect { source, .. } => Some(source),
            Self::Spawn { source, .. } => Some(source),
            Self::Failed { .. } | Self::Panicked { .. } => None,
        }
    }
}
