//! Reductions, gathers and broadcasts.

use half::{bf16, f16};
use zero_core::{DType, Rank, WorldSize};

use super::{Harness, PATIENT, noise};
use crate::{CommError, CommunicatorExt, OpKind, ReduceOp};

/// Floating point sums and means are bitwise those of adding the ranks one after the other.
pub fn sums_are_taken_in_rank_order(harness: &dyn Harness, size: WorldSize) {
    const LENGTH: usize = 5000;
    let sums: Vec<f32> = (0..LENGTH)
        .map(|index| (1..size.get()).fold(noise(0, index), |sum, rank| sum + noise(rank, index)))
        .collect();
    let means: Vec<f32> = sums.iter().map(|sum| sum / size.get() as f32).collect();
    harness.run(size, PATIENT, &|comm| {
        for (op, expected) in [(ReduceOp::Sum, &sums), (ReduceOp::Mean, &means)] {
            let mut buffer: Vec<_> = (0..LENGTH).map(|index| noise(comm.rank().index(), index)).collect();
            comm.all_reduce(&mut buffer, op, "noise").unwrap();
            assert_eq!(&buffer, expected, "{op} on {}", comm.rank());
        }
    });
}

/// Sums of `bf16` and `f16` are accumulated in `f32`: small terms that each round away add up.
pub fn sixteen_bit_floats_are_rounded_once(harness: &dyn Harness, size: WorldSize) {
    // Each term is a quarter of the distance from 1 to the next number.
    let ranks = size.get() as f32;
    let brain = |rank: usize| if rank == 0 { 1.0 } else { 2_f32.powi(-9) };
    let half = |rank: usize| if rank == 0 { 1.0 } else { 2_f32.powi(-12) };
    let expected = (
        bf16::from_f32((ranks - 1.0).mul_add(2_f32.powi(-9), 1.0)),
        f16::from_f32((ranks - 1.0).mul_add(2_f32.powi(-12), 1.0)),
    );
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        let brain = comm.all_reduce_value(bf16::from_f32(brain(rank)), ReduceOp::Sum, "bf16").unwrap();
        let half = comm.all_reduce_value(f16::from_f32(half(rank)), ReduceOp::Sum, "f16").unwrap();
        assert_eq!((brain, half), expected);
    });
}

/// Every reduction gives the canonical NaN if any rank brings any NaN.
pub fn one_nan_makes_a_reduction_nan(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let odd = f32::from_bits(0xFFC0_1234);
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            for place in size.ranks() {
                let mine = if comm.rank() == place { odd } else { 1.0 };
                let reduced = comm.all_reduce_value(mine, op, "nan").unwrap();
                assert_eq!(reduced.to_bits(), f32::NAN.to_bits(), "{op} with NaN from {place}");
            }
        }
    });
}

/// The sum of negative zeros is negative, and the order of the zeros does not matter to maximum and minimum.
pub fn negative_zero_is_kept_and_is_less_than_zero(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let sum = comm.all_reduce_value(-0.0_f64, ReduceOp::Sum, "zeros").unwrap();
        assert_eq!(sum.to_bits(), (-0.0_f64).to_bits());
        for place in size.ranks() {
            let mine = if comm.rank() == place { 0.0_f32 } else { -0.0 };
            let greatest = comm.all_reduce_value(mine, ReduceOp::Max, "zeros").unwrap();
            assert_eq!(greatest.to_bits(), 0.0_f32.to_bits());
            let least = comm.all_reduce_value(-mine, ReduceOp::Min, "zeros").unwrap();
            assert_eq!(least.to_bits(), (-0.0_f32).to_bits());
        }
    });
}

/// A sum that does not fit is an error on all ranks, after which the group goes on.
pub fn an_integer_sum_never_wraps(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let first = comm.rank() == Rank::ROOT;
        // Intermediate sums may leave the range; it is the result that must fit.
        let mine = if first { i64::MIN } else { 0 };
        assert_eq!(comm.all_reduce_value(mine, ReduceOp::Sum, "fits"), Ok(i64::MIN));
        if size.get() == 1 {
            return;
        }
        let mut bytes = vec![0_u8; 3000];
        bytes[2999] = if first { 255 } else { 1 };
        let expected =
            CommError::Overflow { operation: OpKind::AllReduce, label: "wraps".into(), dtype: DType::U8 };
        assert_eq!(comm.all_reduce(&mut bytes, ReduceOp::Sum, "wraps"), Err(expected));
        let mut part = [0_i32];
        let send = vec![i32::MAX; size.get()];
        let expected = CommError::Overflow {
            operation: OpKind::ReduceScatter,
            label: "wraps".into(),
            dtype: DType::I32,
        };
        assert_eq!(comm.reduce_scatter(&send, &mut part, ReduceOp::Sum, "wraps"), Err(expected));
        assert_eq!(comm.all_reduce_value(1_u8, ReduceOp::Sum, "goes on"), Ok(size.get() as u8));
    });
}

/// Ranks may bring different numbers of elements, and none.
pub fn parts_of_a_gather_may_be_uneven(harness: &dyn Harness, size: WorldSize) {
    let counts: Vec<_> = size.ranks().map(|rank| rank.index() % 3 * 7).collect();
    let part = |rank: Rank| vec![rank.index() as i32; counts[rank.index()]];
    let expected: Vec<_> = size.ranks().flat_map(part).collect();
    harness.run(size, PATIENT, &|comm| {
        let mut all = vec![-1; expected.len()];
        comm.all_gather_uneven(&part(comm.rank()), &mut all, &counts, "parts").unwrap();
        assert_eq!(all, expected);
        assert_eq!(comm.all_gather_value(comm.rank().index() as i64, "rank").unwrap(), {
            (0..size.get() as i64).collect::<Vec<_>>()
        });
    });
}

/// Parts of a reduce-scatter may be uneven, and together are the all-reduce of the same data.
pub fn each_rank_gets_its_part_of_a_reduction(harness: &dyn Harness, size: WorldSize) {
    let counts: Vec<_> = size.ranks().map(|rank| rank.index() % 3 * 1111).collect();
    let length: usize = counts.iter().sum();
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        let send: Vec<_> = (0..length).map(|index| noise(rank, index)).collect();
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            let mut whole = send.clone();
            comm.all_reduce(&mut whole, op, "whole").unwrap();
            let mut part = vec![f32::NAN; counts[rank]];
            comm.reduce_scatter_uneven(&send, &mut part, &counts, op, "part").unwrap();
            let start: usize = counts[..rank].iter().sum();
            assert_eq!(part, whole[start..start + counts[rank]]);
        }
    });
}

/// Megabytes, in parts of very different lengths, are cut and pipelined where small buffers are not.
pub fn large_buffers_come_whole(harness: &dyn Harness, size: WorldSize) {
    let counts: Vec<_> = size.ranks().map(|rank| [1_300_000, 7, 300_001][rank.index() % 3]).collect();
    let length: usize = counts.iter().sum();
    let value = |rank: usize, index: usize| ((rank + 1) * (index % 1000)) as f32;
    let total = size.get() * (size.get() + 1) / 2;
    let sum = |index: usize| (total * (index % 1000)) as f32;
    harness.run(size, PATIENT, &|comm| {
        let rank = comm.rank().index();
        let send: Vec<_> = (0..length).map(|index| value(rank, index)).collect();
        let start: usize = counts[..rank].iter().sum();
        let mut part = vec![f32::NAN; counts[rank]];
        comm.reduce_scatter_uneven(&send, &mut part, &counts, ReduceOp::Sum, "part").unwrap();
        assert!(part.iter().enumerate().all(|(index, part)| *part == sum(start + index)));

        let mut whole = vec![f32::NAN; length];
        comm.all_gather_uneven(&part, &mut whole, &counts, "parts").unwrap();
        assert!(whole.iter().enumerate().all(|(index, whole)| *whole == sum(index)));

        whole.copy_from_slice(&send);
        comm.all_reduce(&mut whole, ReduceOp::Sum, "whole").unwrap();
        assert!(whole.iter().enumerate().all(|(index, whole)| *whole == sum(index)));

        let root = Rank::new(size.get() - 1);
        whole.copy_from_slice(&send);
        comm.broadcast(&mut whole, root, "whole").unwrap();
        assert!(whole.iter().enumerate().all(|(index, whole)| *whole == value(root.index(), index)));
    });
}

/// Each rank can be the root, and the others' data is replaced.
pub fn broadcast_comes_from_any_root(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        for root in size.ranks() {
            let mut buffer = [comm.rank().index() as f64; 33];
            comm.broadcast(&mut buffer, root, "from any").unwrap();
            assert_eq!(buffer, [root.index() as f64; 33]);
        }
    });
}

/// Only the root knows how many bytes there are; what others pass does not matter.
pub fn bytes_of_unknown_number_are_broadcast(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        for root in size.ranks() {
            let content = vec![7_u8; root.index() * 100];
            let mine = (comm.rank() == root).then(|| content.clone());
            assert_eq!(comm.broadcast_bytes(mine, root, "bytes").unwrap(), content);
            let mine = if comm.rank() == root { content.clone() } else { vec![1; 5] };
            assert_eq!(comm.broadcast_bytes(mine, root, "bytes").unwrap(), content);
        }
    });
}

/// Each rank brings as many bytes as it likes.
pub fn bytes_of_unknown_number_are_gathered(harness: &dyn Harness, size: WorldSize) {
    let content = |rank: Rank| vec![rank.index() as u8; rank.index() * 10];
    let expected: Vec<_> = size.ranks().map(content).collect();
    harness.run(size, PATIENT, &|comm| {
        assert_eq!(comm.all_gather_bytes(&content(comm.rank()), "bytes").unwrap(), expected);
    });
}

/// Every collective operation works without elements.
pub fn buffers_may_be_empty(harness: &dyn Harness, size: WorldSize) {
    harness.run(size, PATIENT, &|comm| {
        let mut none: [f32; 0] = [];
        comm.all_reduce(&mut none, ReduceOp::Sum, "").unwrap();
        comm.all_gather::<f64>(&[], &mut [], "").unwrap();
        comm.reduce_scatter::<bf16>(&[], &mut [], ReduceOp::Mean, "").unwrap();
        comm.broadcast::<i64>(&mut [], Rank::ROOT, "").unwrap();
        comm.all_to_all::<f16>(&[], &mut [], "").unwrap();
    });
}
