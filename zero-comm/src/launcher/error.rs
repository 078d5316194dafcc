//! Why a job could not be started.

use std::io;
use std::net::IpAddr;

use zero_core::Rank;

use super::placement::PlacementError;

/// Why a job could not be started. Nothing of it is left when this is returned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error(transparent)]
    Placement(#[from] PlacementError),
    #[error(
        "there is no program {program:?} for {rank}, or no interpreter that it names; check its name and PATH"
    )]
    NoProgram { program: String, rank: Rank },
    #[error(
        "cannot start {program:?} for {rank}: {source}; check its permissions and the limits here (ulimit -a)"
    )]
    Start { program: String, rank: Rank, source: io::Error },
    #[error("cannot start what is needed beside {rank}: {source}; too many ranks for this machine?")]
    Attend { rank: Rank, source: io::Error },
    #[error("cannot find the way to host {host:?}: {source}; use a name that resolves here")]
    Route { host: String, source: io::Error },
    #[error("cannot listen for ranks at {address}: {source}")]
    Listen { address: IpAddr, source: io::Error },
    #[error("cannot host the coordinator of the ranks: {0}")]
    Coordinator(io::Error),
    #[error("cannot make a temporary folder: {0}; check TMPDIR")]
    Folder(io::Error),
    #[error("cannot start the program that ends the ranks should this one be killed: {0}")]
    Guard(io::Error),
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    #[error("the system gives no random numbers for the job's token: {0}")]
    Random(io::Error),
    #[error("the folder that ranks run in is gone: {0}")]
    NoFolder(io::Error),
}

impl LaunchError {
    /// As shells do: 2 for a wrong command line, 127 for a program that does not exist, 126 for one that cannot be run.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Placement(_) => 2,
            Self::NoProgram { .. } => 127,
            Self::Start { .. } => 126,
            _ => 1,
        }
    }
}
