//! Whether the ranks are about to do the same, asked before data moves.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use super::entry::Entry;
use crate::request::{self, Request};
use crate::{Call, CommError, Communicator, CommunicatorExt, OpKind};

/// Whether ranks make sure that they launch the same operations.
///
/// All ranks of a communicator have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Agreement {
    /// Before each launch the ranks exchange a fingerprint of its operations, types, lengths, roots and
    /// labels over `control`, which costs one small collective operation there, and two messages each way
    /// per message of the launch. Ranks that come with different launches all get
    /// [`CommError::Mismatch`], and a rank that does not come is named, before any data moves.
    #[default]
    Checked,
    /// Ranks launch at once. Different launches, or a rank that does not come, are found when the deadline
    /// of a wait passes, and not told apart. Launches of different lengths may give wrong data instead.
    Unchecked,
}

/// The label of what is sent over `control` for this.
const LABEL: &str = "agreement on device operations";

/// Makes sure that all ranks are about to launch the same as this one, which launches `entries`.
///
/// `members` are the names of the ranks in errors.
pub(super) fn agree(
    control: &dyn Communicator,
    members: &[Rank],
    entries: &[&Entry],
) -> Result<(), CommError> {
    let position = control.rank().index();
    let (mut messages, collective): (Vec<&Entry>, Vec<&Entry>) =
        entries.iter().partition(|entry| entry.is_message());
    if let Some(first) = collective.first() {
        agree_all(control, members, &collective)
            .map_err(|error| renamed(error, first.kind(), &first.label))?;
    }
    // One order on all ranks, in which each exchange finds its two ranks free.
    messages.sort_by_key(|entry| {
        let sender = if entry.kind() == OpKind::Send { position } else { entry.partner };
        (position.min(entry.partner), position.max(entry.partner), sender)
    });
    messages.into_iter().try_for_each(|entry| {
        agree_two(control, members, entry).map_err(|error| renamed(error, entry.kind(), &entry.label))
    })
}

/// `error` of what is done here, as an error of the `operation` called `label` that it is done for.
fn renamed(error: CommError, operation: OpKind, label: &str) -> CommError {
    match error {
        CommError::Timeout { after, missing, label: old, .. } if old == LABEL => {
            CommError::Timeout { operation, label: label.to_owned(), after, missing }
        }
        other => other.of(operation, label),
    }
}

/// What a rank tells the others of an operation.
type Told = (Request, String);

fn agree_all(control: &dyn Communicator, members: &[Rank], entries: &[&Entry]) -> Result<(), CommError> {
    if control.world_size().get() == 1 {
        return Ok(());
    }
    let mine = encode(entries);
    // Whether the hash is the same for all builds does not matter: a difference is looked into.
    let mut hasher = DefaultHasher::new();
    mine.hash(&mut hasher);
    let prints = control.all_gather_value(hasher.finish() as i64, LABEL)?;
    if prints.iter().all(|print| *print == prints[0]) {
        return Ok(());
    }
    let told = control.all_gather_bytes(&mine, LABEL)?;
    let launches: Vec<_> =
        told.iter().zip(members).map(|(bytes, member)| decode(bytes, *member)).collect::<Result<_, _>>()?;
    let Some(mismatch) = difference(&launches, members) else { return Ok(()) };
    // The world fails with the mismatch, but not before all have seen it.
    let _ = control.barrier(LABEL);
    Err(mismatch)
}

/// The first operation in which the launches of two ranks differ, if there is one.
fn difference(launches: &[Vec<Told>], members: &[Rank]) -> Option<CommError> {
    let call = |position: usize, index: usize| {
        let (launch, rank) = (&launches[position], members[position]);
        let (request, label) = launch.get(index).or(launch.last())?;
        let mut arguments = request.arguments();
        if index >= launch.len() {
            arguments += &format!("; the last of {} in its group", launch.len());
        }
        Some(Box::new(Call { rank, operation: request.kind(), arguments, label: label.clone() }))
    };
    let longest = launches.iter().map(Vec::len).max()?;
    (0..longest).find_map(|index| {
        let seats: Vec<Option<(&Request, &str)>> = launches
            .iter()
            .map(|launch| launch.get(index).map(|(request, label)| (request, label.as_str())))
            .collect();
        let (here, there) = match seats.iter().position(Option::is_none) {
            Some(without) => {
                let with = seats.iter().position(Option::is_some)?;
                (with.min(without), with.max(without))
            }
            None => request::disagreement(&seats.into_iter().flatten().collect::<Vec<_>>())?,
        };
        Some(CommError::Mismatch { first: call(here, index)?, second: call(there, index)? })
    })
}

/// As [`agree_all`], between the two ends of a message.
fn agree_two(control: &dyn Communicator, members: &[Rank], entry: &Entry) -> Result<(), CommError> {
    let (here, there) = (control.rank(), Rank::new(entry.partner));
    let mine = encode(&[entry]);
    let sends = entry.kind() == OpKind::Send;
    let send = || {
        control.send(there, &[mine.len() as i64], LABEL)?;
        control.send(there, &mine, LABEL)
    };
    if sends {
        send()?;
    }
    let mut length = [0_i64];
    control.receive(there, &mut length, LABEL)?;
    let mut theirs = vec![0; length[0] as usize];
    control.receive(there, &mut theirs, LABEL)?;
    if !sends {
        send()?;
    }
    // The sender has the first seat.
    let (sender, receiver) = if sends { (here, there) } else { (there, here) };
    let ends = [members[sender.index()], members[receiver.index()]];
    let launch = |position: Rank| {
        let bytes = if position == here { &mine } else { &theirs };
        decode(bytes, members[position.index()])
    };
    match difference(&[launch(sender)?, launch(receiver)?], &ends) {
        Some(mismatch) => Err(mismatch),
        None => Ok(()),
    }
}

fn encode(entries: &[&Entry]) -> Vec<u8> {
    let told: Vec<_> = entries.iter().map(|entry| (&entry.request, &entry.label)).collect();
    serde_json::to_vec(&told).expect("numbers and text can be written as JSON, and memory takes it")
}

fn decode(bytes: &[u8], rank: Rank) -> Result<Vec<Told>, CommError> {
    serde_json::from_slice(bytes).map_err(|error| CommError::InvalidArgument {
        rank,
        operation: OpKind::AllGather,
        label: LABEL.to_owned(),
        reason: format!("it does not tell what it launches ({error}); run one version of the program"),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zero_core::{DType, WorldSize};

    use super::*;
    use crate::{LocalWorld, ReduceOp, WorldError};

    fn entry(request: Request, label: &str, partner: usize) -> Entry {
        Entry { request, label: label.to_owned(), partner }
    }

    fn all_reduce(length: usize, label: &str) -> Entry {
        entry(Request::AllReduce { dtype: DType::F32, length, op: ReduceOp::Sum }, label, 0)
    }

    fn send(to: usize, length: usize, label: &str) -> Entry {
        entry(Request::Send { dtype: DType::F32, length }, label, to)
    }

    fn receive(from: usize, length: usize, label: &str) -> Entry {
        entry(Request::Receive { dtype: DType::F32, length }, label, from)
    }

    /// What each of `size` ranks learns that launches what `launch` says. Ranks are called 10, 11, ...
    fn outcomes(size: usize, launch: impl Fn(usize) -> Vec<Entry> + Sync) -> Vec<Result<(), CommError>> {
        let world = LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_secs(60));
        let members: Vec<_> = (10..10 + size).map(Rank::new).collect();
        let outcomes = world.run(|control| {
            let entries = launch(control.rank().index());
            let outcome = agree(&*control, &members, &entries.iter().collect::<Vec<_>>());
            // Nobody ends before the others have come as far.
            control.barrier("outcome")?;
            Ok::<_, CommError>(outcome)
        });
        outcomes.unwrap_or_else(|error: WorldError<_>| panic!("{error}"))
    }

    /// The operations, arguments, labels and ranks of the mismatch that all of `outcomes` are.
    fn mismatch(outcomes: &[Result<(), CommError>]) -> [(usize, OpKind, &str, &str); 2] {
        assert!(outcomes.iter().all(|outcome| outcome == &outcomes[0]), "{outcomes:?}");
        let Err(CommError::Mismatch { first, second }) = &outcomes[0] else { panic!("got {outcomes:?}") };
        [first, second]
            .map(|call| (call.rank.index(), call.operation, call.arguments.as_str(), call.label.as_str()))
    }

    #[test]
    fn ranks_that_launch_the_same_agree() {
        let launch = |_| vec![all_reduce(4, "a"), all_reduce(5, "b")];
        assert_eq!(outcomes(3, launch), [Ok(()), Ok(()), Ok(())]);
        assert_eq!(outcomes(1, launch), [Ok(())]);
    }

    #[test]
    fn an_unlabelled_operation_agrees_with_any_label() {
        let label = |rank| if rank == 1 { "" } else { "a" };
        assert_eq!(outcomes(3, |rank| vec![all_reduce(4, label(rank))]), [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn another_operation_is_named_on_all_ranks() {
        let broadcast = Request::Broadcast { dtype: DType::BF16, length: 4, root: Rank::new(10) };
        let outcomes = outcomes(3, |rank| match rank {
            2 => vec![all_reduce(4, "a"), entry(broadcast.clone(), "b", 0)],
            _ => vec![all_reduce(4, "a"), all_reduce(4, "b")],
        });
        let expected = [
            (10, OpKind::AllReduce, "sum, 4 x f32", "b"),
            (12, OpKind::Broadcast, "from rank 10, 4 x bf16", "b"),
        ];
        assert_eq!(mismatch(&outcomes), expected);
    }

    #[test]
    fn another_length_and_another_label_are_mismatches() {
        let outcomes_of_lengths = outcomes(2, |rank| vec![all_reduce(4 + rank, "a")]);
        assert_eq!(mismatch(&outcomes_of_lengths).map(|call| call.2), ["sum, 4 x f32", "sum, 5 x f32"]);
        let outcomes_of_labels = outcomes(2, |rank| vec![all_reduce(4, ["a", "b"][rank])]);
        assert_eq!(mismatch(&outcomes_of_labels).map(|call| call.3), ["a", "b"]);
    }

    #[test]
    fn a_group_that_ends_early_is_a_mismatch() {
        let outcomes = outcomes(2, |rank| match rank {
            0 => vec![all_reduce(4, "a")],
            _ => vec![all_reduce(4, "a"), all_reduce(9, "b")],
        });
        let expected = [
            (10, OpKind::AllReduce, "sum, 4 x f32; the last of 1 in its group", "a"),
            (11, OpKind::AllReduce, "sum, 9 x f32", "b"),
        ];
        assert_eq!(mismatch(&outcomes), expected);
    }

    #[test]
    fn messages_round_a_ring_and_crossing_messages_agree() {
        for size in [2, 3, 5] {
            let ring =
                |rank| vec![send((rank + 1) % size, 3, "on"), receive((rank + size - 1) % size, 3, "on")];
            assert_eq!(outcomes(size, ring), vec![Ok(()); size]);
            let all = |rank: usize| {
                let others = (0..size).filter(move |other| *other != rank);
                others
                    .flat_map(|other| [receive(other, 3, ""), send(other, 3, "x"), send(other, 4, "y")])
                    .chain((0..size).filter(|other| *other != rank).map(|other| receive(other, 4, "y")))
                    .collect()
            };
            assert_eq!(outcomes(size, all), vec![Ok(()); size]);
        }
    }

    #[test]
    fn the_two_ends_of_a_message_must_fit() {
        let launch = |rank| match rank {
            0 => vec![receive(1, 4, "m")],
            1 => vec![send(0, 3, "m")],
            _ => vec![],
        };
        let outcomes = outcomes(3, launch);
        assert_eq!(outcomes[2], Ok(()));
        let expected = [(11, OpKind::Send, "3 x f32", "m"), (10, OpKind::Receive, "4 x f32", "m")];
        assert_eq!(mismatch(&outcomes[..2]), expected);
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_for_the_operation_it_was_needed_for() {
        let world = LocalWorld::new(WorldSize::new(2).unwrap()).with_deadline(Duration::from_millis(50));
        let outcome = world.run(|control| {
            if control.rank() == Rank::new(1) {
                return Ok(());
            }
            agree(&*control, &[Rank::ROOT, Rank::new(1)], &[&all_reduce(4, "gradient")])
        });
        let Err(WorldError::Failed { source: CommError::PeerLost { rank, operation, label, .. }, .. }) =
            outcome
        else {
            panic!("got {outcome:?}")
        };
        assert_eq!((rank.index(), operation, label.as_str()), (1, OpKind::AllReduce, "gradient"));
    }
}
