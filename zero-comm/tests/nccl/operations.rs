//! What operations do when all goes well.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use half::{bf16, f16};
use zero_comm::cudarc::driver::result::stream::launch_host_function;
use zero_comm::cudarc::driver::{CudaStream, DevicePtrMut};
use zero_comm::{
    Agreement, CommunicatorExt, DeviceBufferMut, Element, NcclCommunicator, NcclError, ReduceOp,
};
use zero_core::Rank;

use super::numbers::check;
use super::{IMPATIENT, PATIENT, alone, run, run_devices, several, sizes};

#[test]
fn every_operation_on_every_type_matches_the_hosts() {
    for size in sizes() {
        for agreement in [Agreement::Checked, Agreement::Unchecked] {
            run_devices(size, PATIENT, agreement, |comm, stream| {
                for length in [1, 1000] {
                    check::<f64>(comm, stream, length)?;
                    check::<f32>(comm, stream, length)?;
                    check::<f16>(comm, stream, length)?;
                    check::<bf16>(comm, stream, length)?;
                    check::<i64>(comm, stream, length)?;
                    check::<i32>(comm, stream, length)?;
                    check::<u8>(comm, stream, length)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_default_stream_serves_too() {
    for size in sizes() {
        run(size, PATIENT, |control| {
            let device = control.rank().index();
            let comm = NcclCommunicator::new(control, device)?;
            check::<f32>(&comm, &comm.context().default_stream(), 77)
        });
    }
}

#[test]
fn a_group_does_all_its_operations() {
    for size in sizes() {
        run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
            let here = comm.rank().index();
            let mut buffers: Vec<_> =
                (0..20).map(|index| stream.clone_htod(&[(here + index) as f32; 100]).unwrap()).collect();
            let mut group = comm.group();
            for (index, buffer) in buffers.iter_mut().enumerate() {
                group.all_reduce(buffer, ReduceOp::Sum, &format!("bucket {index}"));
            }
            group.launch(stream)?;
            comm.wait()?;
            let ranks: usize = (0..size).sum();
            for (index, buffer) in buffers.iter().enumerate() {
                assert_eq!(stream.clone_dtoh(buffer).unwrap(), [(ranks + index * size) as f32; 100]);
            }
            comm.group().launch(stream)
        });
    }
}

#[test]
fn messages_go_round_a_ring_at_once() {
    let Some(size) = several() else { return };
    for agreement in [Agreement::Checked, Agreement::Unchecked] {
        run_devices(size, PATIENT, agreement, |comm, stream| {
            let here = comm.rank().index();
            let (next, before) = ((here + 1) % size, (here + size - 1) % size);
            let send = stream.clone_htod(&[here as i32; 50]).unwrap();
            let mut receive = stream.alloc_zeros::<i32>(50).unwrap();
            let mut group = comm.group();
            group.send(Rank::new(next), &send, "ring");
            group.receive(Rank::new(before), &mut receive, "ring");
            group.launch(stream)?;
            assert_eq!(stream.clone_dtoh(&receive).unwrap(), [before as i32; 50]);
            // One after the other, alone.
            match here {
                0 => comm.send(stream, Rank::new(1), &send, "alone")?,
                1 => comm.receive(stream, Rank::ROOT, &mut receive, "alone")?,
                _ => return Ok(()),
            }
            comm.wait()?;
            assert_eq!(stream.clone_dtoh(&receive).unwrap(), [if here == 1 { 0 } else { before as i32 }; 50]);
            Ok(())
        });
    }
}

#[test]
fn memory_of_others_is_used_by_its_address() {
    for size in sizes() {
        run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
            let mut memory = stream.clone_htod(&[1.0_f32; 10]).unwrap();
            let (address, used) = memory.device_ptr_mut(stream);
            // SAFETY: ten elements on the communicator's device, which are not used before `wait` is back.
            let buffer = unsafe { DeviceBufferMut::from_raw(address, f32::DTYPE, 10) };
            assert_eq!(format!("{buffer:?} {}", buffer.is_empty()), "DeviceBufferMut(10 x f32) false");
            comm.all_reduce(stream, buffer, ReduceOp::Sum, "raw")?;
            comm.wait()?;
            drop(used);
            assert_eq!(stream.clone_dtoh(&memory).unwrap(), [size as f32; 10]);
            Ok(())
        });
    }
}

#[test]
fn an_event_and_later_work_on_the_stream_come_after_the_operation() {
    for size in sizes() {
        run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
            let mut buffer = stream.clone_htod(&[1_i64; 1000]).unwrap();
            for _ in 0..10 {
                comm.all_reduce(stream, &mut buffer, ReduceOp::Max, "many")?;
            }
            let event = stream.record_event(None).unwrap();
            comm.wait_for(&event)?;
            assert!(event.is_complete());
            let other = comm.context().new_stream().unwrap();
            // cudarc makes the other stream wait for the operation.
            comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "last")?;
            assert_eq!(other.clone_dtoh(&buffer).unwrap(), [size as i64; 1000]);
            Ok(())
        });
    }
}

#[test]
fn an_event_that_does_not_come_leaves_the_communicator_alone() {
    /// Holds up its stream until a message comes, or none can come any more.
    unsafe extern "C" fn hold(until: *mut c_void) {
        // SAFETY: the pointer is of a box that was given away for this call alone.
        let until = unsafe { Box::from_raw(until.cast::<Receiver<()>>()) };
        let _ = until.recv();
    }

    alone(|comm, stream| {
        comm.control().set_deadline(IMPATIENT);
        let held = comm.context().new_stream().unwrap();
        let (go, until) = channel::<()>();
        // SAFETY: the function takes the box, and calls nothing of CUDA.
        unsafe { launch_host_function(held.cu_stream(), hold, Box::into_raw(Box::new(until)).cast()) }
            .unwrap();
        let event = held.record_event(None).unwrap();
        assert_eq!(comm.wait_for(&event), Err(NcclError::Event { rank: Rank::ROOT, after: IMPATIENT }));
        drop(go);
        comm.control().set_deadline(PATIENT);
        comm.wait_for(&event)?;
        check::<f32>(comm, stream, 9)
    });
}

#[test]
fn a_communicator_is_split_like_its_control() {
    for size in sizes() {
        run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
            let here = comm.rank().index();
            // Halves in reverse order, without the last rank if there are more than two.
            let left_out = size > 2 && here == size - 1;
            let color = (!left_out).then_some((here % 2) as u64 + (1 << 40));
            let group = comm.split(color, (size - here) as u64, "halves")?;
            let Some(group) = group else {
                assert!(left_out);
                return comm.control().barrier("end").map_err(Into::into);
            };
            let members: Vec<_> = group.control().all_gather_value(here as i64, "members")?;
            assert!(members.windows(2).all(|pair| pair[0] > pair[1]), "{members:?}");
            assert_eq!(members[group.rank().index()], here as i64);
            let mut buffer = stream.clone_htod(&[here as f32]).unwrap();
            group.all_reduce(stream, &mut buffer, ReduceOp::Sum, "of the group")?;
            assert_eq!(stream.clone_dtoh(&buffer).unwrap(), [members.iter().sum::<i64>() as f32]);
            let alone = group.split(Some(here as u64), 0, "again")?.unwrap();
            alone.broadcast(stream, &mut buffer, Rank::ROOT, "alone")?;
            alone.wait()?;
            group.wait()?;
            comm.control().barrier("end").map_err(Into::into)
        });
    }
}

#[test]
fn threads_of_one_rank_take_turns() {
    for size in sizes() {
        run_devices(size, PATIENT, Agreement::Checked, |comm, stream| {
            let count = |stream: &Arc<CudaStream>| {
                let mut buffer = stream.clone_htod(&[1_i32; 8]).unwrap();
                comm.all_reduce(stream, &mut buffer, ReduceOp::Sum, "")?;
                comm.wait()?;
                assert_eq!(stream.clone_dtoh(&buffer).unwrap(), [size as i32; 8]);
                Ok::<_, NcclError>(())
            };
            thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..3).map(|_| scope.spawn(|| (0..20).try_for_each(|_| count(stream)))).collect();
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            })
        });
    }
}
