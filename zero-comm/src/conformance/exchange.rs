//! Data from one rank to another.

use std::thread;

use zero_core::{Rank, WorldSize};

use super::{Harness, PATIENT};
use crate::{CommError, CommunicatorExt, OpKind};

/// Parts differ in length from pair to pair, and may be empty.
pub fn every_rank_gets_its_part_from_every_rank(harness: &dyn Harness, size: WorldSize) {
    let count = |from: usize, to: usize| (from * 5 + to * 3) % 4;
    let part = |from: usize, to: usize| vec![(from * 100 + to) as i32; count(from, to)];
    let ranks = 0..size.get();
    harness.run(size, PATIENT, &|comm| {
        let here = comm.rank().index();
        let send: Vec<_> = ranks.clone().flat_map(|to| part(here, to)).collect();
        let send_counts: Vec<_> = ranks.clone().map(|to| count(here, to)).collect();
        let expected: Vec<_> = ranks.clone().flat_map(|from| part(from, here)).collect();
        let receive_counts: Vec<_> = ranks.clone().map(|from| count(from, here)).collect();
        let mut receive = vec![-1; expected.len()];
        comm.all_to_all_uneven(&send, &send_counts, &mut receive, &receive_counts, "uneven").unwrap();
        assert_eq!(receive, expected);

        let send: Vec<_> = ranks.clone().map(|to| (here * 100 + to) as f64).collect();
        let mut receive = vec![f64::NAN; size.get()];
        comm.all_to_all(&send, &mut receive, "even").unwrap();
        assert!(ranks.clone().all(|from| receive[from] == (from * 100 + here) as f64));
    });
}

/// Messages are matched in the order sent, whatever happens between other ranks.
pub fn messages_of_a_pair_arrive_in_order(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        for message in 0..20_i64 {
            if comm.rank() == Rank::ROOT {
                for to in size.ranks().skip(1) {
                    comm.send(to, &[message, to.index() as i64], "numbered").unwrap();
                }
            } else {
                let mut received = [0; 2];
                comm.receive(Rank::ROOT, &mut received, "numbered").unwrap();
                assert_eq!(received, [message, comm.rank().index() as i64]);
            }
        }
    });
}

/// Each rank adds itself to what it receives and passes it on.
pub fn a_message_goes_round_a_ring(harness: &dyn Harness, size: WorldSize) {
    if size.get() == 1 {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        let next = Rank::new((rank + 1) % size.get());
        let before = Rank::new((rank + size.get() - 1) % size.get());
        let mut sum = [0_i32; 100];
        if rank > 0 {
            comm.receive(before, &mut sum, "ring").unwrap();
        }
        sum.iter_mut().for_each(|sum| *sum += rank as i32);
        comm.send(next, &sum, "ring").unwrap();
        if rank == 0 {
            comm.receive(before, &mut sum, "ring").unwrap();
            assert_eq!(sum, [(0..size.get() as i32).sum::<i32>(); 100]);
        }
    });
}

/// Each rank sends to all others on one thread and receives from them on another, so that no order of sends
/// and receives can be wrong. A message is more than fits any buffer on the way.
pub fn messages_go_both_ways_at_once(harness: &dyn Harness, size: WorldSize) {
    const ELEMENTS: usize = 3_000_000;
    harness.run(size, PATIENT, &|comm| {
        let here = comm.rank();
        let others: Vec<_> = size.ranks().filter(|rank| *rank != here).collect();
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let message = vec![here.index() as i32; ELEMENTS];
                others.iter().for_each(|to| comm.send(*to, &message, "there").unwrap());
            });
            let mut received = vec![-1; ELEMENTS];
            for from in others.iter().rev() {
                comm.receive(*from, &mut received, "there").unwrap();
                assert!(received.iter().all(|element| *element == from.index() as i32));
            }
            sending.join().unwrap();
        });
    });
}

/// Sender and receiver both learn what the other side was.
pub fn a_message_of_another_length_fails_both(harness: &dyn Harness, size: WorldSize) {
    if size.get() == 1 {
        return;
    }
    harness.run(size, PATIENT, &|comm| {
        let result = match comm.rank().index() {
            0 => comm.send(Rank::new(1), &[1.0_f32; 3], "message"),
            1 => comm.receive(Rank::ROOT, &mut [0.0_f32; 4], "message"),
            _ => return,
        };
        let Err(CommError::Mismatch { first, second }) = result else { panic!("got {result:?}") };
        assert_eq!((first.operation, first.rank), (OpKind::Send, Rank::ROOT));
        assert_eq!((second.operation, second.rank), (OpKind::Receive, Rank::new(1)));
        assert_ne!(first.arguments, second.arguments);
    });
}
