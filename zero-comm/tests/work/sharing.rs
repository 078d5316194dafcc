//! Buffers that share a transfer.

use zero_comm::{CommError, CommunicatorExt, Gather, ReduceOp, WorkQueue};
use zero_core::{Bytes, Rank};

use super::{SUM, bits, noise, run, world};

#[test]
fn buffers_that_share_a_transfer_get_the_same_bits_as_alone() {
    let lengths = [3, 0, 100, 7, 7, 1, 40];
    for (transfer_bytes, shared) in [(0, (0, 0)), (60, (2, 5)), (1 << 20, (1, 7)), (usize::MAX, (1, 7))] {
        let stats = world(3).run(|comm| {
            let rank = comm.rank().index();
            let group = comm.split(Some(0), 0, "queue")?.unwrap();
            let queue = WorkQueue::new(group).unwrap().with_transfer_bytes(transfer_bytes);
            let buffers = || lengths.iter().map(|length| noise(rank, *length)).collect::<Vec<_>>();
            // The queues of the ranks fill at different speeds.
            if rank == 1 {
                comm.barrier("late").unwrap();
            }
            let reduced = queue.all_reduce_many(buffers(), ReduceOp::Mean, "many");
            if rank != 1 {
                comm.barrier("late").unwrap();
            }
            let reduced = reduced.wait().unwrap();
            for (reduced, mut alone) in reduced.iter().zip(buffers()) {
                comm.all_reduce(&mut alone, ReduceOp::Mean, "alone")?;
                assert_eq!(bits(reduced), bits(&alone));
            }
            Ok::<_, CommError>(queue.stats())
        });
        for stats in stats.unwrap() {
            assert_eq!((stats.shared_transfers, stats.shared_buffers), shared, "at {transfer_bytes}");
            assert_eq!((stats.submitted, stats.ended, stats.bytes), (1, 1, Bytes::new(158 * 4)));
        }
    }
}

#[test]
fn gathers_that_share_a_transfer_give_the_same_as_alone() {
    for size in [1, 2, 4] {
        for (transfer_bytes, shared) in [(0, (0, 0)), (1 << 20, (1, 4))] {
            run(size, |comm, _| {
                let rank = comm.rank().index();
                let group = comm.split(Some(0), 0, "queue").unwrap().unwrap();
                let queue = WorkQueue::new(group).unwrap().with_transfer_bytes(transfer_bytes);
                let gathers: Vec<_> = [0, 5, 3, 2]
                    .map(|seed| {
                        let counts: Vec<_> = (0..size).map(|peer| (peer * 7 + seed) % 5 + 1).collect();
                        let receive = vec![0.0; counts.iter().sum()].into_boxed_slice();
                        Gather { send: noise(rank + seed, counts[rank]), receive, counts }
                    })
                    .into();
                let gathered = queue.all_gather_many(gathers, "many").wait().unwrap();
                assert_eq!(gathered.len(), 4);
                for Gather { send, receive, counts } in gathered {
                    let mut alone = vec![0.0; counts.iter().sum()];
                    comm.all_gather_uneven(&send, &mut alone, &counts, "alone").unwrap();
                    assert_eq!(bits(&receive), bits(&alone));
                }
                let stats = queue.stats();
                assert_eq!((stats.shared_transfers, stats.shared_buffers), shared);
            });
        }
    }
}

#[test]
fn no_buffers_at_all_are_no_transfer() {
    run(2, |_, queue| {
        let none = queue.all_reduce_many(Vec::<Vec<f32>>::new(), SUM, "none").wait().unwrap();
        assert!(none.is_empty());
        let none = queue.all_gather_many::<f32, _, _>(Vec::<Gather<Vec<f32>, Vec<f32>>>::new(), "none");
        assert!(none.wait().unwrap().is_empty());
    });
}

#[test]
fn ranks_that_cut_a_shared_transfer_differently_do_not_agree() {
    run(2, |comm, queue| {
        let cut = if comm.rank() == Rank::ROOT { [2, 3] } else { [3, 2] };
        let buffers = cut.map(|length| vec![1_i32; length]).to_vec();
        let failed = queue.all_reduce_many(buffers, SUM, "biases").wait().unwrap_err();
        let CommError::Mismatch { first, second } = &failed.error else { panic!("got {failed}") };
        assert_ne!(first.label, second.label);
        assert!(first.label.starts_with("biases (2 buffers cut as "), "{}", first.label);
        assert_eq!(failed.buffers.iter().map(Vec::len).collect::<Vec<_>>(), cut);
    });
    run(2, |comm, queue| {
        // Each rank has the same totals.
        let cuts = if comm.rank() == Rank::ROOT { [[1, 3], [3, 1]] } else { [[3, 1], [1, 3]] };
        let gathers = cuts.map(|counts| Gather {
            send: vec![0_u8; counts[comm.rank().index()]],
            receive: vec![0; 4],
            counts: counts.to_vec(),
        });
        let failed = queue.all_gather_many(gathers.into(), "shards").wait().unwrap_err();
        assert!(matches!(failed.error, CommError::Mismatch { .. }), "{failed}");
    });
}

#[test]
fn a_gather_that_is_wrong_in_itself_keeps_nobody_waiting() {
    let gather = |send, receive, counts: &[usize]| Gather {
        send: vec![1_u8; send],
        receive: vec![0_u8; receive],
        counts: counts.to_vec(),
    };
    for wrong in [gather(1, 3, &[1, 1]), gather(2, 2, &[1, 1]), gather(1, 1, &[1]), gather(1, 3, &[1, 1, 1])]
    {
        run(2, |comm, queue| {
            let mut gathers = vec![gather(1, 2, &[1, 1]), gather(1, 2, &[1, 1])];
            if comm.rank() == Rank::ROOT {
                gathers.push(wrong.clone());
            }
            let failed = queue.all_gather_many(gathers, "shards").wait().map(drop);
            match failed.unwrap_err().error {
                CommError::InvalidArgument { rank, label, .. } => {
                    assert_eq!((rank, label.as_str()), (comm.rank(), "shards"));
                    assert_eq!(rank, Rank::ROOT);
                }
                CommError::Aborted { rank, .. } => assert!(rank == Rank::ROOT && comm.rank() != rank),
                other => panic!("got {other}"),
            }
        });
    }
}
