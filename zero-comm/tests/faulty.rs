//! Planned faults happen where the plan says, and are never mistaken for success.

mod clock;

use std::env;
use std::num::NonZeroU64;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use clock::TestClock;
use proptest::prelude::*;
use zero_comm::{
    Clock, CommError, Communicator, CommunicatorExt, Fault, FaultKind, FaultPlan, FaultPlanError, Faulty,
    LocalWorld, OpKind, ReduceOp, WindowKey, WorldError,
};
use zero_core::{Rank, WorldSize};

const KEY: WindowKey = WindowKey::new(5);

fn world(size: usize) -> LocalWorld {
    LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_secs(60))
}

/// Runs `f` on the ranks of `world` under `plan`; all its faults happen.
fn drill<T: Send>(
    world: &LocalWorld,
    plan: &str,
    f: impl Fn(&Faulty) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, WorldError<CommError>> {
    let plan: FaultPlan = plan.parse().unwrap();
    world.run(|comm| {
        let comm = Faulty::new(comm, &plan).unwrap();
        let result = f(&comm);
        assert_eq!(comm.pending(), []);
        result
    })
}

#[test]
fn a_dropped_operation_is_a_timeout_that_names_the_rank_on_all() {
    let world = world(3).with_deadline(Duration::from_millis(100));
    let results = drill(&world, "rank=1,op=2,drop", |comm| {
        assert_eq!(comm.all_reduce_value(1_i32, ReduceOp::Sum, "first"), Ok(3));
        Ok(comm.all_reduce_value(1_i32, ReduceOp::Sum, "second"))
    });
    let timeout = CommError::Timeout {
        operation: OpKind::AllReduce,
        label: "second".into(),
        after: Duration::from_millis(100),
        missing: vec![Rank::new(1)],
    };
    assert_eq!(results.unwrap(), vec![Err(timeout); 3]);
}

#[test]
fn a_dropped_message_is_a_timeout_that_names_its_sender() {
    let world = world(2).with_deadline(Duration::from_millis(100));
    let results = drill(&world, "rank=0,op=1,drop", |comm| {
        Ok(if comm.rank() == Rank::ROOT {
            comm.send(Rank::new(1), &[1_u8], "message")
        } else {
            comm.receive(Rank::ROOT, &mut [0_u8], "message")
        })
    });
    for result in results.unwrap() {
        let Err(CommError::Timeout { operation, missing, .. }) = result else { panic!("got {result:?}") };
        assert_eq!((operation, missing), (OpKind::Receive, vec![Rank::ROOT]));
    }
}

#[test]
fn a_dropped_operation_learns_why_the_world_failed_meanwhile() {
    let results = drill(&world(3), "rank=1,op=1,drop", |comm| {
        if comm.rank() == Rank::ROOT {
            comm.abort("something else");
        }
        Ok(comm.barrier("dropped"))
    });
    let aborted = CommError::Aborted {
        rank: Rank::ROOT,
        reason: "something else".into(),
        operation: OpKind::Barrier,
        label: "dropped".into(),
    };
    assert_eq!(results.unwrap(), vec![Err(aborted); 3]);
}

#[test]
fn a_dropped_operation_that_nobody_waits_for_aborts_the_world() {
    let plan = "rank=0,op=2,drop".parse().unwrap();
    let world = world(1).with_deadline(Duration::from_secs(1));
    let results = world.run(|comm| {
        let clock = Arc::new(TestClock::default());
        let faulty = Faulty::with_clock(comm.clone(), &plan, clock.clone()).unwrap();
        faulty.expose(KEY, Arc::new(vec![1_u8]))?;
        faulty.read(Rank::ROOT, KEY, 0, &mut [0], "first")?;
        let dropped = faulty.read(Rank::ROOT, KEY, 0, &mut [0], "second");
        let Err(CommError::Aborted { rank: Rank::ROOT, reason, operation: OpKind::Read, .. }) = &dropped
        else {
            panic!("got {dropped:?}");
        };
        assert!(reason.contains("rank=0,op=2,drop at read \"second\""), "{reason}");
        assert_eq!(clock.now(), Duration::from_secs(2));
        assert!(matches!(comm.barrier("later"), Err(CommError::Aborted { .. })));
        Ok::<_, CommError>(())
    });
    results.unwrap();
}

#[test]
fn a_delayed_operation_succeeds_later() {
    let plan = "rank=1,op=2,delay=3s".parse().unwrap();
    let times = world(2).run(|comm| {
        let clock = Arc::new(TestClock::default());
        let comm = Faulty::with_clock(comm, &plan, clock.clone()).unwrap();
        comm.barrier("first")?;
        assert_eq!(clock.now(), Duration::ZERO);
        assert_eq!(comm.all_reduce_value(1_i32, ReduceOp::Sum, "second"), Ok(2));
        comm.barrier("third")?;
        Ok::<_, CommError>(clock.now())
    });
    assert_eq!(times.unwrap(), [Duration::ZERO, Duration::from_secs(3)]);
}

/// The value with the bit inverted that `Corrupt` inverts.
fn corrupted(value: i32) -> i32 {
    value ^ (1 << 30)
}

#[test]
fn what_a_rank_sends_is_corrupted_on_a_copy() {
    let plan = "rank=1,op=1,corrupt; rank=1,op=2,corrupt; rank=1,op=3,corrupt; rank=1,op=4,corrupt";
    let done = drill(&world(2), plan, |comm| {
        let first = comm.rank() == Rank::ROOT;
        let send = [1, 2, 3];
        let mut all = [0; 6];
        comm.all_gather(&send, &mut all, "all_gather")?;
        assert_eq!(all, [1, 2, 3, corrupted(1), corrupted(2), corrupted(3)]);

        let send = [10, 20];
        let mut part = [0];
        comm.reduce_scatter(&send, &mut part, ReduceOp::Min, "reduce_scatter")?;
        assert_eq!(part, if first { [10] } else { [20] });
        comm.all_to_all(&send, &mut all[..2], "all_to_all")?;
        assert_eq!(all[1], if first { corrupted(10) } else { corrupted(20) });
        assert_eq!(send, [10, 20]);

        if first {
            comm.receive(Rank::new(1), &mut part, "message")?;
            assert_eq!(part, [corrupted(7)]);
        } else {
            let send = [7];
            comm.send(Rank::ROOT, &send, "message")?;
            assert_eq!(send, [7]);
        }
        // Once is all.
        assert_eq!(comm.all_reduce_value(1_i32, ReduceOp::Sum, "after"), Ok(2));
        Ok(())
    });
    done.unwrap();
}

#[test]
fn a_corrupted_reduction_is_the_same_wrong_one_on_all_ranks() {
    let sums = drill(&world(3), "rank=2,op=1,corrupt", |comm| {
        comm.all_reduce_value(comm.rank().index() as f32, ReduceOp::Sum, "sum")
    });
    // 2.0 loses the upper bit of its exponent.
    assert_eq!(sums.unwrap(), [1.0; 3]);
}

#[test]
fn a_corrupted_root_keeps_its_own_data() {
    let data = drill(&world(3), "rank=1,op=1,corrupt", |comm| {
        let mut data = [comm.rank().index() as i32 * 4];
        comm.broadcast(&mut data, Rank::new(1), "root")?;
        Ok(data)
    });
    assert_eq!(data.unwrap(), [[corrupted(4)], [4], [corrupted(4)]]);
}

#[test]
fn where_a_rank_only_receives_that_is_corrupted() {
    let done = drill(&world(2), "rank=1,op=1,corrupt; rank=1,op=2,corrupt; rank=1,op=4,corrupt", |comm| {
        let wrong = comm.rank() == Rank::new(1);
        let mut data = [4_i32];
        comm.broadcast(&mut data, Rank::ROOT, "broadcast")?;
        assert_eq!(data, if wrong { [corrupted(4)] } else { [4] });
        if wrong {
            comm.receive(Rank::ROOT, &mut data, "message")?;
            assert_eq!(data, [corrupted(5)]);
        } else {
            comm.send(Rank::new(1), &[5_i32], "message")?;
        }
        comm.expose(KEY, Arc::new(vec![1_u8, 2]))?;
        comm.fence("exposed")?;
        let mut bytes = [0; 2];
        comm.read(Rank::ROOT, KEY, 0, &mut bytes, "window")?;
        assert_eq!(bytes, if wrong { [0x41, 0x42] } else { [1, 2] });
        comm.barrier("read")
    });
    done.unwrap();
}

#[test]
fn an_operation_without_data_leaves_its_corruption_to_the_next() {
    let sums = drill(&world(2), "rank=1,op=1,corrupt", |comm| {
        comm.barrier("no data")?;
        let group = comm.split(Some(0), 0, "no data")?.unwrap();
        group.fence("no data")?;
        group.all_reduce::<f32>(&mut [], ReduceOp::Sum, "no elements")?;
        group.all_reduce_value(1_i32, ReduceOp::Sum, "data")
    });
    assert_eq!(sums.unwrap(), [1 + corrupted(1); 2]);
}

#[test]
fn operations_are_counted_over_all_groups() {
    let counts = drill(&world(2), "", |comm| {
        let group = comm.split(Some(0), 0, "1")?.unwrap();
        group.barrier("2")?;
        comm.fence("3")?;
        // Needs no operation of another rank.
        comm.expose(KEY, Arc::new(vec![1_u8]))?;
        comm.read(comm.rank(), KEY, 0, &mut [0], "4")?;
        comm.withdraw(KEY)?;
        group.broadcast_bytes(vec![1], Rank::ROOT, "5 and 6")?;
        Ok(comm.operations())
    });
    assert_eq!(counts.unwrap(), [6, 6]);
}

#[test]
fn several_faults_may_meet_one_operation() {
    let plan = "rank=0,op=1,delay=1s; rank=0,op=1,corrupt; rank=0,op=1,delay=2s".parse().unwrap();
    let sums = world(1).run(|comm| {
        let clock = Arc::new(TestClock::default());
        let comm = Faulty::with_clock(comm, &plan, clock.clone()).unwrap();
        let sum = comm.all_reduce_value(1_i32, ReduceOp::Sum, "sum")?;
        Ok::<_, CommError>((sum, clock.now()))
    });
    assert_eq!(sums.unwrap(), [(corrupted(1), Duration::from_secs(3))]);
}

#[test]
fn a_planned_panic_is_one_of_the_rank_s_thread() {
    let error = drill(&world(3), "rank=1,op=2,panic", |comm| {
        comm.barrier("first")?;
        comm.barrier("second")
    });
    let Err(WorldError::Panicked { rank, message, others }) = error else { panic!("got {error:?}") };
    assert_eq!(rank, Rank::new(1));
    assert_eq!(message, "planned fault rank=1,op=2,panic at barrier \"second\"");
    assert_eq!(others.len(), 2);
}

/// Set in the process that a drill ends.
const VICTIM: &str = "ZERO_COMM_TEST_FAULTS";

/// What that process does.
#[test]
#[ignore = "run by another test"]
fn a_victim() {
    let plan = env::var(VICTIM).expect("another test should have started this");
    let _ = drill(&world(1), &plan, |comm| {
        comm.barrier("first")?;
        println!("after the first operation");
        comm.barrier("second")?;
        println!("after the second operation");
        Ok(())
    });
    println!("after the world");
}

#[test]
fn a_killed_process_ends_without_a_word() {
    let mut victim = Command::new(env::current_exe().unwrap());
    victim.args(["--exact", "a_victim", "--ignored", "--nocapture"]);
    let output = victim.env(VICTIM, "rank=0,op=2,kill").output().unwrap();
    assert_eq!(output.status.signal(), Some(9));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("after the first operation"), "{said}");
    assert!(!said.contains("after the second operation") && !said.contains("after the world"), "{said}");
}

fn fault(rank: usize, operation: u64, kind: FaultKind) -> Fault {
    Fault { rank: Rank::new(rank), operation: NonZeroU64::new(operation).unwrap(), kind }
}

#[test]
fn plans_are_read_from_text() {
    let plan: FaultPlan =
        " rank=1, op=20,kill;drop , op = 3,rank=0 ;; op=1,rank=2,delay=1m 30s; ".parse().unwrap();
    let expected = [
        fault(1, 20, FaultKind::Kill),
        fault(0, 3, FaultKind::Drop),
        fault(2, 1, FaultKind::Delay(Duration::from_secs(90))),
    ];
    assert_eq!(plan.faults(), expected);
    assert_eq!(" ".parse(), Ok(FaultPlan::default()));
}

#[test]
fn a_plan_that_cannot_be_says_what_is_wrong() {
    let error = |text: &str| text.parse::<FaultPlan>().unwrap_err().to_string();
    assert_eq!(
        error("rank=1,op=2,drop; rank=1,op=20,kil"),
        "fault \"rank=1,op=20,kil\": \"kil\" is not known (did you mean kill?); a fault is rank=RANK, \
         op=NUMBER and one of drop, delay=TIME, corrupt, kill and panic"
    );
    assert!(error("rank=1,,drop").contains("\"\" is not known; a fault is"));
    assert!(error("rank=-1,op=1,drop").contains("\"rank=-1\" cannot be: invalid digit"));
    assert!(error("rank=1,op=0,drop").contains("\"op=0\" cannot be: number would be zero"));
    assert!(error("rank=1,op=,drop").contains("\"op=\" cannot be: cannot parse integer from empty string"));
    assert!(error("rank=1,op=1,delay=5").contains("\"delay=5\" cannot be: time unit needed"));
    assert!(error("rank=1,op=1,delay").contains("\"delay\" cannot be: it needs a value"));
    assert!(error("rank=1,op=1,drop=2").contains("\"drop=2\" cannot be: it takes no value"));
    assert_eq!(error("op=1,drop"), "fault \"op=1,drop\": rank=RANK is missing");
    assert_eq!(error("rank=1,drop"), "fault \"rank=1,drop\": op=NUMBER is missing");
    assert!(error("rank=1,op=1").contains("one of drop, delay=TIME, corrupt, kill and panic is missing"));
    let twice = "fault \"rank=1,op=1,drop,kill\": \"kill\" is one too many; separate faults by \";\"";
    assert_eq!(error("rank=1,op=1,drop,kill"), twice);
}

#[test]
fn a_plan_for_a_rank_that_is_not_there_is_refused_on_all_ranks() {
    let plan = "rank=2,op=1,drop".parse().unwrap();
    let size = WorldSize::new(2).unwrap();
    for comm in world(2).communicators() {
        let error = Faulty::new(comm, &plan).unwrap_err();
        assert_eq!(error, FaultPlanError::NoSuchRank { rank: Rank::new(2), size });
        assert_eq!(error.to_string(), "the plan has a fault for rank 2, but the world has ranks 0 to 1");
    }
}

fn kinds() -> impl Strategy<Value = FaultKind> {
    prop_oneof![
        Just(FaultKind::Drop),
        (0..u64::MAX >> 8, 0..1_000_000_000_u32)
            .prop_map(|(seconds, nanos)| FaultKind::Delay(Duration::new(seconds, nanos))),
        Just(FaultKind::Corrupt),
        Just(FaultKind::Kill),
        Just(FaultKind::Panic),
    ]
}

proptest! {
    #[test]
    fn a_plan_reads_back_from_what_it_shows(
        faults in prop::collection::vec((any::<usize>(), 1..=u64::MAX, kinds()), 0..5),
    ) {
        let faults: Vec<_> = faults.into_iter().map(|(rank, op, kind)| fault(rank, op, kind)).collect();
        let plan = FaultPlan::from(faults);
        prop_assert_eq!(plan.to_string().parse(), Ok(plan));
    }
}
