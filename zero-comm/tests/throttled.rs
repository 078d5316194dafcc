//! A throttled communicator takes as long as its link needs, by a clock that only the tests move.

mod clock;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use clock::TestClock;
use zero_comm::{
    Clock, CommError, Communicator, CommunicatorExt, FaultPlan, Faulty, Link, LocalWorld, ReduceOp,
    Throttled, WindowKey,
};
use zero_core::{Rank, WorldSize};

const SIZE: WorldSize = WorldSize::new(4).unwrap();
const KEY: WindowKey = WindowKey::new(5);

/// A microsecond per step and a byte per microsecond.
fn link() -> Link {
    Link::new(Duration::from_micros(1), 1e6).unwrap()
}

fn micros(time: u64) -> Duration {
    Duration::from_micros(time)
}

/// Runs `f` on throttled ranks, each with a clock of its own.
fn run(f: impl Fn(Arc<dyn Communicator>, &TestClock) -> Result<(), CommError> + Sync) {
    let world = LocalWorld::new(SIZE).with_deadline(Duration::from_secs(60));
    let done = world.run(|comm| {
        let clock = Arc::new(TestClock::default());
        f(Arc::new(Throttled::with_clock(comm, link(), clock.clone())), &clock)
    });
    done.unwrap();
}

#[test]
fn each_operation_lasts_as_long_as_its_traffic_needs() {
    run(|comm, clock| {
        let rank = comm.rank().index();
        let mut last = Duration::ZERO;
        let mut lasted = || {
            let time = clock.now() - last;
            last += time;
            time
        };
        comm.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum, "")?;
        assert_eq!(lasted(), micros(4 + 600));
        comm.all_gather(&[1.0_f64; 10], &mut [0.0; 40], "")?;
        assert_eq!(lasted(), micros(2 + 240));
        let counts = [7, 0, 0, 3];
        let mut part = vec![0_u8; counts[rank]];
        comm.reduce_scatter_uneven(&[1; 10], &mut part, &counts, ReduceOp::Sum, "")?;
        assert_eq!(lasted(), micros(2 + 10 - counts[rank] as u64));
        comm.broadcast(&mut [0_i64; 10], Rank::new(2), "")?;
        assert_eq!(lasted(), micros(2 + 80));
        comm.all_to_all(&[0_u8; 40], &mut [0; 40], "")?;
        assert_eq!(lasted(), micros(3 + 30));
        // Rank 0 has most to send, the others only receive.
        let send_counts = if rank == 0 { [5, 1, 2, 3] } else { [0; 4] };
        let receive_counts = [if rank == 0 { 5 } else { rank }, 0, 0, 0];
        let send = vec![0_i32; send_counts.iter().sum()];
        let mut receive = vec![0; receive_counts[0]];
        comm.all_to_all_uneven(&send, &send_counts, &mut receive, &receive_counts, "")?;
        assert_eq!(lasted(), micros(3 + 4 * if rank == 0 { 6 } else { rank as u64 }));
        for call in [Communicator::barrier, Communicator::fence] {
            call(&*comm, "")?;
            assert_eq!(lasted(), micros(2));
        }
        assert!(comm.split(None, 0, "")?.is_none());
        assert_eq!(lasted(), micros(2));
        match rank {
            0 => comm.send(Rank::new(1), &[0_u8; 9], "")?,
            1 => comm.receive(Rank::ROOT, &mut [0_u8; 9], "")?,
            _ => return Ok(()),
        }
        assert_eq!(lasted(), micros(1 + 9));
        Ok(())
    });
}

#[test]
fn reads_of_other_ranks_cost_and_windows_of_the_own_rank_do_not() {
    run(|comm, clock| {
        comm.expose(KEY, Arc::new(vec![0_u8; 50]))?;
        assert_eq!(clock.now(), Duration::ZERO);
        comm.fence("exposed")?;
        let begin = clock.now();
        comm.read(comm.rank(), KEY, 0, &mut [0; 50], "own")?;
        assert_eq!(clock.now(), begin);
        comm.read(Rank::new((comm.rank().index() + 1) % 4), KEY, 10, &mut [0; 30], "other")?;
        assert_eq!(clock.now() - begin, micros(2 + 30));
        comm.barrier("read")?;
        comm.withdraw(KEY)
    });
}

#[test]
fn waiting_for_others_counts() {
    let world = LocalWorld::new(WorldSize::new(2).unwrap()).with_deadline(Duration::from_secs(60));
    // The delay stands for a rank that comes late: to the first operation by less than its traffic needs.
    for (delay, lasts) in [("30us", 4 + 40), ("50us", 50)] {
        let plan: FaultPlan = format!("rank=0,op=1,delay={delay}").parse().unwrap();
        let times = world.run(|comm| {
            let clock = Arc::new(TestClock::default());
            let late = Faulty::with_clock(comm, &plan, clock.clone()).unwrap();
            let link = Link::new(Duration::from_micros(2), 1e6).unwrap();
            let comm = Throttled::with_clock(Arc::new(late), link, clock.clone());
            comm.all_reduce(&mut [1_u8; 40], ReduceOp::Sum, "late")?;
            Ok::<_, CommError>(clock.now())
        });
        assert_eq!(times.unwrap(), [micros(lasts), micros(4 + 40)]);
    }
}

/// A clock that stands still and remembers until when it was slept on.
#[derive(Debug, Default)]
struct StillClock(Mutex<Vec<Duration>>);

impl Clock for StillClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, moment: Duration) {
        self.0.lock().unwrap().push(moment);
    }
}

#[test]
fn operations_that_overlap_share_the_link_but_not_the_latency() {
    let wakings = LocalWorld::new(SIZE).run(|comm| {
        let clock = Arc::new(StillClock::default());
        let comm = Throttled::with_clock(comm, link(), clock.clone());
        let group = comm.split(Some(0), 0, "group")?.unwrap();
        // All begin at the same moment.
        comm.broadcast(&mut [0_u8; 10], Rank::ROOT, "first")?;
        group.broadcast(&mut [0_u8; 20], Rank::ROOT, "second")?;
        comm.barrier("third")?;
        let wakings = clock.0.lock().unwrap().clone();
        Ok::<_, CommError>(wakings)
    });
    let expected = vec![micros(2), micros(10 + 2), micros(30 + 2), micros(30 + 2)];
    assert_eq!(wakings.unwrap(), vec![expected; 4]);
}

#[test]
fn an_idle_link_is_free_at_once() {
    run(|comm, clock| {
        comm.broadcast(&mut [0_u8; 10], Rank::ROOT, "first")?;
        clock.sleep_until(micros(12 + 1000));
        comm.broadcast(&mut [0_u8; 10], Rank::ROOT, "second")?;
        assert_eq!(clock.now(), micros(12 + 1000 + 12));
        Ok(())
    });
}

#[test]
fn a_failed_operation_returns_at_once() {
    run(|comm, clock| {
        let error = comm.read(Rank::new((comm.rank().index() + 1) % 4), KEY, 0, &mut [0; 50], "none");
        assert!(matches!(error, Err(CommError::WindowMissing { .. })), "{error:?}");
        assert_eq!(clock.now(), Duration::ZERO);
        Ok(())
    });
}
