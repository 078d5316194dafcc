//! Elements of every type, and every operation on them.

use std::fmt::Debug;
use std::sync::Arc;

use half::{bf16, f16};
use zero_comm::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use zero_comm::{CommunicatorExt, Element, NcclCommunicator, NcclError, ReduceOp};

/// An element type of cudarc's too.
pub(super) trait Number: Element + DeviceRepr + ValidAsZeroBits + PartialEq + Debug {
    /// A small number: sums of few are exact in any order.
    fn small(number: usize) -> Self;
}

macro_rules! numbers {
    ($($number:ty => $from:expr),*) => {$(
        impl Number for $number {
            fn small(number: usize) -> Self {
                $from((number % 7) as u8)
            }
        }
    )*};
}

numbers! {
    f64 => f64::from, f32 => f32::from, f16 => f16::from, bf16 => |number| bf16::from_f32(f32::from(number)),
    i64 => i64::from, i32 => i32::from, u8 => u8::from
}

pub(super) fn numbers<T: Number>(rank: usize, length: usize) -> Vec<T> {
    (0..length).map(|index| T::small(rank * 31 + index * 5)).collect()
}

/// Every operation on `length` elements per rank, against the same on the hosts.
pub(super) fn check<T: Number>(
    comm: &NcclCommunicator,
    stream: &Arc<CudaStream>,
    length: usize,
) -> Result<(), NcclError> {
    let (control, size, here) = (comm.control(), comm.world_size().get(), comm.rank().index());
    let mine = numbers::<T>(here, length);
    let many = numbers::<T>(here, length * size);
    let to_device = |host: &[T]| stream.clone_htod(host).unwrap();
    let to_host = |device: &CudaSlice<T>| stream.clone_dtoh(device).unwrap();
    let float = !matches!(T::DTYPE.name(), "i64" | "i32" | "u8");
    let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Mean];
    for op in ops.into_iter().filter(|op| float || *op != ReduceOp::Mean) {
        // The mean of powers of two of ranks is exact; that of others need not be rounded alike.
        if op == ReduceOp::Mean && !size.is_power_of_two() {
            continue;
        }
        let mut expected = mine.clone();
        control.all_reduce(&mut expected, op, "host")?;
        let mut buffer = to_device(&mine);
        comm.all_reduce(stream, &mut buffer, op, "all_reduce")?;
        assert_eq!(to_host(&buffer), expected, "all_reduce {op} of {}", T::DTYPE);

        let mut expected = vec![T::small(0); length];
        control.reduce_scatter(&many, &mut expected, op, "host")?;
        let (send, mut receive) = (to_device(&many), to_device(&mine));
        comm.reduce_scatter(stream, &send, &mut receive, op, "reduce_scatter")?;
        assert_eq!(to_host(&receive), expected, "reduce_scatter {op} of {}", T::DTYPE);
    }

    let mut expected = many.clone();
    control.all_gather(&mine, &mut expected, "host")?;
    let (send, mut receive) = (to_device(&mine), to_device(&many));
    comm.all_gather(stream, &send, &mut receive, "all_gather")?;
    assert_eq!(to_host(&receive), expected, "all_gather of {}", T::DTYPE);

    for root in comm.world_size().ranks() {
        let mut buffer = to_device(&mine);
        comm.broadcast(stream, &mut buffer, root, "broadcast")?;
        assert_eq!(to_host(&buffer), numbers::<T>(root.index(), length), "broadcast of {}", T::DTYPE);
    }

    // Uneven parts, of which some are empty: slices of longer buffers.
    let counts: Vec<_> = (0..size).map(|rank| (rank + 1) % 3 * (length / 3)).collect();
    let total: usize = counts.iter().sum();
    let part = counts[here];
    let mut expected = vec![T::small(0); total];
    control.all_gather_uneven(&mine[..part], &mut expected, &counts, "host")?;
    let (send, mut receive) = (to_device(&mine), to_device(&many));
    let mut group = comm.group();
    group.all_gather_uneven(send.slice(..part), receive.slice_mut(..total), &counts, "uneven");
    group.launch(stream)?;
    assert_eq!(to_host(&receive)[..total], expected, "uneven all_gather of {}", T::DTYPE);

    let mut expected = vec![T::small(0); part];
    control.reduce_scatter_uneven(&many[..total], &mut expected, &counts, ReduceOp::Sum, "host")?;
    let (send, mut receive) = (to_device(&many), to_device(&mine));
    let mut group = comm.group();
    let receive_part = receive.slice_mut(..part);
    group.reduce_scatter_uneven(send.slice(..total), receive_part, &counts, ReduceOp::Sum, "uneven");
    group.launch(stream)?;
    assert_eq!(to_host(&receive)[..part], expected, "uneven reduce_scatter of {}", T::DTYPE);
    // What does not belong to the part is as it was.
    assert_eq!(to_host(&receive)[part..], mine[part..]);
    comm.wait()
}
