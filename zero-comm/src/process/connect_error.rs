//! Why a rank did not become part of a world.

use std::io;
use std::net::SocketAddr;

use zero_core::{Rank, WorldSize};

use crate::control::JoinError;
use crate::environment::{AddressFileError, EnvironmentError, TorchStoreError};
use crate::{CommError, ProcessWorld, open_files};

/// Why a rank did not become part of a world of processes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The coordinator did not let it join, or could not be reached.
    #[error(transparent)]
    Join(#[from] JoinError),

    /// No world has so many ranks.
    #[error("a world cannot have {size} ranks; ask for {} at most", ProcessWorld::MAX_RANKS)]
    TooManyRanks {
        /// How many there were to be.
        size: WorldSize,
    },

    /// The environment says what makes no sense.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),

    /// The store of PyTorch's launcher did not tell where rank 0 is.
    #[error(transparent)]
    Store(#[from] TorchStoreError),

    /// The file that tells where rank 0 is could not be written or read.
    #[error(transparent)]
    File(#[from] AddressFileError),

    /// Rank 0 cannot listen where the others look for it.
    #[error("cannot listen at {address}: {source}; free the port, or choose another by MASTER_PORT")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },

    /// A host has no address.
    #[error("no address is known for host {host:?}: {source}; see whether MASTER_ADDR is right")]
    Resolve {
        /// The host.
        host: String,
        /// Why not.
        source: io::Error,
    },

    /// No interface of this host leads to another.
    #[error(
        "cannot find the interface by which {host:?} is reached: {source}; see whether `ip route get` knows a \
         way there, and whether MASTER_ADDR is the right host"
    )]
    Route {
        /// The other host.
        host: String,
        /// Why not.
        source: io::Error,
    },

    /// This host does not know its own address, which others need.
    #[cfg(feature = "mpi")]
    #[error(
        "no address is known for {host:?}, which is this host's name: {source}; enter it in /etc/hosts, or \
         make the name service know it"
    )]
    OwnName {
        /// The name.
        host: String,
        /// Why not.
        source: io::Error,
    },

    /// What was told of rank 0 is not an address.
    #[error("{0:?} does not tell where rank 0 is; is the store used by another program?")]
    Told(String),

    /// The operating system gives no random numbers.
    #[error("cannot make a token for the job: {0}; set ZERO_JOB_TOKEN to one")]
    Random(#[source] io::Error),

    /// This host's memory or network cannot be used.
    #[error("cannot {action}: {source}{advice}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
        /// What to do, if that can be said.
        advice: &'static str,
    },

    /// MPI could not be started, or did not tell where rank 0 is.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] crate::MpiError),

    /// The ranks met, but could not connect to each other.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl ConnectError {
    /// The rank that it originates from, if that can be told.
    pub(super) fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Join(JoinError::Refused(refusal)) => refusal.blamed(),
            Self::Comm(CommError::PeerLost { rank, .. } | CommError::Aborted { rank, .. }) => Some(*rank),
            _ => None,
        }
    }

    /// The system did not let this process do `action`. The advice is for all but too few files, for which there is
    /// advice of its own.
    pub(super) fn system(action: &'static str, advice: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| {
            let source = open_files::advised(error);
            let advice = if open_files::are_exhausted(&source) { "" } else { advice };
            Self::System { action, source, advice }
        }
    }
}
