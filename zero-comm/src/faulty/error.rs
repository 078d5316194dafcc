//! What can be wrong with a plan of faults.

use zero_core::{Rank, WorldSize};

/// What is wrong with a [`FaultPlan`](crate::FaultPlan).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultPlanError {
    /// A word is none of a fault's.
    #[error(
        "fault {fault:?}: {word:?} is not known{}; a fault is rank=RANK, op=NUMBER and one of drop, \
         delay=TIME, corrupt, kill and panic",
        match meant {
            Some(meant) => format!(" (did you mean {meant}?)"),
            None => String::new(),
        }
    )]
    Unknown {
        /// The fault.
        fault: String,
        /// Its word.
        word: String,
        /// What was probably meant.
        meant: Option<&'static str>,
    },

    /// A word has a value that it cannot have.
    #[error("fault {fault:?}: {word:?} cannot be: {reason}")]
    Value {
        /// The fault.
        fault: String,
        /// Its word.
        word: String,
        /// What is wrong.
        reason: String,
    },

    /// A fault lacks something.
    #[error("fault {fault:?}: {what} is missing")]
    Missing {
        /// The fault.
        fault: String,
        /// What it lacks.
        what: &'static str,
    },

    /// A fault has two ranks, operations or things that happen.
    #[error("fault {fault:?}: {word:?} is one too many; separate faults by \";\"")]
    Twice {
        /// The fault.
        fault: String,
        /// The second word.
        word: String,
    },

    /// A fault is for a rank that does not exist.
    #[error("the plan has a fault for {rank}, but the world has ranks 0 to {}", size.get() - 1)]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// The number of ranks there are.
        size: WorldSize,
    },
}
