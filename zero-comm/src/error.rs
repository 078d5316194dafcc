//! Why an operation did not happen.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_core::{DType, Rank};

use crate::{OpKind, WindowKey};

/// Why an operation of a [`Communicator`](crate::Communicator) did not happen.
///
/// Every [`Rank`] in an error is a rank of the whole world, whatever the group the operation belonged to:
/// one failure reaches all groups, and its name has to mean the same in each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Some ranks did not come before the deadline. The whole world fails with it.
    #[error(
        "{operation} {label:?}: {} did not come within {after:?}; find out what they did instead, or \
         raise the deadline",
        Ranks(missing)
    )]
    Timeout {
        /// What was waited for.
        operation: OpKind,
        /// Its label.
        label: String,
        /// How long.
        after: Duration,
        /// Who was missing.
        missing: Vec<Rank>,
    },

    /// Two ranks met with different operations, or with different arguments or labels for one operation.
    /// No data has moved. The whole world fails with it.
    #[error(
        "{first}, but {second}; all ranks of a group must call the same operations in the same order with \
         equal arguments and labels"
    )]
    Mismatch {
        /// What one rank called.
        first: Box<Call>,
        /// What another called.
        second: Box<Call>,
    },

    /// A rank that the operation needs is gone.
    #[error("{operation} {label:?}: {rank} {cause}")]
    PeerLost {
        /// Who is gone.
        rank: Rank,
        /// Why.
        cause: LossCause,
        /// What needed it.
        operation: OpKind,
        /// The label of what needed it.
        label: String,
    },

    /// A rank called [`abort`](crate::Communicator::abort), or gave up on an invalid argument of a
    /// collective operation that the others wait in.
    #[error("{operation} {label:?}: {rank} aborted the world: {reason}")]
    Aborted {
        /// Who aborted.
        rank: Rank,
        /// Why.
        reason: String,
        /// What was given up.
        operation: OpKind,
        /// The label of what was given up.
        label: String,
    },

    /// An argument is wrong in itself, whatever the other ranks do. The caller gets this error. The others
    /// would wait for it in vain, so unless it was a read, they get [`CommError::Aborted`] with its message.
    #[error("{operation} {label:?} on {rank}: {reason}")]
    InvalidArgument {
        /// Who passed it.
        rank: Rank,
        /// To what.
        operation: OpKind,
        /// The label of that.
        label: String,
        /// What is wrong and what would be right.
        reason: String,
    },

    /// A sum of integers does not fit their type. All ranks of the group get this error, what the
    /// operation was to write is unspecified, and the group goes on.
    #[error("{operation} {label:?}: a sum does not fit {dtype}; use a wider type")]
    Overflow {
        /// What was to be computed.
        operation: OpKind,
        /// Its label.
        label: String,
        /// The type that is too narrow.
        dtype: DType,
    },

    /// The process that holds the job together, a launcher, cannot be reached any more.
    #[error("the job's coordinator was lost: {how}; see what its launcher said last")]
    CoordinatorLost {
        /// How.
        how: String,
    },

    /// The peer has no such window. Only the reader fails.
    #[error("read {label:?}: {peer} does not expose {key}; expose it and fence before reading")]
    WindowMissing {
        /// Whose window was asked for.
        peer: Rank,
        /// Which window.
        key: WindowKey,
        /// The label of the read.
        label: String,
    },

    /// The peer's window is too short. Only the reader fails.
    #[error(
        "read {label:?}: {key} of {peer} has {available} bytes, but {requested} were asked for from byte \
         {offset} on"
    )]
    WindowBounds {
        /// Whose window was read.
        peer: Rank,
        /// Which window.
        key: WindowKey,
        /// The label of the read.
        label: String,
        /// Where the read was to begin, in bytes.
        offset: usize,
        /// How many bytes were asked for.
        requested: usize,
        /// How many bytes the window has.
        available: usize,
    },
}

impl CommError {
    /// What `operation` gets because of the same failure; an error that is the same for all stays as it is.
    pub(crate) fn of(self, operation: OpKind, label: &str) -> Self {
        let label = label.to_owned();
        match self {
            Self::PeerLost { rank, cause, .. } => Self::PeerLost { rank, cause, operation, label },
            Self::Aborted { rank, reason, .. } => Self::Aborted { rank, reason, operation, label },
            other => other,
        }
    }

    /// All that users and other ranks have a say in.
    pub(crate) fn texts_mut(&mut self) -> Vec<&mut String> {
        match self {
            Self::Mismatch { first, second } => [first, second]
                .into_iter()
                .flat_map(|call| {
                    let Call { arguments, label, .. } = &mut **call;
                    [arguments, label]
                })
                .collect(),
            Self::PeerLost { cause, label, .. } => cause.text_mut().into_iter().chain([label]).collect(),
            Self::Aborted { reason, label, .. } | Self::InvalidArgument { reason, label, .. } => {
                vec![reason, label]
            }
            Self::CoordinatorLost { how } => vec![how],
            Self::Timeout { label, .. }
            | Self::Overflow { label, .. }
            | Self::WindowMissing { label, .. }
            | Self::WindowBounds { label, .. } => vec![label],
        }
    }
}

/// One rank's side of an operation that did not fit together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Who called.
    pub rank: Rank,
    /// What.
    pub operation: OpKind,
    /// With which element type, counts, reduction and root, as text; may be empty.
    pub arguments: String,
    /// Under which label.
    pub label: String,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} called {}({}) {:?}", self.rank, self.operation, self.arguments, self.label)
    }
}

/// Why a rank is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LossCause {
    /// It returned, or dropped all its communicators: it came to its end and will not come again.
    Finished,
    /// It returned an error, with this message.
    Failed(String),
    /// It panicked, with this message.
    Panicked(String),
    /// Its process ended, or could not be reached any more, without a word.
    Died(String),
}

impl LossCause {
    /// What is told of it, if anything is.
    pub(crate) const fn text_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Finished => None,
            Self::Failed(text) | Self::Panicked(text) | Self::Died(text) => Some(text),
        }
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("had finished and will not come"),
            Self::Failed(message) => write!(f, "failed: {message}"),
            Self::Panicked(message) => write!(f, "panicked: {message}"),
            Self::Died(how) => write!(f, "died: {how}"),
        }
    }
}

/// Ranks in a sentence.
pub(crate) struct Ranks<'a>(pub(crate) &'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank" } else { "ranks" })?;
        for (position, rank) in self.0.iter().enumerate() {
            write!(f, "{} {}", if position == 0 { "" } else { "," }, rank.index())?;
        }
        Ok(())
    }
}
