//! Why a world failed.

use std::fmt;

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use crate::{CommError, LossCause, OpKind};

/// Why a world failed, for good. The first failure of a world is what all its ranks learn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// A rank returned an error, panicked or died.
    Lost { rank: Rank, cause: LossCause },
    /// A rank asked for it.
    Aborted { rank: Rank, reason: String },
    /// What every rank gets as it is; `blamed` found it out.
    Error { error: CommError, blamed: Option<Rank> },
}

impl Failure {
    /// The error that `operation` gets in the failed world.
    pub(crate) fn error(&self, operation: OpKind, label: &str) -> CommError {
        let label = label.to_owned();
        match self {
            Self::Lost { rank, cause } => {
                CommError::PeerLost { rank: *rank, cause: cause.clone(), operation, label }
            }
            Self::Aborted { rank, reason } => {
                CommError::Aborted { rank: *rank, reason: reason.clone(), operation, label }
            }
            Self::Error { error, .. } => error.clone(),
        }
    }

    /// The rank that it originates from, if that can be told.
    pub(crate) const fn blamed(&self) -> Option<Rank> {
        match self {
            Self::Lost { rank, .. } | Self::Aborted { rank, .. } => Some(*rank),
            Self::Error { blamed, .. } => *blamed,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { rank, cause } => write!(f, "{rank} {cause}"),
            Self::Aborted { rank, reason } => write!(f, "{rank} aborted the world: {reason}"),
            Self::Error { error, .. } => error.fmt(f),
        }
    }
}
