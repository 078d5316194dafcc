//! Worlds of threads: how they run, and which failure they report.

use std::error::Error;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use zero_comm::{
    CommError, CommunicatorExt, LocalWorld, LossCause, OpKind, RankFailure, ReduceOp, WorldError,
};
use zero_core::{Rank, WorldSize};

fn world(size: usize) -> LocalWorld {
    LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_secs(60))
}

/// Panics without printing.
fn die(message: &'static str) -> ! {
    resume_unwind(Box::new(message))
}

#[test]
fn results_come_in_rank_order() {
    let ranks =
        world(5).run(|comm| Ok::<_, CommError>((comm.rank().index(), comm.world_size().get()))).unwrap();
    assert_eq!(ranks, [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]);
}

#[test]
fn each_rank_has_a_thread_of_its_name() {
    let names = world(3).run(|_| Ok::<_, CommError>(thread::current().name().map(str::to_owned))).unwrap();
    assert_eq!(names, [Some("rank-0".into()), Some("rank-1".into()), Some("rank-2".into())]);
}

#[test]
fn a_world_waits_five_minutes_unless_told_otherwise() {
    let default = LocalWorld::new(WorldSize::ONE);
    let deadline = |world: &LocalWorld| world.communicators()[0].deadline();
    assert_eq!(deadline(&default), Duration::from_secs(300));
    assert_eq!(deadline(&default.with_deadline(Duration::MAX)), Duration::MAX);
}

#[test]
fn a_deadline_too_far_away_to_count_is_none() {
    let sums = LocalWorld::new(WorldSize::new(2).unwrap())
        .with_deadline(Duration::MAX)
        .run(|comm| comm.all_reduce_value(1_i32, ReduceOp::Sum, "sum"));
    assert_eq!(sums.unwrap(), [2, 2]);
}

#[test]
fn a_world_can_run_again_after_a_failure() {
    let world = world(2);
    assert!(world.run(|_| Err::<(), _>("no")).is_err());
    assert!(world.run(|comm| comm.barrier("again")).is_ok());
}

#[test]
fn a_rank_that_fails_is_the_cause_and_the_others_know_it() {
    let error = world(4)
        .run(|comm| {
            comm.barrier("start").map_err(|error| error.to_string())?;
            if comm.rank().index() == 2 {
                return Err("disk full".to_owned());
            }
            let lost = |operation, label: &str| CommError::PeerLost {
                rank: Rank::new(2),
                cause: LossCause::Failed("disk full".into()),
                operation,
                label: label.into(),
            };
            assert_eq!(comm.barrier("pending"), Err(lost(OpKind::Barrier, "pending")));
            assert_eq!(comm.fence("later"), Err(lost(OpKind::Fence, "later")));
            comm.barrier("last").map_err(|error| error.to_string())
        })
        .unwrap_err();
    let WorldError::Failed { rank, source, others } = &error else { panic!("got {error:?}") };
    assert_eq!((rank.index(), source.as_str()), (2, "disk full"));
    assert_eq!(others.len(), 3);
    for (_, failure) in others {
        let RankFailure::Error(message) = failure else { panic!("got {failure:?}") };
        assert!(message.contains("rank 2 failed: disk full"), "{message}");
    }
    assert!(error.to_string().starts_with("rank 2 failed: disk full; after it failed rank "));
}

#[test]
fn a_rank_that_panics_is_the_cause_and_the_others_know_it() {
    let error = world(3)
        .run(|comm| {
            // The group goes first when the rank unwinds; that must not look like a proper end.
            let group = comm.split(Some(0), 0, "group")?.unwrap();
            if comm.rank().index() == 1 {
                die("index out of range");
            }
            let result = group.barrier("pending");
            let cause = LossCause::Panicked("index out of range".into());
            let (operation, label) = (OpKind::Barrier, "pending".into());
            assert_eq!(result, Err(CommError::PeerLost { rank: Rank::new(1), cause, operation, label }));
            result
        })
        .unwrap_err();
    let WorldError::Panicked { rank, message, others } = &error else { panic!("got {error:?}") };
    assert_eq!((rank.index(), message.as_str()), (1, "index out of range"));
    assert_eq!(others.len(), 2);
    assert_eq!(error.rank(), Rank::new(1));
}

#[test]
fn an_invalid_argument_is_the_cause_though_others_return_first() {
    for _ in 0..50 {
        let returned = AtomicUsize::new(0);
        let error = world(3)
            .run(|comm| {
                if comm.rank().index() != 2 {
                    let result = comm.barrier("waiting");
                    returned.fetch_add(1, Ordering::SeqCst);
                    return result;
                }
                let result = comm.broadcast(&mut [0_u8], Rank::new(7), "weights");
                while returned.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
                result
            })
            .unwrap_err();
        let WorldError::Failed { rank, source, .. } = error else { panic!("got {error:?}") };
        assert_eq!(rank.index(), 2);
        assert!(matches!(source, CommError::InvalidArgument { .. }), "{source}");
    }
}

#[test]
fn errors_need_not_be_error_types() {
    let boxed = world(2).run(|comm| {
        comm.barrier("fine")?;
        if comm.rank() == Rank::ROOT { Err(Box::<dyn Error + Send + Sync>::from("boxed")) } else { Ok(()) }
    });
    let error: Box<dyn Error> = boxed.unwrap_err().into();
    assert_eq!(error.to_string(), "rank 0 failed: boxed");
}

#[test]
fn a_returned_communicator_fails_but_does_not_hang() {
    let mut comms = world(2).run(Ok::<_, CommError>).unwrap();
    let result = comms.remove(1).barrier("too late");
    assert!(matches!(result, Err(CommError::PeerLost { cause: LossCause::Finished, .. })), "got {result:?}");
}

#[test]
fn communicators_serve_threads_of_the_caller() {
    let comms = world(4).communicators();
    let threads: Vec<_> = comms
        .into_iter()
        .map(|comm| thread::spawn(move || comm.all_reduce_value(1_i64, ReduceOp::Sum, "count")))
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), Ok(4));
    }
}

#[test]
fn a_rank_has_finished_when_its_last_communicator_is_dropped() {
    let mut comms = world(2).communicators();
    let (second, first) = (comms.pop().unwrap(), comms.pop().unwrap());
    let group = thread::scope(|scope| {
        let other = scope.spawn(|| first.split(Some(0), 0, "group").unwrap().unwrap());
        let group = second.split(Some(0), 0, "group").unwrap().unwrap();
        drop(other.join().unwrap());
        group
    });
    drop(second);
    // The group keeps the rank in the world.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.barrier("last"));
        drop(group);
        let lost = CommError::PeerLost {
            rank: Rank::new(1),
            cause: LossCause::Finished,
            operation: OpKind::Barrier,
            label: "last".into(),
        };
        assert_eq!(waiting.join().unwrap(), Err(lost));
    });
}

#[test]
fn a_caller_s_thread_that_unwinds_has_panicked() {
    let mut comms = world(2).communicators();
    let (second, first) = (comms.pop().unwrap(), comms.pop().unwrap());
    let died = thread::spawn(move || {
        let _held = second;
        die("lost");
    });
    let result = first.barrier("waiting");
    assert!(died.join().is_err());
    let Err(CommError::PeerLost { rank, cause, .. }) = result else { panic!("got {result:?}") };
    assert!(rank.index() == 1 && matches!(cause, LossCause::Panicked(_)), "{rank} {cause}");
}

#[test]
fn threads_of_one_rank_take_turns() {
    let world = world(3);
    let ranks = world.run(|comm| {
        let count = || (0..200).all(|_| comm.all_reduce_value(1_i32, ReduceOp::Sum, "") == Ok(3));
        Ok::<_, CommError>(thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(count)).collect();
            threads.into_iter().all(|thread| thread.join().unwrap())
        }))
    });
    assert_eq!(ranks.unwrap(), [true; 3]);
}

#[test]
fn threads_of_one_rank_may_each_have_a_group() {
    let ranks = world(3).run(|comm| {
        let groups: Vec<_> =
            (0..3).map(|_| comm.split(Some(0), 0, "lane").map(Option::unwrap)).collect::<Result<_, _>>()?;
        thread::scope(|scope| {
            let lanes: Vec<_> = groups
                .iter()
                .enumerate()
                .map(|(lane, group)| {
                    scope.spawn(move || {
                        let label = format!("lane {lane}");
                        (0..200).try_for_each(|_| group.all_reduce(&mut [1.0_f32; 64], ReduceOp::Sum, &label))
                    })
                })
                .collect();
            lanes.into_iter().try_for_each(|lane| lane.join().unwrap())
        })
    });
    assert!(ranks.is_ok(), "{ranks:?}");
}
