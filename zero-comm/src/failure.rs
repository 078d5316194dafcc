//! Why a world failed.

use std::fmt;

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use crate::{CommError, LossCause, OpKind, text};

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

    /// The same failure, with texts that are cut where they are too long to be told to all ranks.
    pub(crate) fn cut(mut self) -> Self {
        let texts = match &mut self {
            Self::Lost { cause, .. } => cause.text_mut().into_iter().collect(),
            Self::Aborted { reason, .. } => vec![reason],
            Self::Error { error, .. } => error.texts_mut(),
        };
        texts.into_iter().for_each(text::cut);
        self
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Call;
    use crate::text::MESSAGE_BYTES;

    #[test]
    fn no_text_of_a_failure_is_too_long_to_be_told() {
        let (rank, operation, long) = (Rank::new(1), OpKind::Barrier, || "ä".repeat(1 << 19));
        let call = || Box::new(Call { rank, operation, arguments: long(), label: long() });
        let error = |error| Failure::Error { error, blamed: None };
        for failure in [
            Failure::Lost { rank, cause: LossCause::Panicked(long()) },
            Failure::Aborted { rank, reason: long() },
            error(CommError::Mismatch { first: call(), second: call() }),
            error(CommError::Aborted { rank, reason: long(), operation, label: long() }),
            error(CommError::PeerLost { rank, cause: LossCause::Died(long()), operation, label: long() }),
        ] {
            let told = failure.cut().to_string();
            assert!(told.contains(" ... (cut, 1048576 bytes in all)"), "{told}");
            assert!(told.len() < 5 * MESSAGE_BYTES, "{}", told.len());
        }
    }
}
