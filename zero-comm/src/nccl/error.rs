//! Why something with NCCL did not happen.

use std::time::Duration;

use cudarc::driver::DriverError;
use zero_core::{Rank, WorldSize};

use crate::{CommError, OpKind};

/// Why something with an [`NcclCommunicator`](crate::NcclCommunicator) or a [`DeviceWindow`](crate::DeviceWindow) did
/// not happen.
///
/// Every [`Rank`] is one of the `control` that the communicator, or the one it was split off, was made with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// There is no NCCL to load.
    #[error(
        "NCCL was not found: neither of {} can be loaded ({reason}); install NVIDIA's NCCL 2.18 or newer, or \
         add the directory it is in to LD_LIBRARY_PATH",
        tried.join(", ")
    )]
    LibraryMissing {
        /// What was looked for.
        tried: Vec<String>,
        /// What the loader said of the first.
        reason: String,
    },

    /// The NCCL that was found cannot be used.
    #[error("{library} cannot be used: {reason}; install NVIDIA's NCCL 2.18 or newer")]
    LibraryUnfit {
        /// What was loaded.
        library: String,
        /// What is wrong with it.
        reason: String,
    },

    /// There is no CUDA driver to load.
    #[error(
        "the CUDA driver was not found: neither of {} can be loaded ({reason}); install NVIDIA's driver, or \
         start the container with access to the devices",
        tried.join(", ")
    )]
    DriverMissing {
        /// What was looked for.
        tried: Vec<String>,
        /// What the loader said of the first.
        reason: String,
    },

    /// The driver does not show the device.
    #[error(
        "there is no CUDA device {device}, counted from 0: the driver shows {count} in all; see what \
         nvidia-smi and CUDA_VISIBLE_DEVICES say"
    )]
    NoSuchDevice {
        /// What was asked for.
        device: usize,
        /// How many there are.
        count: usize,
    },

    /// The driver refused something.
    #[error("{during}: the CUDA driver says {error}")]
    Driver {
        /// What was being done.
        during: String,
        /// What the driver said.
        error: DriverError,
    },

    /// NCCL refused something, or a launched operation failed.
    #[error("{during}: {function} says {message:?} (code {code}); NCCL_DEBUG=INFO makes NCCL say more")]
    Nccl {
        /// What was being done.
        during: String,
        /// The function of NCCL that reported it.
        function: &'static str,
        /// NCCL's result code.
        code: i32,
        /// The text of the code, and the last error that NCCL noted.
        message: String,
    },

    /// The ranks did not find each other. All get this error or [`Peer`](Self::Peer), and `control` goes on.
    #[error(
        "{rank}: NCCL did not connect {world_size} ranks within {after:?}; see whether their hosts reach \
         each other (NCCL_SOCKET_IFNAME chooses the interface), or raise the deadline"
    )]
    Connect {
        /// Who waited.
        rank: Rank,
        /// For how many ranks, this one included.
        world_size: WorldSize,
        /// How long.
        after: Duration,
    },

    /// Another rank could not do its part of making a communicator. All ranks learn of it, and `control` goes
    /// on.
    #[error("{rank} could not join: {reason}")]
    Peer {
        /// Who.
        rank: Rank,
        /// Why.
        reason: String,
    },

    /// Two ranks cannot be in one communicator.
    #[error("{first} has {one}, but {second} has {other}; give all ranks the same")]
    Unlike {
        /// One rank.
        first: Rank,
        /// What it has.
        one: String,
        /// Another rank.
        second: Rank,
        /// What it has.
        other: String,
    },

    /// A launched operation did not complete in time.
    #[error(
        "{operation} {label:?}: not complete on {rank} of {world_size} within {after:?}; find out which rank \
         does not take part or does something else, or raise the deadline"
    )]
    Timeout {
        /// The oldest operation that is not complete.
        operation: OpKind,
        /// Its label.
        label: String,
        /// Who waited.
        rank: Rank,
        /// How many ranks take part.
        world_size: WorldSize,
        /// How long.
        after: Duration,
    },

    /// An event did not come in time, though every operation launched here is complete: what it waits for is
    /// something else on its stream. The communicator goes on.
    #[error(
        "the event did not come within {after:?}, though all operations launched on {rank} are complete; \
         find out what else its stream does, or raise the deadline"
    )]
    Event {
        /// Who waited.
        rank: Rank,
        /// How long.
        after: Duration,
    },

    /// Copies were not done in time. They may still be under way.
    #[error(
        "copies on CUDA device {device} were not done within {after:?}; see what else the device does, or raise the \
         deadline"
    )]
    Copy {
        /// The device, counted from 0.
        device: usize,
        /// How long was waited.
        after: Duration,
    },

    /// Something between the ranks failed that is not NCCL's: a wrong argument, a disagreement, a rank that
    /// is gone.
    #[error(transparent)]
    Comm(#[from] CommError),
}
