//! Why MPI can't be used.

use std::io;
use std::time::Duration;

use zero_core::{Rank, WorldSize};

/// Why MPI can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// MPI can be started once in a process, and it has come to its end.
    #[error("MPI was finalised in this process, and can't be started again; make the world before that")]
    Finalised,

    /// Several threads can't call the MPI library at once.
    #[error(
        "MPI gives this process thread level {provided:?}, but Multiple (MPI_THREAD_MULTIPLE) is needed; use \
         an MPI library that has it, and if the program starts MPI itself, ask for it there"
    )]
    Threads {
        /// What the library gives.
        provided: String,
    },

    /// A function of MPI failed.
    #[error("{call} failed: {message}")]
    Call {
        /// Which function.
        call: &'static str,
        /// What MPI says.
        message: String,
    },

    /// Not all ranks came to something that all do together.
    #[error(
        "{what} of all MPI ranks did not end within {after:?}; find out which rank did not come, or raise the \
         deadline"
    )]
    Timeout {
        /// What they do.
        what: &'static str,
        /// How long this rank waited.
        after: Duration,
    },

    /// The world counts its ranks otherwise than MPI does.
    #[error(
        "this process is {rank} of {size} by its environment, but {mpi_rank} of {mpi_size} for MPI; start it \
         by `mpirun`, and set no other launcher's variables"
    )]
    Place {
        /// The rank by the environment.
        rank: Rank,
        /// The number of ranks by the environment.
        size: WorldSize,
        /// MPI's rank.
        mpi_rank: Rank,
        /// MPI's number of ranks.
        mpi_size: WorldSize,
    },

    /// Rank 0 has to say something to all ranks, in not too many bytes.
    #[error("rank 0 must broadcast a text of 1 to {limit} bytes, not of {bytes}")]
    Text {
        /// The length of the text.
        bytes: usize,
        /// The longest that is allowed.
        limit: usize,
    },

    /// A rank sent what no rank of this version sends.
    #[error("{peer} sent {what}; run one version of the program on all ranks")]
    Malformed {
        /// Who sent it.
        peer: Rank,
        /// What it was.
        what: &'static str,
    },

    /// The numbers that tell the links of two ranks apart are used up.
    #[error("all {tags} message tags of the MPI library are used up; make fewer groups, and keep them")]
    Tags {
        /// How many there are for the links from one rank to another.
        tags: usize,
    },

    /// MPI has failed before.
    #[error("MPI does not work any more: {why}")]
    Broken {
        /// How it failed.
        why: String,
    },

    /// The thread that calls MPI did not start.
    #[error("can't start the thread that calls MPI: {0}; see how many threads are allowed here (ulimit -u)")]
    Thread(#[source] io::Error),
}
