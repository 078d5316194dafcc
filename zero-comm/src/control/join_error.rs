//! Why a rank does not belong to its world.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_core::{Rank, WorldSize};

use super::handshake::VERSION;
use crate::error::Ranks;

/// Why a rank could not join its world.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The coordinator's address is none.
    #[error("{address:?} is no address of a coordinator, which would be HOST:PORT: {source}")]
    Address {
        /// What was given.
        address: String,
        /// What is wrong with it.
        source: io::Error,
    },

    /// No coordinator could be reached before the deadline.
    #[error(
        "no coordinator answered at {address} within {after:?}, the last try ended with: {source}; start \
         it, or correct the address, or raise the deadline"
    )]
    Unreachable {
        /// Where it should be.
        address: String,
        /// How long it was tried.
        after: Duration,
        /// How the last try ended.
        source: io::Error,
    },

    /// Something else answers at the coordinator's address.
    #[error("what answers at {address} is no coordinator of ranks: {found}; correct the address")]
    Stranger {
        /// Where the coordinator should be.
        address: String,
        /// What gave it away.
        found: String,
    },

    /// The coordinator speaks another version of the protocol.
    #[error(
        "the coordinator at {address} speaks protocol {theirs}, this build speaks {}; run one build everywhere",
        VERSION
    )]
    Version {
        /// Where the coordinator is.
        address: String,
        /// Its version.
        theirs: u16,
    },

    /// The coordinator does not accept this rank's token.
    #[error(
        "the coordinator at {address} does not accept this process's token; give all processes of a job the \
         same, and no two jobs the same address"
    )]
    Token {
        /// Where the coordinator is.
        address: String,
    },

    /// What answers as the coordinator accepts any token, and does not know this one.
    #[error("what answers at {address} does not know this job's token, so it is not the job's coordinator")]
    Impostor {
        /// Where the coordinator should be.
        address: String,
    },

    /// The coordinator refused this rank, or the whole world could not begin.
    #[error(transparent)]
    Refused(#[from] Refusal),

    /// The coordinator went away before the world began.
    #[error(
        "the coordinator at {address} was lost before all ranks had joined: {how}; see what it said last"
    )]
    Lost {
        /// Where it was.
        address: String,
        /// How.
        how: String,
    },

    /// The system did not give this rank what it needs to listen to the coordinator.
    #[error("a connection to the coordinator cannot be served: {source}")]
    System {
        /// Why.
        source: io::Error,
    },
}

/// Why the coordinator let nobody, or not this rank, into the world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The rank expects a world of another size.
    #[error(
        "{rank} expects a world of {theirs} ranks, but its coordinator one of {ours}; give both the same"
    )]
    Size {
        /// Who.
        rank: Rank,
        /// What it expects.
        theirs: WorldSize,
        /// What the coordinator was told.
        ours: WorldSize,
    },

    /// The world has no such rank.
    #[error("{rank} does not exist in a world of {size}, whose ranks count from 0")]
    Range {
        /// Who.
        rank: Rank,
        /// The size of the world.
        size: WorldSize,
    },

    /// Another process has joined as this rank.
    #[error(
        "{rank} has joined from {first}, so another process at {second} cannot be it; give each process a \
         rank of its own, and each job a coordinator of its own"
    )]
    Taken {
        /// Which rank.
        rank: Rank,
        /// Who came first.
        first: SocketAddr,
        /// Who came later.
        second: SocketAddr,
    },

    /// Not all ranks run the same build.
    #[error("{rank} runs build {theirs:?}, but {other} runs {ours:?}; run one build everywhere")]
    Build {
        /// Who came later.
        rank: Rank,
        /// Its build.
        theirs: String,
        /// Who came first.
        other: Rank,
        /// The build of that.
        ours: String,
    },

    /// The process has joined before.
    #[error(
        "this process has joined the world of its launcher as {rank} already, and that can be joined once; do all \
         that the ranks do together in one run"
    )]
    Again {
        /// Which rank.
        rank: Rank,
    },

    /// Not all ranks came before the deadline.
    #[error(
        "{} did not join within {after:?}; find out why they did not start, or raise the deadline",
        Ranks(missing)
    )]
    Missing {
        /// Who did not come.
        missing: Vec<Rank>,
        /// How long the coordinator waited.
        after: Duration,
    },

    /// The coordinator can take in no more ranks.
    #[error("the coordinator, in rank 0's process or the launcher's, can take in no more ranks: {how}")]
    Full {
        /// Why not.
        how: String,
    },

    /// The process of a rank ended before it joined, as its launcher says.
    #[error("{rank} ended before it joined its world: {how}; see what it said last")]
    Ended {
        /// Who.
        rank: Rank,
        /// How its process ended.
        how: String,
    },

    /// A rank left before all had come.
    #[error("{rank} had joined and left before the world began: {how}; see what it said last")]
    Left {
        /// Who.
        rank: Rank,
        /// How.
        how: String,
    },
}

impl Refusal {
    /// The rank that is to blame if the world does not begin because of this.
    pub(crate) fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Missing { missing, .. } => missing.first().copied(),
            Self::Left { rank, .. } | Self::Ended { rank, .. } => Some(*rank),
            // These concern one process, and the world goes on without it, or no rank.
            Self::Size { .. }
            | Self::Range { .. }
            | Self::Taken { .. }
            | Self::Again { .. }
            | Self::Full { .. }
            | Self::Build { .. } => None,
        }
    }
}
