//! How works and queues end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use zero_comm::{
    CommError, Communicator, FaultPlan, Faulty, OpKind, RankFailure, ReduceOp, Work, WorkQueue, WorldError,
};
use zero_core::Rank;

use super::{SUM, run, world};

#[test]
fn a_failed_work_gives_its_buffers_back() {
    run(2, |_, queue| {
        let buffer = vec![200_u8; 3];
        let place = buffer.as_ptr();
        let failed = queue.all_reduce(buffer, SUM, "too much").wait().unwrap_err();
        assert!(matches!(failed.error, CommError::Overflow { .. }), "{failed}");
        assert_eq!(failed.buffers.as_ptr(), place);
        assert_eq!(failed.to_string(), failed.error.to_string());
        // All ranks have learnt of it, and the queue goes on.
        assert_eq!(queue.all_reduce(vec![1_u8], SUM, "fits").wait().unwrap(), [2]);

        let mean = queue.all_reduce(vec![1_i32; 5], ReduceOp::Mean, "mean of integers").wait();
        assert_eq!(mean.unwrap_err().buffers, [1; 5]);
        let later = queue.all_gather(vec![1.0_f32], vec![0.0; 2], "later").wait();
        let failed = later.unwrap_err();
        assert_eq!(failed.buffers.0, [1.0]);
        assert!(CommError::from(failed).to_string().contains("mean"));
        assert_eq!((queue.stats().ended, queue.stats().failed), (4, 3));
    });
}

#[test]
fn what_is_queued_in_a_world_that_fails_gets_the_cause() {
    run(3, |comm, queue| {
        let last = comm.rank() == Rank::new(2);
        let mut works = Vec::new();
        if !last {
            works.extend(["first", "second", "third"].map(|label| (label, queue.barrier(label))));
        }
        comm.barrier("two of three have submitted").unwrap();
        if last {
            comm.abort("enough");
        }
        works.push(("late", queue.barrier("late")));
        for (label, work) in works {
            let aborted = CommError::Aborted {
                rank: Rank::new(2),
                reason: "enough".into(),
                operation: OpKind::Barrier,
                label: label.into(),
            };
            assert_eq!(work.wait().unwrap_err().error, aborted);
        }
    });
}

#[test]
fn a_work_that_panics_aborts_the_world_and_gives_its_buffers_back() {
    let results = run(2, |comm, queue| {
        if comm.rank() == Rank::ROOT {
            return queue.barrier("waits").wait().map_err(CommError::from);
        }
        let failed = queue
            .submit(OpKind::Read, "faulty", 0, vec![7], |_, _, _| panic!("not today"))
            .wait()
            .unwrap_err();
        assert_eq!(failed.buffers, [7]);
        let CommError::Aborted { operation, label, .. } = &failed.error else { panic!("got {failed}") };
        assert_eq!((*operation, label.as_str()), (OpKind::Read, "faulty"));
        let later = queue.barrier("later").wait();
        assert!(later.is_err_and(|failed| matches!(failed.error, CommError::Aborted { .. })));
        Err(failed.error)
    });
    for result in results {
        let Err(CommError::Aborted { rank, reason, .. }) = result else { panic!("got {result:?}") };
        assert_eq!(rank, Rank::new(1));
        assert_eq!(reason, "read \"faulty\" panicked: not today");
    }
}

#[test]
fn a_communicator_that_panics_is_an_error_too() {
    let plan: FaultPlan = "rank=1,op=3,panic".parse().unwrap();
    let results = world(2).run(|comm| {
        let comm = Faulty::new(comm, &plan).unwrap();
        let queue = WorkQueue::new(comm.split(Some(0), 0, "queue")?.unwrap()).unwrap();
        queue.barrier("second").wait()?;
        Ok::<_, CommError>(queue.all_reduce(vec![1_i32], SUM, "third").wait().map_err(CommError::from))
    });
    for result in results.unwrap() {
        let Err(CommError::Aborted { rank, reason, operation, .. }) = result else { panic!("{result:?}") };
        assert_eq!((rank, operation), (Rank::new(1), OpKind::AllReduce));
        assert!(reason.contains("planned fault rank=1,op=3,panic"), "{reason}");
    }
}

#[test]
fn the_error_of_a_work_can_be_a_rank_s() {
    let error = world(2)
        .run(|comm| {
            let queue = WorkQueue::new(comm.split(Some(0), 0, "queue")?.unwrap()).unwrap();
            queue.all_reduce(vec![1_i32], ReduceOp::Mean, "count").wait()?;
            Ok::<_, CommError>(())
        })
        .unwrap_err();
    let WorldError::Failed { source, others, .. } = error else { panic!("got {error:?}") };
    assert!(matches!(source, CommError::InvalidArgument { .. }), "{source}");
    assert!(matches!(others[..], [(_, RankFailure::Error(_))]));
}
/// A buffer that says when it goes.
struct Guard {
    elements: Vec<f32>,
    dropped: Arc<AtomicUsize>,
}

impl AsMut<[f32]> for Guard {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.elements
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
        assert!(self.elements[0] >= 0.0, "a drop that panics");
    }
}

fn guard(element: f32, dropped: &Arc<AtomicUsize>) -> Guard {
    Guard { elements: vec![element; 4], dropped: Arc::clone(dropped) }
}

#[test]
fn a_work_that_nobody_waits_for_is_done_and_its_buffer_dropped() {
    run(2, |_, queue| {
        let dropped = Arc::default();
        drop(queue.all_reduce(guard(1.0, &dropped), SUM, "not waited for"));
        let kept = queue.all_reduce(guard(2.0, &dropped), SUM, "waited for").wait().unwrap();
        assert_eq!(kept.elements, [4.0; 4]);
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_buffer_whose_drop_panics_does_not_stop_the_queue() {
    run(2, |_, queue| {
        let dropped = Arc::default();
        drop(queue.all_reduce(guard(-1.0, &dropped), SUM, "not waited for"));
        assert_eq!(queue.all_reduce(vec![1.0_f32], SUM, "after it").wait().unwrap(), [2.0]);
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn dropping_a_queue_finishes_what_is_queued() {
    let works = world(3).run(|comm| {
        let queue = WorkQueue::new(comm.split(Some(0), 0, "queue")?.unwrap()).unwrap();
        let works: Vec<_> = (0..50).map(|_| queue.all_reduce(vec![1_i64], SUM, "queued")).collect();
        drop(queue);
        assert!(works.iter().all(Work::is_done));
        works.into_iter().map(|work| Ok::<_, CommError>(work.wait()?)).collect::<Result<Vec<_>, _>>()
    });
    assert_eq!(works.unwrap(), vec![vec![vec![3]; 50]; 3]);
}

#[test]
fn dropping_a_queue_waits_no_longer_than_the_deadline() {
    let results = world(2).run(|comm| {
        let group = comm.split(Some(0), 0, "queue")?.unwrap();
        group.set_deadline(Duration::from_millis(100));
        let queue = WorkQueue::new(group).unwrap();
        let mut works = Vec::new();
        if comm.rank() == Rank::ROOT {
            works.extend((0..50).map(|_| queue.barrier("alone")));
        }
        drop(queue);
        // The other rank is there, but does not come.
        let waited = comm.barrier("until the failure");
        assert!(matches!(waited, Err(CommError::Timeout { .. })), "{waited:?}");
        for work in works {
            let failed = work.wait().unwrap_err();
            assert!(matches!(failed.error, CommError::Timeout { .. }), "{failed}");
        }
        Ok::<_, CommError>(())
    });
    results.unwrap();
}

#[test]
fn a_thread_that_unwinds_past_unfinished_work_waits_for_nobody() {
    let error = world(2).run(|comm| {
        let queue = WorkQueue::new(comm.split(Some(0), 0, "queue")?.unwrap()).unwrap();
        if comm.rank() == Rank::new(1) {
            let _unfinished = queue.all_reduce(vec![1.0_f32], SUM, "the other rank does not come");
            panic!("the rank is broken");
        }
        let result = comm.barrier("waits for a rank that is broken");
        let Err(CommError::Aborted { rank, reason, .. }) = &result else { panic!("got {result:?}") };
        assert_eq!(
            (rank.index(), reason.as_str()),
            (1, "a thread unwound past a work queue with unfinished work")
        );
        result
    });
    let Err(WorldError::Panicked { rank, message, others }) = error else { panic!("got {error:?}") };
    assert_eq!((rank.index(), message.as_str()), (1, "the rank is broken"));
    assert!(matches!(others[..], [(Rank::ROOT, RankFailure::Error(_))]), "{others:?}");
}

#[test]
fn a_queue_may_be_dropped_by_its_own_thread() {
    struct Owner {
        queue: Option<Arc<WorkQueue>>,
        gone: mpsc::Sender<thread::ThreadId>,
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            drop(self.queue.take());
            let _ = self.gone.send(thread::current().id());
        }
    }

    let comm = world(1).communicators().remove(0);
    let queue = Arc::new(WorkQueue::new(comm).unwrap());
    let (gone, receiver) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let owner = Owner { queue: Some(Arc::clone(&queue)), gone };
    drop(queue.submit(OpKind::Barrier, "owner", 0, owner, move |_, _, _| {
        let _ = wait.recv();
        Ok(())
    }));
    let behind = queue.all_reduce(vec![1_i32], SUM, "behind it");
    // Now the work's is the last one.
    drop(queue);
    drop(go);
    assert_ne!(receiver.recv().unwrap(), thread::current().id());
    assert_eq!(behind.wait().unwrap(), [1]);
}
