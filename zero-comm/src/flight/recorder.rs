//! What one rank did last.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use zero_core::DType;

use super::record::{FlightRecord, FlightState, Lane};
use crate::{OpKind, lock};

/// Keeps the last [`FlightRecord::KEPT`] operations of one rank, over all its groups.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Records>);

#[derive(Debug, Default)]
struct Records {
    kept: VecDeque<FlightRecord>,
    /// How many operations are not kept any more.
    gone: u64,
    /// How many operations of each lane were begun.
    begun: BTreeMap<Lane, u64>,
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
    /// Notes that the rank has come to the next operation of `lane`.
    pub(crate) fn begin(
        &self,
        lane: Lane,
        kind: OpKind,
        elements: Option<(DType, usize)>,
        label: &str,
    ) -> Ticket {
        let mut records = lock(&self.0);
        let begun = records.begun.entry(lane).or_default();
        *begun += 1;
        let sequence = *begun;
        // The oldest record lends its label's memory to the newest.
        let mut text = if records.kept.len() == FlightRecord::KEPT {
            records.gone += 1;
            records.kept.pop_front().map(|record| record.label).unwrap_or_default()
        } else {
            String::new()
        };
        text.clear();
        text.push_str(&label[..label.floor_char_boundary_at(FlightRecord::LABEL_BYTES)]);
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

    /// How many operations of each lane were begun.
    pub(crate) fn begun(&self) -> BTreeMap<Lane, u64> {
        lock(&self.0).begun.clone()
    }
}

trait FloorCharBoundary {
    /// The last boundary of characters at or before byte `index`.
    fn floor_char_boundary_at(&self, index: usize) -> usize;
}

impl FloorCharBoundary for str {
    fn floor_char_boundary_at(&self, index: usize) -> usize {
        if index >= self.len() {
            return self.len();
        }
        (0..=index).rev().find(|index| self.is_char_boundary(*index)).unwrap_or(0)
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
        assert_eq!(recorder.begun(), BTreeMap::from([(LANE, 1), (send, 2)]));
    }

    #[test]
    fn a_long_label_is_cut_between_characters() {
        let recorder = Recorder::default();
        recorder.begin(LANE, OpKind::Barrier, None, &"ä".repeat(100));
        recorder.begin(LANE, OpKind::Barrier, None, &format!("x{}", "ä".repeat(100)));
        let lengths: Vec<_> = recorder.records().iter().map(|record| record.label.len()).collect();
        assert_eq!(lengths, [64, 63]);
    }
}
