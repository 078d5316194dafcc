//! Failures: they end every wait and name their cause.

use std::thread;

use zero_core::{Rank, WorldSize};

use super::{Harness, IMPATIENT, PATIENT};
use crate::{CommError, Communicator, CommunicatorExt, LossCause, OpKind, ReduceOp, WindowKey};

/// A rank that is there but does not come is named at the deadline, and learns of it.
pub fn a_rank_that_does_not_come_is_named(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, IMPATIENT, &|comm| {
        let expected = CommError::Timeout {
            operation: OpKind::AllReduce,
            label: "gradient".into(),
            after: IMPATIENT,
            missing: vec![last],
        };
        if comm.rank() == last {
            // Looks without waiting, until the others have given up.
            let error = loop {
                match comm.withdraw(WindowKey::new(0)) {
                    Ok(()) => thread::yield_now(),
                    Err(error) => break error,
                }
            };
            assert_eq!(error, expected);
        } else {
            // The others come at different times; each must be told of the same rank.
            let result = comm.all_reduce(&mut [0.0_f32; 4], ReduceOp::Sum, "gradient");
            assert_eq!(result, Err(expected.clone()));
        }
        assert_eq!(comm.barrier("later"), Err(expected));
    });
}

/// The deadline of a communicator can be set, holds for what comes after, and is passed on to groups.
pub fn a_deadline_set_later_holds(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        comm.barrier("before").expect("all ranks come");
        comm.set_deadline(IMPATIENT);
        assert_eq!(comm.deadline(), IMPATIENT);
        let group =
            comm.split(Some(0), 0, "group").expect("all ranks come").expect("every rank has the color");
        assert_eq!(group.deadline(), IMPATIENT);
        if comm.rank() == last {
            while group.withdraw(WindowKey::new(0)).is_ok() {
                thread::yield_now();
            }
        } else {
            let error = group.barrier("in vain").expect_err("one rank does not come");
            assert!(matches!(&error, CommError::Timeout { after, .. } if *after == IMPATIENT), "{error}");
        }
    });
}

/// Different operations are an error on all ranks that names two ranks, operations and labels.
pub fn two_operations_that_meet_are_both_named(harness: &dyn Harness, size: WorldSize) {
    mismatch(harness, size, &|comm, odd| {
        if odd {
            comm.broadcast(&mut [0.0_f32; 4], Rank::ROOT, "weights")
        } else {
            comm.all_reduce(&mut [0.0_f32; 4], ReduceOp::Sum, "gradient")
        }
    });
}

/// Equal operations under different labels do not go together.
pub fn two_labels_that_meet_are_both_named(harness: &dyn Harness, size: WorldSize) {
    mismatch(harness, size, &|comm, odd| {
        comm.all_reduce(&mut [0.0_f32; 4], ReduceOp::Sum, if odd { "layer.1" } else { "layer.0" })
    });
}

/// Equal operations on different lengths do not go together.
pub fn two_lengths_that_meet_are_both_named(harness: &dyn Harness, size: WorldSize) {
    mismatch(harness, size, &|comm, odd| {
        comm.all_reduce(&mut vec![0.0_f32; 4 + usize::from(odd)], ReduceOp::Sum, "gradient")
    });
}

/// `call` does something else on the last rank.
fn mismatch(
    harness: &dyn Harness,
    size: WorldSize,
    call: &(dyn Fn(&dyn Communicator, bool) -> Result<(), CommError> + Sync),
) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        comm.barrier("before").unwrap();
        let result = call(&*comm, comm.rank() == last);
        let Err(CommError::Mismatch { first, second }) = &result else { panic!("got {result:?}") };
        assert!(first.rank < last && second.rank == last, "{first} and {second}");
        assert_ne!(
            (first.operation, &first.arguments, &first.label),
            (second.operation, &second.arguments, &second.label)
        );
        assert_eq!(comm.barrier("later"), result);
    });
}

/// A rank that has finished fails an operation that needs it before the deadline.
pub fn a_rank_that_finished_is_named_at_once(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        // Operations that the rank has joined complete.
        comm.barrier("joined").unwrap();
        if comm.rank() == last {
            return;
        }
        for _ in 0..2 {
            let lost = CommError::PeerLost {
                rank: last,
                cause: LossCause::Finished,
                operation: OpKind::Barrier,
                label: "alone".into(),
            };
            assert_eq!(comm.barrier("alone"), Err(lost));
        }
        let message = comm.receive(last, &mut [0_u8], "message");
        assert!(matches!(message, Err(CommError::PeerLost { rank, .. }) if rank == last), "{message:?}");
    });
}

/// A rank that has finished does not matter to groups it is not in.
pub fn a_group_goes_on_without_a_rank_that_finished(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    if last == Rank::ROOT {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        let color = (comm.rank() != last).then_some(0);
        let Some(group) = comm.split(color, 0, "all but one").unwrap() else { return };
        for _ in 0..10 {
            let sum = group.all_reduce_value(1_i32, ReduceOp::Sum, "others").unwrap();
            assert_eq!(sum as usize, size.get() - 1);
        }
        let whole = comm.barrier("whole");
        assert!(matches!(whole, Err(CommError::PeerLost { rank, .. }) if rank == last), "{whole:?}");
        group.barrier("still").unwrap();
    });
}

/// An abort ends waits in all groups, at once and for good.
pub fn an_abort_reaches_pending_and_later_calls(harness: &dyn Harness, size: WorldSize) {
    let last = Rank::new(size.get() - 1);
    harness.run(size, PATIENT, &|comm| {
        let aborted = |operation, label: &str| CommError::Aborted {
            rank: last,
            reason: "the data is broken".into(),
            operation,
            label: label.into(),
        };
        let group = comm.split(Some(0), 0, "group").map(Option::unwrap);
        if comm.rank() == last {
            assert!(group.is_ok(), "{group:?}");
            comm.abort("the data is broken");
            comm.abort("a later reason does not count");
        } else {
            // The last rank may be so much ahead that the abort meets the split.
            match group {
                Ok(group) => assert_eq!(group.barrier("pending"), Err(aborted(OpKind::Barrier, "pending"))),
                Err(error) => assert_eq!(error, aborted(OpKind::Split, "group")),
            }
        }
        assert_eq!(comm.fence("later"), Err(aborted(OpKind::Fence, "later")));
        let read = comm.read(comm.rank(), WindowKey::new(0), 0, &mut [], "later");
        assert_eq!(read, Err(aborted(OpKind::Read, "later")));
        assert!(comm.withdraw(WindowKey::new(0)).is_err());
        assert!(comm.split(None, 0, "later").is_err());
        let empty = comm.all_reduce::<f32>(&mut [], ReduceOp::Sum, "later");
        assert_eq!(empty, Err(aborted(OpKind::AllReduce, "later")));
    });
}

/// Whoever passes a wrong argument learns what is wrong; the others learn who gave up.
pub fn an_invalid_argument_keeps_nobody_waiting(harness: &dyn Harness, size: WorldSize) {
    type Called<'a> = &'a (dyn Fn(&dyn Communicator) -> Result<(), CommError> + Sync);
    let world = size.get();
    let calls: [Called<'_>; 8] = [
        &|comm| comm.all_gather_uneven(&[1.0_f32], &mut vec![0.0; world], &vec![1; world + 1], "argument"),
        &|comm| comm.all_gather_uneven(&[1.0_f32], &mut vec![0.0; world + 1], &vec![1; world], "argument"),
        &|comm| comm.all_gather_uneven(&[1.0_f32; 2], &mut vec![0.0; world], &vec![1; world], "argument"),
        &|comm| comm.all_gather_uneven::<u8>(&[], &mut [], &vec![usize::MAX; world + 1], "argument"),
        &|comm| comm.reduce_scatter(&vec![0_u8; world + 1], &mut [0], ReduceOp::Sum, "argument"),
        &|comm| comm.broadcast(&mut [0_u8], Rank::new(world), "argument"),
        &|comm| comm.all_to_all_uneven(&[0_u8], &vec![1; world + 1], &mut [], &vec![0; world], "argument"),
        &|comm| comm.send(comm.rank(), &[0_u8], "argument"),
    ];
    for call in calls {
        harness.run(size, PATIENT, &|comm| {
            if comm.rank() == Rank::ROOT {
                let result = call(&*comm);
                assert!(
                    matches!(&result, Err(CommError::InvalidArgument { rank: Rank::ROOT, label, .. })
                    if label == "argument"),
                    "{result:?}"
                );
            }
            let waited = comm.barrier("others");
            assert!(
                matches!(&waited, Err(CommError::Aborted { rank: Rank::ROOT, reason, .. })
                if reason.contains("argument")),
                "{waited:?}"
            );
        });
    }
}

/// There is no right integer to return.
pub fn the_mean_of_integers_is_refused(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let mean = comm.all_reduce_value(1_i32, ReduceOp::Mean, "count");
        match mean {
            Err(CommError::InvalidArgument { rank, .. }) => assert_eq!(rank, comm.rank()),
            Err(CommError::Aborted { .. }) => {}
            other => panic!("got {other:?}"),
        }
    });
}
