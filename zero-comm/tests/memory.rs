//! Every operation that lends memory to other threads, small enough to run under Miri:
//! `cargo +nightly miri test -p zero-comm --test memory`.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use zero_comm::{CommError, Communicator, CommunicatorExt, LocalWorld, ReduceOp, WindowKey};
use zero_core::{Rank, WorldSize};

const SIZE: WorldSize = WorldSize::new(3).unwrap();

fn world() -> LocalWorld {
    LocalWorld::new(SIZE).with_deadline(Duration::from_secs(600))
}

fn operate(comm: &dyn Communicator) -> Result<(), CommError> {
    let rank = comm.rank().index();
    // More than one stripe of a cache line, and no whole number of them.
    let mut buffer = vec![rank as f32; 37];
    comm.all_reduce(&mut buffer, ReduceOp::Sum, "all_reduce")?;
    assert_eq!(buffer, vec![3.0; 37]);
    let mut halves = vec![bf16::from_f32(rank as f32); 3];
    comm.all_reduce(&mut halves, ReduceOp::Max, "halves")?;
    assert_eq!(halves, vec![bf16::from_f32(2.0); 3]);

    let counts = [2, 0, 1];
    let mut gathered = [9_i64; 3];
    comm.all_gather_uneven(&vec![rank as i64; counts[rank]], &mut gathered, &counts, "all_gather")?;
    assert_eq!(gathered, [0, 0, 2]);

    let mut part = vec![0.0_f64; counts[rank]];
    comm.reduce_scatter_uneven(&[1.0, 2.0, 3.0], &mut part, &counts, ReduceOp::Mean, "reduce_scatter")?;
    assert_eq!(part, [vec![1.0, 2.0], vec![], vec![3.0]][rank]);

    let mut bytes = [rank as u8; 5];
    comm.broadcast(&mut bytes, Rank::new(1), "broadcast")?;
    assert_eq!(bytes, [1; 5]);

    let mut exchanged = [0_i32; 3];
    comm.all_to_all(&[rank as i32; 3], &mut exchanged, "all_to_all")?;
    assert_eq!(exchanged, [0, 1, 2]);

    match rank {
        0 => comm.send(Rank::new(2), &[1.5_f32, 2.5], "message")?,
        2 => {
            let mut message = [0.0_f32; 2];
            comm.receive(Rank::ROOT, &mut message, "message")?;
            assert_eq!(message, [1.5, 2.5]);
        }
        _ => {}
    }

    let key = WindowKey::new(rank as u64);
    comm.expose(key, Arc::new(vec![rank as u8; 4]))?;
    comm.fence("exposed")?;
    let mut window = [9; 2];
    comm.read(Rank::new((rank + 1) % 3), WindowKey::new(((rank + 1) % 3) as u64), 2, &mut window, "window")?;
    assert_eq!(window, [((rank + 1) % 3) as u8; 2]);
    comm.barrier("read")
}

#[test]
fn operations_stay_within_borrowed_memory() {
    world().run(|comm| operate(&*comm)).unwrap();
}

#[test]
fn groups_stay_within_borrowed_memory() {
    world()
        .run(|comm| {
            let group = comm.split(Some(0), 2 - comm.rank().index() as u64, "reversed")?;
            operate(&**group.as_ref().unwrap())
        })
        .unwrap();
}

#[test]
fn a_rank_that_gives_up_takes_its_memory_with_it() {
    let error = world().run(|comm| {
        if comm.rank().index() == 2 {
            resume_unwind(Box::new("gone"));
        }
        let result = comm.all_reduce(&mut [1.0_f32; 50], ReduceOp::Sum, "never");
        assert!(matches!(result, Err(CommError::PeerLost { rank, .. }) if rank.index() == 2));
        result
    });
    assert_eq!(error.unwrap_err().rank(), Rank::new(2));
}

#[test]
fn a_mismatch_moves_nothing() {
    let ranks = world().run(|comm| {
        let mut buffer = vec![comm.rank().index() as f32; 20 + comm.rank().index() / 2];
        let result = comm.all_reduce(&mut buffer, ReduceOp::Sum, "uneven");
        assert!(buffer.iter().all(|element| *element == comm.rank().index() as f32));
        Ok::<_, CommError>(result)
    });
    for result in ranks.unwrap() {
        assert!(matches!(result, Err(CommError::Mismatch { .. })), "got {result:?}");
    }
}
