//! Works give what the operations they stand for give, in order, and never keep a buffer or a waiter.

mod endings;
mod operations;
mod sharing;

use std::time::Duration;

use zero_comm::{CommError, Communicator, LocalWorld, ReduceOp, WorkQueue};
use zero_core::WorldSize;

const SUM: ReduceOp = ReduceOp::Sum;

fn world(size: usize) -> LocalWorld {
    LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_secs(60))
}

/// Runs `f` on ranks with a queue on a group of its own.
fn run<T: Send>(size: usize, f: impl Fn(&dyn Communicator, &WorkQueue) -> T + Sync) -> Vec<T> {
    let results = world(size).run(|comm| {
        let queue = WorkQueue::new(comm.split(Some(0), 0, "queue")?.unwrap()).unwrap();
        Ok::<_, CommError>(f(&*comm, &queue))
    });
    results.unwrap_or_else(|error| panic!("{error}"))
}

/// Numbers of any size, whose sum depends on the order.
fn noise(rank: usize, length: usize) -> Vec<f32> {
    let element = |index: usize| {
        let bits = (rank as u32 + 1).wrapping_mul(0x9E37_79B9) ^ (index as u32).wrapping_mul(0x85EB_CA6B);
        (bits as i32 as f32) * 10_f32.powi(bits as i32 % 7)
    };
    (0..length).map(element).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
