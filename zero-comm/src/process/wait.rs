//! How an operation waits for other ranks.

use std::time::{Duration, Instant};

use zero_core::Rank;

use super::standing::{Standing, TimedOut};
use crate::flight::Lane;
use crate::{CommError, LossCause, OpKind};

/// How long a rank sleeps at most before it looks for news of the world.
const SLICE: Duration = Duration::from_millis(20);

/// An operation of this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation<'a> {
    pub(crate) kind: OpKind,
    pub(crate) label: &'a str,
    /// The number of the operation in its lane, from 1.
    pub(crate) sequence: u64,
    /// The ranks of the world that take part, each with its lane.
    pub(crate) expected: &'a [(Rank, Lane)],
}

/// One operation's patience: it lasts for the deadline from the last progress on.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    standing: &'a Standing,
    operation: Operation<'a>,
    deadline: Duration,
    since: Instant,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(standing: &'a Standing, operation: Operation<'a>, deadline: Duration) -> Self {
        Self { standing, operation, deadline, since: Instant::now() }
    }

    /// What is known of the world.
    #[cfg(feature = "mpi")]
    pub(crate) const fn standing(&self) -> &'a Standing {
        self.standing
    }

    pub(crate) const fn operation(&self) -> Operation<'a> {
        self.operation
    }

    /// Something has come or gone, so the patience is fresh again.
    pub(crate) fn progressed(&mut self) {
        self.since = Instant::now();
    }

    /// How much patience is left; a moment at least.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.since.elapsed()).max(Duration::from_millis(1))
    }

    /// How long to sleep at most before the next [`check`](Self::check).
    pub(crate) fn slice(&self) -> Duration {
        self.left().min(SLICE)
    }

    /// Whether to wait on for the ranks that `missing` names.
    ///
    /// # Errors
    ///
    /// The world's failure if it has failed, [`CommError::PeerLost`] if one that takes part has finished before
    /// this operation, and [`CommError::Timeout`], which fails the world, if the deadline has passed.
    pub(crate) fn check(&self, missing: impl FnOnce() -> Vec<Rank>) -> Result<(), CommError> {
        let Operation { kind, label, sequence, expected } = self.operation;
        // The failure first: a rank that finishes because the world fails is not the cause.
        self.standing.check(kind, label)?;
        let gone = expected.iter().filter_map(|(rank, lane)| {
            let finish = self.standing.finish_of(*rank)?;
            let begun = finish.begun.of(*lane)?;
            (begun < sequence).then_some((finish.order, *rank))
        });
        if let Some((_, rank)) = gone.min() {
            let (cause, label) = (LossCause::Finished, label.to_owned());
            return Err(CommError::PeerLost { rank, cause, operation: kind, label });
        }
        if self.since.elapsed() < self.deadline {
            return Ok(());
        }
        let timed_out = TimedOut {
            operation: kind,
            label: label.to_owned(),
            after: self.deadline,
            expected: expected.to_vec(),
            sequence,
            missing: missing(),
        };
        Err(self.standing.time_out(timed_out).error(kind, label))
    }

    /// The error for a connection to `peer` that broke: what the world has failed of, or else that the peer
    /// died, which then fails the world.
    pub(crate) fn broken(&self, peer: Rank, how: &str) -> CommError {
        let Operation { kind, label, .. } = self.operation;
        let failure = self.standing.verdict().unwrap_or_else(|| {
            let cause = LossCause::Died(how.to_owned());
            self.standing.fail(crate::failure::Failure::Lost { rank: peer, cause })
        });
        failure.error(kind, label)
    }
}
