//! What one rank did last.

use std::collections::VecDeque;
use std::sync::Mutex;

use zero_core::DType;

use super::begun::Begun;
use super::record::{FlightRecord, FlightState, GroupId, Lane};
use crate::text::clip;
use crate::{OpKind, lock};

/// Keeps the last [`FlightRecord::KEPT`] operations of one rank, over all its groups.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Records>);

#[derive(Debug, Default)]
struct Records {
    kept: VecDeque<FlightRecord>,
    /// How many operations are not kept any more.
    gone: u64,
    begun: Begun,
    /// Groups that this rank has left, oldest first.
    left: VecDeque<GroupId>,
}

/// One operation in the record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    /// Its place among all operations of the rank.
    place: u64,
    /// Its number in its lane, from 1.
    pub(crate) sequence: u64,
}

impl Recorder {
    /// Of how many groups that the rank has left it keeps how far it came: others may still be at an operation
    /// that it did its part of.
    const KEPT_GROUPS: usize = 1024;

    /// Notes that the rank has come to the next operation of `lane`.
    pub(crate) fn begin(
        &self,
        lane: Lane,
        kind: OpKind,
        elements: Option<(DType, usize)>,
        label: &str,
    ) -> Ticket {
        let mut records = lock(&self.0);
        let sequence = records.begun.add(lane);
        // The oldest record lends its label's memory to the newest.
        let mut text = if records.kept.len() == FlightRecord::KEPT {
            records.gone += 1;
            records.kept.pop_front().map(|record| record.label).unwrap_or_default()
        } else {
            String::new()
        };
        text.clear();
        text.push_str(clip(label, FlightRecord::LABEL_BYTES));
        let peer = match lane {
            Lane::Collective(_) => None,
            Lane::Send(_, peer) | Lane::Receive(_, peer) => Some(peer),
        };
        let group = lane.group();
        let state = FlightState::Waiting;
        records.kept.push_back(FlightRecord { group, peer, sequence, kind, elements, label: text, state });
        Ticket { place: records.gone + records.kept.len() as u64 - 1, sequence }
    }

    /// Notes how far an operation has come, if it is still kept.
    pub(crate) fn note(&self, ticket: Ticket, state: FlightState) {
        let mut records = lock(&self.0);
        let index = ticket.place.checked_sub(records.gone);
        if let Some(record) = index.and_then(|index| records.kept.get_mut(index as usize)) {
            record.state = state;
        }
    }

    /// The last operations, oldest first.
    pub(crate) fn records(&self) -> Vec<FlightRecord> {
        lock(&self.0).kept.iter().cloned().collect()
    }

    /// Notes that the rank will begin no more operations of `group`.
    pub(crate) fn leave(&self, group: GroupId) {
        let mut records = lock(&self.0);
        records.left.push_back(group);
        if records.left.len() > Self::KEPT_GROUPS {
            if let Some(oldest) = records.left.pop_front() {
                records.begun.forget(oldest);
            }
        }
    }

    /// How many operations of each lane were begun, as far as all ranks can be told.
    pub(crate) fn begun(&self) -> Begun {
        lock(&self.0).begun.cut()
    }

    /// How many operations of `lane` were begun; `None` if that may be forgotten.
    pub(crate) fn begun_in(&self, lane: Lane) -> Option<u64> {
        lock(&self.0).begun.of(lane)
    }
}

#[cfg(test)]
mod tests {
    use zero_core::Rank;

    use super::*;
    use crate::GroupId;

    const LANE: Lane = Lane::Collective(GroupId::WORLD);

    #[test]
    fn the_last_operations_are_kept_in_order() {
        let recorder = Recorder::default();
        for _ in 0..FlightRecord::KEPT + 10 {
            recorder.begin(LANE, OpKind::Barrier, None, "label");
        }
        let sequences: Vec<_> = recorder.records().iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, (11..=FlightRecord::KEPT as u64 + 10).collect::<Vec<_>>());
    }

    #[test]
    fn an_operation_is_found_again_until_it_is_gone() {
        let recorder = Recorder::default();
        let first = recorder.begin(LANE, OpKind::Barrier, None, "first");
        let second = recorder.begin(LANE, OpKind::Fence, Some((DType::F32, 7)), "second");
        recorder.note(second, FlightState::Done);
        for _ in 0..FlightRecord::KEPT - 1 {
            recorder.begin(LANE, OpKind::Barrier, None, "later");
        }
        recorder.note(first, FlightState::Failed);
        let records = recorder.records();
        assert_eq!(records[0].to_string(), "world #2 fence 7 x f32 \"second\" done");
        assert!(records.iter().all(|record| record.state != FlightState::Failed));
    }

    #[test]
    fn each_lane_counts_for_itself() {
        let recorder = Recorder::default();
        let send = Lane::Send(GroupId::WORLD, Rank::new(1));
        recorder.begin(LANE, OpKind::Barrier, None, "");
        recorder.begin(send, OpKind::Send, Some((DType::U8, 3)), "");
        assert_eq!(recorder.begin(send, OpKind::Send, None, "").sequence, 2);
        assert_eq!([LANE, send].map(|lane| recorder.begun_in(lane)), [Some(1), Some(2)]);
    }

    #[test]
    fn a_long_label_is_cut_between_characters() {
        let recorder = Recorder::default();
        recorder.begin(LANE, OpKind::Barrier, None, &"ä".repeat(100));
        recorder.begin(LANE, OpKind::Barrier, None, &format!("x{}", "ä".repeat(100)));
        let lengths: Vec<_> = recorder.records().iter().map(|record| record.label.len()).collect();
        assert_eq!(lengths, [64, 63]);
    }

    #[test]
    fn groups_that_were_left_long_ago_are_forgotten_and_no_others() {
        let recorder = Recorder::default();
        let group = |split| GroupId::WORLD.child(split, 0);
        let splits = 100_000;
        for split in 1..=splits {
            recorder.begin(LANE, OpKind::Split, None, "split");
            recorder.begin(Lane::Collective(group(split)), OpKind::Barrier, None, "");
            recorder.begin(Lane::Send(group(split), Rank::new(1)), OpKind::Send, None, "");
            recorder.begin(Lane::Receive(group(split), Rank::new(2)), OpKind::Receive, None, "");
            recorder.leave(group(split));
        }
        assert_eq!(recorder.begun_in(LANE), Some(splits));
        let recent = splits - Recorder::KEPT_GROUPS as u64;
        for (split, known) in [(1, None), (recent, None), (recent + 1, Some(1)), (splits, Some(1))] {
            for lane in [
                Lane::Collective(group(split)),
                Lane::Send(group(split), Rank::new(1)),
                Lane::Receive(group(split), Rank::new(2)),
            ] {
                assert_eq!(recorder.begun_in(lane), known, "{split}");
            }
        }
        assert_eq!(recorder.begun().len(), 1 + 3 * Recorder::KEPT_GROUPS);
    }
}
