//! Failures: they end every wait and name their cause.

use std::sync::Arc;
use std::thread;

use zero_comm::cudarc::driver::{CudaContext, CudaStream};
use zero_comm::{Agreement, CommError, NcclCommunicator, NcclError, OpKind, ReduceOp, WindowKey};
use zero_core::Rank;

use super::{IMPATIENT, PATIENT, alone, run_devices, several};

#[test]
fn wrong_arguments_are_refused_before_anything_is_launched() {
    type Wrong = fn(&NcclCommunicator, &Arc<CudaStream>) -> (Result<(), NcclError>, &'static str);
    let all: [Wrong; 6] = [
        |comm, stream| {
            let mut integers = stream.alloc_zeros::<i32>(4).unwrap();
            (comm.all_reduce(stream, &mut integers, ReduceOp::Mean, "wrong"), "the mean of i32")
        },
        |comm, stream| {
            let (send, mut receive) =
                (stream.alloc_zeros::<f32>(4).unwrap(), stream.alloc_zeros::<f32>(5).unwrap());
            (
                comm.all_gather(stream, &send, &mut receive, "wrong"),
                "receive has 5 elements, but counts add up to 4",
            )
        },
        |comm, stream| {
            let (send, mut receive) =
                (stream.alloc_zeros::<f32>(4).unwrap(), stream.alloc_zeros::<f64>(4).unwrap());
            (
                comm.reduce_scatter(stream, &send, &mut receive, ReduceOp::Sum, "wrong"),
                "receive is of f64, but send of f32",
            )
        },
        |comm, stream| {
            let mut buffer = stream.alloc_zeros::<f32>(4).unwrap();
            (comm.broadcast(stream, &mut buffer, Rank::new(9), "wrong"), "root is rank 9")
        },
        |comm, stream| {
            let buffer = stream.alloc_zeros::<f32>(4).unwrap();
            (comm.send(stream, comm.rank(), &buffer, "wrong"), "cannot send to itself")
        },
        |comm, stream| {
            let (send, mut receive) =
                (stream.alloc_zeros::<u8>(4).unwrap(), stream.alloc_zeros::<u8>(4).unwrap());
            let mut group = comm.group();
            group.all_gather_uneven(&send, &mut receive, &[1, 1], "wrong");
            (group.launch(stream), "there are 2 counts")
        },
    ];
    for wrong in all {
        alone(|comm, stream| {
            let (result, expected) = wrong(comm, stream);
            let Err(NcclError::Comm(CommError::InvalidArgument { label, reason, .. })) = &result else {
                panic!("got {result:?}")
            };
            assert!(label == "wrong" && reason.contains(expected), "{reason}");
            // The first failure stays, here and on the hosts.
            assert_eq!(comm.wait(), result);
            assert!(matches!(comm.control().barrier("later"), Err(CommError::Aborted { .. })));
            Ok(())
        });
    }
}

#[test]
fn memory_and_streams_of_another_device_are_refused() {
    let Some(_) = several() else { return };
    run_devices(1, PATIENT, Agreement::Checked, |comm, stream| {
        let other = CudaContext::new(1).unwrap().new_stream().unwrap();
        let mut buffer = other.alloc_zeros::<f32>(4).unwrap();
        let error = comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "elsewhere").unwrap_err();
        assert!(error.to_string().contains("the memory is of another CUDA context (device 1)"), "{error}");
        Ok(())
    });
    run_devices(1, PATIENT, Agreement::Checked, |comm, stream| {
        let other = CudaContext::new(1).unwrap().new_stream().unwrap();
        let mut buffer = stream.alloc_zeros::<f32>(4).unwrap();
        let error = comm.all_reduce(&other, &mut buffer, ReduceOp::Sum, "elsewhere").unwrap_err();
        assert!(error.to_string().contains("the stream is of another CUDA context (device 1)"), "{error}");
        Ok(())
    });
}

#[test]
fn an_abort_is_the_error_of_every_later_call() {
    alone(|comm, stream| {
        comm.abort("enough");
        comm.abort("a later reason does not count");
        let aborted = |operation, label: &str| {
            let (rank, reason, label) = (Rank::ROOT, "enough".to_owned(), label.to_owned());
            Err(NcclError::Comm(CommError::Aborted { rank, reason, operation, label }))
        };
        let mut buffer = stream.alloc_zeros::<f32>(4).unwrap();
        let result = comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "later");
        assert_eq!(result, aborted(OpKind::AllReduce, "later"));
        assert!(matches!(comm.wait(), Err(NcclError::Comm(CommError::Aborted { .. }))));
        assert!(comm.split(Some(0), 0, "later").is_err());
        assert!(comm.control().barrier("later").is_err());
        Ok(())
    });
}

#[test]
fn an_abort_reaches_ranks_that_wait_for_a_device() {
    let Some(size) = several() else { return };
    run_devices(size, PATIENT, Agreement::Unchecked, |comm, stream| {
        let last = Rank::new(size - 1);
        if comm.rank() == last {
            comm.abort("the data is broken");
            return Ok(());
        }
        let mut buffer = stream.alloc_zeros::<f32>(4).unwrap();
        let launched = comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "pending");
        let error = launched.and_then(|()| comm.wait()).unwrap_err();
        assert!(
            matches!(&error, NcclError::Comm(CommError::Aborted { rank, reason, .. })
                if *rank == last && reason == "the data is broken"),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn different_launches_are_named_before_data_moves() {
    let Some(size) = several() else { return };
    let errors = run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
        let mut buffer = stream.clone_htod(&[1.0_f32; 4]).unwrap();
        let result = if comm.rank().index() == size - 1 {
            comm.broadcast(stream, &mut buffer, Rank::ROOT, "weights")
        } else {
            comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "gradient")
        };
        assert_eq!(comm.wait(), result);
        assert_eq!(stream.clone_dtoh(&buffer).unwrap(), [1.0; 4]);
        Ok(result.unwrap_err())
    });
    for error in errors {
        let NcclError::Comm(CommError::Mismatch { first, second }) = error else { panic!("got {error}") };
        assert_eq!((first.operation, first.label.as_str()), (OpKind::AllReduce, "gradient"));
        assert_eq!((second.rank.index(), second.operation), (size - 1, OpKind::Broadcast));
    }
}

#[test]
fn a_rank_that_does_not_launch_is_found_out() {
    let Some(size) = several() else { return };
    for agreement in [Agreement::Checked, Agreement::Unchecked] {
        let last = Rank::new(size - 1);
        let errors = run_devices(size, PATIENT, agreement, |comm, stream| {
            comm.control().barrier("all are here")?;
            comm.control().set_deadline(IMPATIENT);
            if comm.rank() == last {
                // Looks without waiting, until the others have given up.
                while comm.control().withdraw(WindowKey::new(0)).is_ok() {
                    thread::yield_now();
                }
                return Ok(comm.wait().unwrap_err());
            }
            let mut buffer = stream.clone_htod(&[1.0_f32; 4]).unwrap();
            let launched = comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "gradient");
            Ok(launched.and_then(|()| comm.wait()).unwrap_err())
        });
        for (rank, error) in errors.iter().enumerate() {
            match (agreement, error) {
                (
                    Agreement::Checked,
                    NcclError::Comm(CommError::Timeout { operation, label, missing, .. }),
                ) => {
                    assert_eq!(missing, &[last]);
                    // Who did not launch knows only what the world failed of.
                    if rank != last.index() {
                        assert_eq!((*operation, label.as_str()), (OpKind::AllReduce, "gradient"));
                    }
                }
                (Agreement::Unchecked, NcclError::Timeout { operation, label, .. }) => {
                    assert_eq!((*operation, label.as_str()), (OpKind::AllReduce, "gradient"));
                }
                (Agreement::Unchecked, NcclError::Comm(CommError::Aborted { reason, .. })) => {
                    assert!(reason.contains("all_reduce \"gradient\": not complete"), "{reason}");
                }
                other => panic!("got {other:?}"),
            }
        }
    }
}

#[test]
fn a_rank_that_has_finished_is_named() {
    let Some(size) = several() else { return };
    run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
        let last = Rank::new(size - 1);
        if comm.rank() == last {
            return Ok(());
        }
        let mut buffer = stream.clone_htod(&[1.0_f32; 4]).unwrap();
        let error = comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "alone").unwrap_err();
        assert!(
            matches!(&error, NcclError::Comm(CommError::PeerLost { rank, operation: OpKind::AllReduce, .. })
                if *rank == last),
            "{error}"
        );
        Ok(())
    });
}
