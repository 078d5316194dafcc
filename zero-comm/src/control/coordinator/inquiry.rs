//! A question to all ranks: what they do.

use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use crate::FlightRecord;
use crate::failure::Failure;
use crate::flight::{Begun, Lane};
use crate::process::TimedOut;

/// How long ranks have to answer. They do so without the help of threads that may hang, so who has not
/// answered by then is stopped, dead or out of reach.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a rank answered.
pub(super) struct Answer {
    /// How many operations it has begun in the lane that it was asked for.
    pub(super) begun: u64,
    pub(super) records: Vec<FlightRecord>,
}

pub(super) struct Inquiry {
    until: Instant,
    /// The operation it is about, and the rank that gave it up.
    timed_out: Option<(TimedOut, Rank)>,
    answers: Vec<Option<Answer>>,
}

impl Inquiry {
    pub(super) fn new(size: WorldSize, timed_out: Option<(TimedOut, Rank)>, now: Instant) -> Self {
        let answers = size.ranks().map(|_| None).collect();
        Self { until: now + PATIENCE, timed_out, answers }
    }

    pub(super) const fn until(&self) -> Instant {
        self.until
    }

    /// The lane in question, of `rank`.
    pub(super) fn lane(&self, rank: Rank) -> Option<Lane> {
        let (timed_out, _) = self.timed_out.as_ref()?;
        timed_out.expected.iter().find(|(expected, _)| *expected == rank).map(|(_, lane)| *lane)
    }

    /// Takes in what `rank` answered; only the first answer counts.
    pub(super) fn answer(&mut self, rank: Rank, answer: Answer) {
        self.answers[rank.index()].get_or_insert(answer);
    }

    /// The failure that the operation is, once it is known who has not come to it.
    pub(super) fn failure<'a>(
        &self,
        now: Instant,
        can_answer: impl Fn(Rank) -> bool,
        finish: impl Fn(Rank) -> Option<&'a Begun>,
    ) -> Option<Failure> {
        let (timed_out, reporter) = self.timed_out.as_ref()?;
        let mut missing = Vec::new();
        for (rank, lane) in &timed_out.expected {
            let Some(answer) = self.answers.get(rank.index()) else { continue };
            let begun = match (answer, finish(*rank)) {
                (Some(answer), _) => Some(answer.begun),
                (None, Some(begun)) => Some(begun.of(*lane).unwrap_or(u64::MAX)),
                (None, None) if can_answer(*rank) && now < self.until => return None,
                (None, None) => None,
            };
            if begun.is_none_or(|begun| begun < timed_out.sequence) {
                missing.push(*rank);
            }
        }
        if missing.is_empty() {
            // All have come, but data does not: only those who wait for it know whose.
            missing.clone_from(&timed_out.missing);
        }
        Some(timed_out.failure(missing, *reporter))
    }

    /// What each rank did last, once all have answered who can.
    pub(super) fn records(
        &mut self,
        now: Instant,
        can_answer: impl Fn(Rank) -> bool,
    ) -> Option<Vec<Option<Vec<FlightRecord>>>> {
        let waits =
            |(index, answer): (usize, &Option<Answer>)| answer.is_none() && can_answer(Rank::new(index));
        if now < self.until && self.answers.iter().enumerate().any(waits) {
            return None;
        }
        Some(self.answers.iter_mut().map(|answer| answer.take().map(|answer| answer.records)).collect())
    }
}
