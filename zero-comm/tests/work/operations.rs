//! What works give, and when.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use zero_comm::{CommunicatorExt, OpKind, ReduceOp, Work, WorkQueue, WorkStats};
use zero_core::Rank;

use super::{SUM, bits, noise, run};

#[test]
fn works_give_what_operations_give() {
    for size in [1, 2, 3, 5] {
        run(size, |comm, queue| {
            let rank = comm.rank().index();
            let counts: Vec<usize> = (0..size).map(|rank| rank * 3 % 4).collect();
            let (whole, part) = (counts.iter().sum(), counts[rank]);
            let root = Rank::new(size - 1);

            let reduced = queue.all_reduce(noise(rank, 500), ReduceOp::Mean, "all_reduce");
            let even = queue.all_gather(noise(rank, 2), vec![0.0; 2 * size], "all_gather");
            let uneven = queue.all_gather_uneven(noise(rank, part), vec![0.0; whole], &counts, "uneven");
            let scattered = queue.reduce_scatter(noise(rank, 4 * size), vec![0.0; 4], SUM, "reduce_scatter");
            let scattered_uneven =
                queue.reduce_scatter_uneven(noise(rank, whole), vec![0.0; part], &counts, SUM, "uneven");
            let cast = queue.broadcast(noise(rank, 9), root, "broadcast");
            let exchanged = {
                let (out, back) = (vec![rank; size], (0..size).collect::<Vec<_>>());
                let receive = vec![0.0; back.iter().sum()];
                queue.all_to_all_uneven(noise(rank, rank * size), &out, receive, &back, "all_to_all")
            };
            let barrier = queue.barrier("barrier");

            let mut expected = noise(rank, 500);
            comm.all_reduce(&mut expected, ReduceOp::Mean, "").unwrap();
            assert_eq!(bits(&reduced.wait().unwrap()), bits(&expected));
            let mut expected = vec![0.0; 2 * size];
            comm.all_gather(&noise(rank, 2), &mut expected, "").unwrap();
            assert_eq!(even.wait().unwrap(), (noise(rank, 2), expected));
            let mut expected = vec![0.0; whole];
            comm.all_gather_uneven(&noise(rank, part), &mut expected, &counts, "").unwrap();
            assert_eq!(uneven.wait().unwrap(), (noise(rank, part), expected));
            let mut expected = vec![0.0; 4];
            comm.reduce_scatter(&noise(rank, 4 * size), &mut expected, SUM, "").unwrap();
            assert_eq!(scattered.wait().unwrap(), (noise(rank, 4 * size), expected));
            let mut expected = vec![0.0; part];
            comm.reduce_scatter_uneven(&noise(rank, whole), &mut expected, &counts, SUM, "").unwrap();
            assert_eq!(scattered_uneven.wait().unwrap(), (noise(rank, whole), expected));
            assert_eq!(cast.wait().unwrap(), noise(size - 1, 9));
            let (_, received) = exchanged.wait().unwrap();
            let expected: Vec<_> =
                (0..size).flat_map(|peer| noise(peer, peer * size)[rank * peer..][..peer].to_vec()).collect();
            assert_eq!(received, expected);
            barrier.wait().unwrap();
        });
    }
}

#[test]
fn messages_are_works_too() {
    run(2, |comm, queue| {
        if comm.rank() == Rank::ROOT {
            let sent = [1, 2].map(|number| queue.send(Rank::new(1), vec![number; 3], "message"));
            for (number, sent) in [1, 2].into_iter().zip(sent) {
                assert_eq!(sent.wait().unwrap(), [number; 3]);
            }
        } else {
            let received = [1, 2].map(|_| queue.receive(Rank::ROOT, vec![0; 3], "message"));
            for (number, received) in [1, 2].into_iter().zip(received) {
                assert_eq!(received.wait().unwrap(), [number; 3]);
            }
        }
    });
}

#[test]
fn the_caller_goes_on_while_a_work_waits_for_other_ranks() {
    run(2, |comm, queue| {
        let early = (comm.rank() == Rank::ROOT).then(|| queue.all_reduce(vec![1_i32], SUM, "work"));
        comm.barrier("the other rank has not submitted yet").unwrap();
        assert!(early.as_ref().is_none_or(|work| !work.is_done()));
        comm.barrier("now it does").unwrap();
        let work = early.unwrap_or_else(|| queue.all_reduce(vec![1_i32], SUM, "work"));
        assert_eq!(work.wait().unwrap(), [2]);
    });
}

#[test]
fn queues_and_the_caller_operate_side_by_side() {
    run(3, |comm, queue| {
        let group = comm.split(Some(0), 0, "second queue").unwrap().unwrap();
        let second = WorkQueue::new(group).unwrap();
        let mut works = Vec::new();
        for number in 0..200_i64 {
            works.push((number, queue.all_reduce(vec![number; 9], SUM, "first")));
            works.push((number, second.all_reduce(vec![number], ReduceOp::Max, "second")));
            assert_eq!(comm.all_reduce_value(number, ReduceOp::Min, "caller"), Ok(number));
        }
        for (number, work) in works {
            let result = work.wait().unwrap();
            assert!(result == [number] || result == [3 * number; 9]);
        }
    });
}

#[test]
fn works_are_done_in_the_order_of_their_submission() {
    run(1, |_, queue| {
        let order = Arc::new(Mutex::new(Vec::new()));
        let works: Vec<Work<usize>> = (0..100)
            .map(|number| {
                let order = Arc::clone(&order);
                queue.submit(OpKind::Barrier, "ordered", 0, number, move |_, number, _| {
                    order.lock().unwrap().push(*number);
                    Ok(())
                })
            })
            .collect();
        // Waiting in another order changes nothing.
        for (number, work) in works.into_iter().enumerate().rev() {
            assert_eq!(work.wait().unwrap(), number);
        }
        assert_eq!(*order.lock().unwrap(), (0..100).collect::<Vec<_>>());
    });
}

#[test]
fn a_queue_counts_what_it_does() {
    let stats = run(2, |_, queue| {
        assert_eq!(queue.stats(), WorkStats::default());
        let send = queue.reduce_scatter(vec![1.0_f64; 10], vec![0.0; 5], SUM, "80 bytes");
        let gather = queue.all_gather(vec![1_u8; 3], vec![0; 6], "6 bytes");
        let own = queue.submit(OpKind::Barrier, "100 bytes", 100, (), |comm, (), label| comm.barrier(label));
        own.wait().unwrap();
        // They are done, so waiting for them is free.
        let exposed = queue.stats().exposed;
        assert!(send.is_done() && gather.is_done());
        send.wait().unwrap();
        gather.wait().unwrap();
        assert_eq!(queue.stats().exposed, exposed);
        queue.stats()
    });
    for WorkStats { submitted, ended, failed, bytes, shared_transfers, shared_buffers, busy, .. } in stats {
        assert_eq!((submitted, ended, failed, bytes.get()), (3, 3, 0, 186));
        assert_eq!((shared_transfers, shared_buffers), (0, 0));
        assert!(busy > Duration::ZERO);
    }
}

#[test]
fn the_time_of_a_wait_is_exposed() {
    run(1, |_, queue| {
        // A work may end before its wait begins, but not every time.
        for _ in 0..10_000 {
            queue.barrier("short").wait().unwrap();
            if queue.stats().exposed > Duration::ZERO {
                return;
            }
        }
        panic!("no wait was counted");
    });
}

#[test]
fn queues_are_used_from_several_threads() {
    run(1, |_, queue| {
        thread::scope(|scope| {
            for number in 0..4_i32 {
                scope.spawn(move || {
                    for _ in 0..100 {
                        assert_eq!(queue.all_reduce(vec![number; 3], SUM, "").wait().unwrap(), [number; 3]);
                    }
                });
            }
        });
        assert_eq!(queue.stats().ended, 400);
    });
}
