//! What errors tell the reader.

use std::time::Duration;

use zero_comm::{CommError, CommunicatorExt, LocalWorld, ReduceOp};
use zero_core::{Rank, WorldSize};

fn first_error(
    size: usize,
    call: impl Fn(&dyn zero_comm::Communicator) -> Result<(), CommError> + Sync,
) -> String {
    let world = LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_millis(100));
    let results = world.run(|comm| Ok::<_, CommError>(call(&*comm).map_err(|error| error.to_string())));
    results.unwrap().into_iter().find_map(Result::err).unwrap()
}

#[test]
fn a_mismatch_shows_both_calls() {
    let message = first_error(2, |comm| {
        if comm.rank() == Rank::ROOT {
            comm.all_reduce(&mut [0.0_f32; 10], ReduceOp::Mean, "layer.0.weight")
        } else {
            comm.all_gather(&[0_u8; 3], &mut [0; 6], "layer.1.bias")
        }
    });
    assert_eq!(
        message,
        "rank 0 called all_reduce(mean, 10 x f32) \"layer.0.weight\", but rank 1 called \
         all_gather([3, 3] x u8) \"layer.1.bias\"; all ranks of a group must call the same operations in \
         the same order with equal arguments and labels"
    );
}

#[test]
fn a_timeout_names_all_who_are_missing() {
    // The last rank waits in vain for a message, so nobody has finished.
    let message = first_error(4, |comm| match comm.rank().index() {
        1 | 3 => {
            while comm.withdraw(zero_comm::WindowKey::new(0)).is_ok() {
                std::thread::yield_now();
            }
            Ok(())
        }
        _ => comm.barrier("step 7"),
    });
    assert_eq!(
        message,
        "barrier \"step 7\": ranks 1, 3 did not come within 100ms; find out what they did instead, or \
         raise the deadline"
    );
}

#[test]
fn an_invalid_argument_says_what_would_be_right() {
    let message = first_error(3, |comm| comm.reduce_scatter(&[0_u8; 4], &mut [0], ReduceOp::Sum, "grad"));
    assert!(message.contains("send has 4 elements, but counts add up to 3"), "{message}");
    let message = first_error(1, |comm| comm.broadcast(&mut [0_u8], Rank::new(1), "weight"));
    assert!(message.contains("root is rank 1, but the group has ranks 0 to 0"), "{message}");
    let message = first_error(1, |comm| comm.all_reduce(&mut [0_i32], ReduceOp::Mean, "count"));
    assert!(message.contains("the mean of i32 is not an integer"), "{message}");
}

#[test]
fn errors_of_a_group_name_ranks_of_the_world() {
    let message = first_error(4, |comm| {
        let group = comm.split(Some((comm.rank().index() % 2) as u64), 0, "parity")?;
        match (comm.rank().index(), group) {
            (1, Some(group)) => group.barrier("odd"),
            (3, Some(group)) => group.fence("odd"),
            _ => Ok(()),
        }
    });
    assert!(
        message.starts_with("rank 1 called barrier() \"odd\", but rank 3 called fence() \"odd\""),
        "{message}"
    );
}
