//! What all ranks did last, side by side.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use zero_core::{DType, Rank};

use super::record::{FlightRecord, FlightState, GroupId};
use crate::OpKind;

/// The last operations of a world that failed, rank against rank.
///
/// Shown, it is a table: each operation with who was how far in it, oldest first, and a `>` before those in
/// which ranks differ, because some had not come or had come with something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightReport {
    size: usize,
    silent: Vec<Rank>,
    rows: Vec<Row>,
}

/// An operation, alike for all its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Operation {
    group: GroupId,
    /// Who sends to whom, if it is a message.
    message: Option<(Rank, Rank)>,
    sequence: u64,
}

impl Operation {
    fn of(rank: Rank, record: &FlightRecord) -> Self {
        let message = record.peer.map(|peer| match record.kind {
            OpKind::Receive => (peer, rank),
            _ => (rank, peer),
        });
        Self { group: record.group, message, sequence: record.sequence }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    operation: Operation,
    differs: bool,
    sides: Vec<Side>,
    /// Who called something else again, if there are too many different calls to show.
    others: Vec<Rank>,
}

/// Ranks that were equally far in an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Side {
    ranks: Vec<Rank>,
    /// What they called, and how far it came; `None` if they had not come.
    call: Option<(Call, FlightState)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Call {
    kind: OpKind,
    elements: Option<(DType, usize)>,
    label: String,
}

impl Call {
    fn of(record: &FlightRecord) -> Self {
        Self { kind: record.kind, elements: record.elements, label: record.label.clone() }
    }

    /// Whether both can be sides of one operation.
    fn fits(&self, other: &Self) -> bool {
        let messages = [OpKind::Send, OpKind::Receive];
        let kinds =
            self.kind == other.kind || [self.kind, other.kind].iter().all(|kind| messages.contains(kind));
        let elements = match (self.elements, other.elements) {
            // Each rank has lengths of its own.
            (Some((dtype, _)), Some((other, _))) if self.kind == OpKind::AllToAll => dtype == other,
            (elements, other) => elements == other,
        };
        let labels = self.label == other.label || self.label.is_empty() || other.label.is_empty();
        kinds && elements && labels
    }
}

impl FlightReport {
    /// How many operations are shown, besides the last one of each rank.
    const ROWS: usize = 16;

    /// How many operations are shown at most.
    const MAX_ROWS: usize = 64;

    /// How many kinds of calls are shown at most for one operation.
    const MAX_SIDES: usize = 8;

    /// The report on `ranks`: the last operations of each, oldest first, or `None` if it did not answer.
    pub(crate) fn new(ranks: &[Option<Vec<FlightRecord>>]) -> Self {
        let silent = ranks.iter().enumerate().filter(|(_, records)| records.is_none());
        let silent = silent.map(|(index, _)| Rank::new(index)).collect();
        let flights: Vec<_> = ranks
            .iter()
            .enumerate()
            .filter_map(|(index, records)| Some(Flight::new(Rank::new(index), records.as_ref()?)))
            .collect();
        let rows = last_operations(&flights).iter().map(|operation| Row::new(*operation, &flights)).collect();
        Self { size: ranks.len(), silent, rows }
    }

    /// The ranks that did not say what they did last: they are dead, stopped or out of reach.
    pub fn silent(&self) -> &[Rank] {
        &self.silent
    }
}

/// What one rank did last.
struct Flight<'a> {
    rank: Rank,
    /// In order.
    order: Vec<Operation>,
    records: BTreeMap<Operation, &'a FlightRecord>,
    /// Whether older operations are not known any more.
    cut: bool,
}

impl<'a> Flight<'a> {
    fn new(rank: Rank, all: &'a [FlightRecord]) -> Self {
        let mut order = Vec::with_capacity(all.len());
        let mut records = BTreeMap::new();
        for record in all {
            let operation = Operation::of(rank, record);
            if let Entry::Vacant(entry) = records.entry(operation) {
                entry.insert(record);
                order.push(operation);
            }
        }
        Self { rank, order, records, cut: all.len() >= FlightRecord::KEPT }
    }

    /// Whether the rank takes part in `operation`, and has not come to it.
    fn lacks(&self, operation: &Operation) -> bool {
        let first = Operation { sequence: 0, ..*operation };
        let last = Operation { sequence: u64::MAX, ..*operation };
        match (self.records.range(first..=last).next_back(), operation.message) {
            (Some((newest, _)), _) => newest.sequence < operation.sequence,
            // It may have been there long ago.
            (None, _) if self.cut => false,
            (None, Some((from, to))) => self.rank == from || self.rank == to,
            // Who belongs to another group than the world's cannot be told from what was not called.
            (None, None) => operation.group == GroupId::WORLD,
        }
    }
}

/// How soon an operation is taken when operations are merged from the end: first those that are the last one
/// for all who have come to it, and of those what hangs, and then the newest.
///
/// Ranks that came to operations in different orders leave none that is the last one for all.
type Urgency = (bool, bool, Reverse<usize>, Operation);

/// What is known of an operation over all ranks.
#[derive(Default)]
struct Progress {
    /// Who has come to it, by index.
    holders: Vec<usize>,
    /// For how many of them it is the last one left.
    ends: usize,
    unfinished: bool,
    /// How many operations later some rank is.
    age: usize,
}

impl Progress {
    fn urgency(&self, operation: Operation) -> Urgency {
        (self.ends == self.holders.len(), self.unfinished, Reverse(self.age), operation)
    }
}

/// The operations to show, oldest first, such that those of one rank stand in its own order.
fn last_operations(flights: &[Flight<'_>]) -> Vec<Operation> {
    let mut progress = BTreeMap::<Operation, Progress>::new();
    for (index, flight) in flights.iter().enumerate() {
        for (age, operation) in flight.order.iter().rev().enumerate() {
            let progress = progress.entry(*operation).or_default();
            progress.holders.push(index);
            progress.unfinished |= flight.records[operation].state != FlightState::Done;
            progress.age = progress.age.max(age);
        }
    }
    let mut left: Vec<&[Operation]> = flights.iter().map(|flight| flight.order.as_slice()).collect();
    // What each rank did last is shown, however long ago others did.
    let mut wanted: BTreeSet<Operation> = left.iter().filter_map(|order| order.last().copied()).collect();
    let (mut queue, mut taken, mut shown) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    let reach = |progress: &mut BTreeMap<_, Progress>, queue: &mut BTreeSet<_>, operation| {
        if let Some(progress) = progress.get_mut(&operation) {
            queue.remove(&progress.urgency(operation));
            progress.ends += 1;
            queue.insert(progress.urgency(operation));
        }
    };
    for last in left.iter().filter_map(|order| order.last()) {
        reach(&mut progress, &mut queue, *last);
    }
    while shown.len() < FlightReport::MAX_ROWS && (shown.len() < FlightReport::ROWS || !wanted.is_empty()) {
        let Some((.., next)) = queue.pop_last() else { break };
        taken.insert(next);
        if wanted.remove(&next) || shown.len() < FlightReport::ROWS {
            shown.push(next);
        }
        for index in progress.remove(&next).unwrap_or_default().holders {
            let order = &mut left[index];
            // For this rank it may not be the last one yet; then it is skipped later.
            if order.last() == Some(&next) {
                while let Some((_, rest)) = order.split_last().filter(|(last, _)| taken.contains(last)) {
                    *order = rest;
                }
                if let Some(last) = order.last() {
                    reach(&mut progress, &mut queue, *last);
                }
            }
        }
    }
    shown.reverse();
    shown
}

impl Row {
    fn new(operation: Operation, flights: &[Flight<'_>]) -> Self {
        let (mut sides, mut others): (Vec<Side>, _) = (Vec::new(), Vec::new());
        for flight in flights {
            let call = match flight.records.get(&operation) {
                Some(record) => Some((Call::of(record), record.state)),
                None if flight.lacks(&operation) => None,
                None => continue,
            };
            let full = sides.len() >= FlightReport::MAX_SIDES && call.is_some();
            match sides.iter_mut().find(|side| side.call == call) {
                Some(side) => side.ranks.push(flight.rank),
                None if full => others.push(flight.rank),
                None => sides.push(Side { ranks: vec![flight.rank], call }),
            }
        }
        // Who has not come goes last.
        sides.sort_by_key(|side| side.call.is_none());
        let calls = || sides.iter().map(|side| side.call.as_ref().map(|(call, _)| call));
        let fits = |call: Option<&Call>, other: Option<&Call>| match (call, other) {
            (Some(call), Some(other)) => call.fits(other),
            (call, other) => call.is_none() && other.is_none(),
        };
        let differs = calls().any(|call| calls().any(|other| !fits(call, other)));
        Self { operation, differs, sides, others }
    }
}

impl fmt::Display for FlightReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the last operations of {} ranks", self.size)?;
        match self.rows.iter().find(|row| row.differs) {
            Some(row) => write!(f, ", which differ first in {}", row.operation)?,
            None => f.write_str(", which do not differ")?,
        }
        if !self.silent.is_empty() {
            write!(f, "; no answer from {}", Ranges(&self.silent))?;
        }
        let lines: Vec<[String; 6]> = self.rows.iter().flat_map(Row::lines).collect();
        let mut widths = [0; 6];
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for [mark, operation, call, label, state, ranks] in &lines {
            let [_, operation_width, call_width, label_width, state_width, _] = widths;
            write!(
                f,
                "\n{mark:1} {operation:operation_width$}  {call:call_width$}  {label:label_width$}  \
                 {state:state_width$}  {ranks}"
            )?;
        }
        Ok(())
    }
}

impl Row {
    /// The cells of each line: the mark, the operation, the call, its label, how far it is, and whose.
    fn lines(&self) -> Vec<[String; 6]> {
        let line = |call: String, label: String, state: String, ranks: &[Rank]| {
            [String::new(), String::new(), call, label, state, Ranges(ranks).to_string()]
        };
        let side = |side: &Side| match &side.call {
            Some((call, state)) => {
                line(call.to_string(), format!("{:?}", call.label), state.to_string(), &side.ranks)
            }
            None => line(String::new(), String::new(), "not begun".to_owned(), &side.ranks),
        };
        let mut lines: Vec<_> = self.sides.iter().map(side).collect();
        if !self.others.is_empty() {
            lines.push(line("other calls".to_owned(), String::new(), String::new(), &self.others));
        }
        if let Some([_, operation, ..]) = lines.first_mut() {
            *operation = self.operation.to_string();
        }
        for [mark, ..] in lines.iter_mut().filter(|_| self.differs) {
            mark.push('>');
        }
        lines
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.group, self.sequence)?;
        match self.message {
            Some((from, to)) => write!(f, " {}->{}", from.index(), to.index()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)?;
        match self.elements {
            Some((dtype, elements)) => write!(f, " {elements} x {dtype}"),
            None => Ok(()),
        }
    }
}

/// Ranks in ascending order, neighbours as ranges.
struct Ranges<'a>(&'a [Rank]);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank" } else { "ranks" })?;
        let runs = self.0.chunk_by(|rank, next| rank.index().checked_add(1) == Some(next.index()));
        for (position, run) in runs.enumerate() {
            let (first, last) = (run[0].index(), run[run.len() - 1].index());
            write!(f, "{} {first}", if position == 0 { "" } else { "," })?;
            match last - first {
                0 => {}
                1 => write!(f, ", {last}")?,
                _ => write!(f, "-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight::{Lane, Recorder};

    const WORLD: Lane = Lane::Collective(GroupId::WORLD);

    fn call(recorder: &Recorder, lane: Lane, kind: OpKind, elements: usize, label: &str, state: FlightState) {
        let ticket = recorder.begin(lane, kind, Some((DType::F32, elements)), label);
        recorder.note(ticket, state);
    }

    fn records(calls: impl FnOnce(&Recorder)) -> Option<Vec<FlightRecord>> {
        let recorder = Recorder::default();
        calls(&recorder);
        Some(recorder.records())
    }

    #[test]
    fn who_has_not_come_and_who_does_not_answer_is_shown() {
        let came = || {
            records(|recorder| {
                call(recorder, WORLD, OpKind::AllReduce, 1024, "layer.0", FlightState::Done);
                call(recorder, WORLD, OpKind::AllReduce, 7, "layer.1", FlightState::Waiting);
            })
        };
        let late = records(|recorder| {
            call(recorder, WORLD, OpKind::AllReduce, 1024, "layer.0", FlightState::Done);
        });
        let report = FlightReport::new(&[came(), came(), late, came(), None]);
        assert_eq!(
            report.to_string(),
            [
                "the last operations of 5 ranks, which differ first in world #2; no answer from rank 4",
                "  world #1  all_reduce 1024 x f32  \"layer.0\"  done       ranks 0-3",
                "> world #2  all_reduce 7 x f32     \"layer.1\"  waiting    ranks 0, 1, 3",
                ">                                             not begun  rank 2",
            ]
            .join("\n")
        );
        assert_eq!(report.silent(), [Rank::new(4)]);
    }

    #[test]
    fn different_calls_of_one_operation_differ() {
        let with = |kind, elements, label: &'static str| {
            records(|recorder| call(recorder, WORLD, kind, elements, label, FlightState::Failed))
        };
        let cases = [
            (with(OpKind::AllReduce, 3, "a"), with(OpKind::Broadcast, 3, "a"), true),
            (with(OpKind::AllReduce, 3, "a"), with(OpKind::AllReduce, 4, "a"), true),
            (with(OpKind::AllReduce, 3, "a"), with(OpKind::AllReduce, 3, "b"), true),
            (with(OpKind::AllReduce, 3, "a"), with(OpKind::AllReduce, 3, ""), false),
            (with(OpKind::AllToAll, 3, "a"), with(OpKind::AllToAll, 4, "a"), false),
        ];
        for (one, other, differs) in cases {
            let report = FlightReport::new(&[one, other]).to_string();
            assert_eq!(report.contains("differ first in world #1"), differs, "{report}");
            assert_eq!(report.contains("do not differ"), !differs, "{report}");
        }
    }

    #[test]
    fn the_sides_of_a_message_stand_together() {
        let (from, to) = (Rank::new(1), Rank::new(2));
        let group = GroupId::WORLD;
        let sender = records(|recorder| {
            call(recorder, Lane::Send(group, to), OpKind::Send, 5, "m", FlightState::Done);
            call(recorder, Lane::Send(group, to), OpKind::Send, 6, "m", FlightState::Waiting);
        });
        let receiver = records(|recorder| {
            call(recorder, Lane::Receive(group, from), OpKind::Receive, 5, "m", FlightState::Done);
        });
        let idle = records(|_| {});
        assert_eq!(
            FlightReport::new(&[idle, sender, receiver]).to_string(),
            [
                "the last operations of 3 ranks, which differ first in world #2 1->2",
                "  world #1 1->2  send 5 x f32     \"m\"  done       rank 1",
                "                 receive 5 x f32  \"m\"  done       rank 2",
                "> world #2 1->2  send 6 x f32     \"m\"  waiting    rank 1",
                ">                                      not begun  rank 2",
            ]
            .join("\n")
        );
    }

    #[test]
    fn each_rank_is_shown_in_its_own_order_with_what_it_did_last() {
        let group = GroupId::WORLD.child(1, 0);
        let busy = || {
            records(|recorder| {
                call(recorder, WORLD, OpKind::Split, 0, "", FlightState::Done);
                for _ in 0..40 {
                    call(recorder, Lane::Collective(group), OpKind::AllReduce, 1, "", FlightState::Done);
                }
                call(recorder, WORLD, OpKind::Barrier, 0, "", FlightState::Waiting);
            })
        };
        let stuck = records(|recorder| call(recorder, WORLD, OpKind::Split, 0, "", FlightState::Done));
        let report = FlightReport::new(&[busy(), busy(), stuck]);
        let shown: Vec<_> = report.rows.iter().map(|row| row.operation.to_string()).collect();
        let steps = (26..=40).map(|sequence| format!("{group} #{sequence}"));
        let expected: Vec<_> =
            std::iter::once("world #1".to_owned()).chain(steps).chain(["world #2".to_owned()]).collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn every_group_that_hangs_is_shown() {
        let flights: Vec<_> = (0..8)
            .map(|color| {
                let lane = Lane::Collective(GroupId::WORLD.child(1, color / 2));
                records(|recorder| {
                    for _ in 0..100 {
                        call(recorder, lane, OpKind::AllReduce, 1, "", FlightState::Done);
                    }
                    call(recorder, lane, OpKind::Barrier, 1, "", FlightState::Waiting);
                })
            })
            .collect();
        let report = FlightReport::new(&flights);
        let hanging = report.rows.iter().filter(|row| row.operation.sequence == 101);
        assert_eq!(hanging.count(), 4);
        assert_eq!(report.rows.len(), FlightReport::ROWS);
    }

    #[test]
    fn ranks_with_different_orders_are_shown_all_the_same() {
        let (a, b) =
            (Lane::Collective(GroupId::WORLD.child(1, 0)), Lane::Collective(GroupId::WORLD.child(1, 1)));
        let in_order = |lanes: [Lane; 2]| {
            records(|recorder| {
                for lane in lanes {
                    call(recorder, lane, OpKind::Barrier, 0, "", FlightState::Waiting);
                }
            })
        };
        let report = FlightReport::new(&[in_order([a, b]), in_order([b, a])]);
        assert_eq!(report.rows.len(), 2);
        assert!(report.rows.iter().all(|row| row.sides[0].ranks.len() == 2), "{report}");
    }

    #[test]
    fn a_large_world_has_a_bounded_report() {
        let flights: Vec<_> = (0..500)
            .map(|rank| {
                records(|recorder| {
                    for _ in 0..300 {
                        let peer = Lane::Send(GroupId::WORLD, Rank::new(rank ^ 1));
                        call(recorder, peer, OpKind::Send, 1, "", FlightState::Done);
                    }
                    call(recorder, WORLD, OpKind::AllReduce, rank, "", FlightState::Waiting);
                })
            })
            .collect();
        let report = FlightReport::new(&flights);
        assert!(report.rows.len() <= FlightReport::MAX_ROWS);
        let last = report.rows.last().unwrap();
        assert_eq!(last.sides.len(), FlightReport::MAX_SIDES);
        assert_eq!(last.others.len(), 500 - FlightReport::MAX_SIDES);
        assert!(report.to_string().contains("other calls"), "{report}");
    }

    #[test]
    fn a_world_without_operations_has_a_report() {
        assert_eq!(
            FlightReport::new(&[records(|_| {}), None]).to_string(),
            "the last operations of 2 ranks, which do not differ; no answer from rank 1"
        );
        assert_eq!(
            FlightReport::new(&[None, None]).to_string(),
            "the last operations of 2 ranks, which do not differ; no answer from ranks 0, 1"
        );
    }
}
