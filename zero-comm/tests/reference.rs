//! Every operation on every type against a plain sequential computation, bit by bit.

use std::fmt::Debug;
use std::time::Duration;

use half::{bf16, f16};
use proptest::prelude::*;
use zero_comm::{CommError, CommunicatorExt, Element, LocalWorld, ReduceOp};
use zero_core::{Rank, WorldSize};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// A type with its own, plain arithmetic.
trait Plain: Element + Debug {
    /// Any value, with the odd ones (zeros, infinities, NaN, extremes) more often than by chance.
    fn draw(bits: u64) -> Self;

    /// What one element of the result is; `None` if it does not fit.
    fn reduce(op: ReduceOp, values: &[Self]) -> Option<Self>;

    const HAS_MEAN: bool;
}

macro_rules! plain_float {
    ($($float:ident as $wide:ident, $bits:ident);* $(;)?) => {$(
        impl Plain for $float {
            const HAS_MEAN: bool = true;

            fn draw(bits: u64) -> Self {
                match bits % 16 {
                    0 => $float::from_bits((bits >> 8) as $bits),
                    1 => $float::INFINITY,
                    2 => -$float::INFINITY,
                    3 => -$float::NAN,
                    4 => -$float::from_bits(0),
                    5 => $float::from_bits(0),
                    _ => narrow::$float(((bits >> 11) as f64 / (1_u64 << 53) as f64 - 0.5) * 100.0),
                }
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Option<Self> {
                let wide: Vec<$wide> = values.iter().map(|value| $wide::from(*value)).collect();
                let any_nan = wide.iter().any(|value| value.is_nan());
                let extreme = |less: fn($wide, $wide) -> bool| {
                    let better = |best, next| if less(best, next) { best } else { next };
                    let chosen = wide.iter().copied().reduce(better);
                    if any_nan { $wide::NAN } else { chosen.unwrap() }
                };
                let sum = wide.iter().copied().reduce(|sum, next| sum + next).unwrap();
                let result = match op {
                    ReduceOp::Sum => sum,
                    ReduceOp::Mean => sum / values.len() as $wide,
                    ReduceOp::Max => extreme(|a, b| a.total_cmp(&b).is_gt()),
                    ReduceOp::Min => extreme(|a, b| a.total_cmp(&b).is_lt()),
                };
                Some(if result.is_nan() { $float::NAN } else { round::$float(result) })
            }
        }
    )*};
}

/// From `f64`.
mod narrow {
    pub(super) fn f64(value: f64) -> f64 {
        value
    }
    pub(super) fn f32(value: f64) -> f32 {
        value as f32
    }
    pub(super) fn bf16(value: f64) -> half::bf16 {
        half::bf16::from_f64(value)
    }
    pub(super) fn f16(value: f64) -> half::f16 {
        half::f16::from_f64(value)
    }
}

/// From the type of the accumulator.
mod round {
    pub(super) fn f64(value: f64) -> f64 {
        value
    }
    pub(super) fn f32(value: f32) -> f32 {
        value
    }
    pub(super) fn bf16(value: f32) -> half::bf16 {
        half::bf16::from_f32_const(value)
    }
    pub(super) fn f16(value: f32) -> half::f16 {
        half::f16::from_f32_const(value)
    }
}

plain_float! {
    f64 as f64, u64;
    f32 as f32, u32;
    bf16 as f32, u16;
    f16 as f32, u16;
}

macro_rules! plain_integer {
    ($($integer:ident),*) => {$(
        impl Plain for $integer {
            const HAS_MEAN: bool = false;

            fn draw(bits: u64) -> Self {
                // Extremes are rare, so that most buffers of sums fit.
                match bits % 1024 {
                    0 => $integer::MAX,
                    1 => $integer::MIN,
                    _ => (bits >> 32) as $integer / 8,
                }
            }

            fn reduce(op: ReduceOp, values: &[Self]) -> Option<Self> {
                match op {
                    ReduceOp::Max => values.iter().copied().max(),
                    ReduceOp::Min => values.iter().copied().min(),
                    _ => values.iter().map(|value| i128::from(*value)).sum::<i128>().try_into().ok(),
                }
            }
        }
    )*};
}

plain_integer!(i64, i32, u8);

/// SplitMix64.
fn draw<T: Plain>(seed: u64, rank: usize, index: usize) -> T {
    let mut bits = seed.wrapping_add(((rank * 1_000_003 + index) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    T::draw(bits ^ (bits >> 31))
}

fn bits<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

fn check<T: Plain>(size: usize, seed: u64, counts: &[usize]) -> Result<(), TestCaseError> {
    let length: usize = counts.iter().sum();
    let inputs: Vec<Vec<T>> =
        (0..size).map(|rank| (0..length).map(|index| draw(seed, rank, index)).collect()).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let part = |rank: usize| start(rank)..start(rank) + counts[rank];
    let ops = || OPS.into_iter().filter(|op| *op != ReduceOp::Mean || T::HAS_MEAN);
    let reduced: Vec<Option<Vec<T>>> = ops()
        .map(|op| {
            let column = |index: usize| inputs.iter().map(|input| input[index]).collect::<Vec<_>>();
            (0..length).map(|index| T::reduce(op, &column(index))).collect()
        })
        .collect();
    let gathered: Vec<T> = (0..size).flat_map(|rank| inputs[rank][part(rank)].to_vec()).collect();

    let world = LocalWorld::new(WorldSize::new(size).unwrap()).with_deadline(Duration::from_secs(60));
    let outcome = world.run(|comm| {
        let rank = comm.rank().index();
        for (op, expected) in ops().zip(&reduced) {
            let mut buffer = inputs[rank].clone();
            let result = comm.all_reduce(&mut buffer, op, "all_reduce");
            let mut received = vec![T::draw(1); counts[rank]];
            let scattered =
                comm.reduce_scatter_uneven(&inputs[rank], &mut received, counts, op, "reduce_scatter");
            match expected {
                Some(expected) => {
                    result?;
                    scattered?;
                    assert_eq!(bits(&buffer), bits(expected), "{op} of {inputs:?}");
                    assert_eq!(bits(&received), bits(&expected[part(rank)]), "{op} of {inputs:?}");
                }
                None => {
                    assert!(matches!(result, Err(CommError::Overflow { .. })), "got {result:?}");
                    assert!(matches!(scattered, Err(CommError::Overflow { .. })), "got {scattered:?}");
                }
            }
        }

        let mut received = vec![T::draw(1); length];
        comm.all_gather_uneven(&inputs[rank][part(rank)], &mut received, counts, "all_gather")?;
        assert_eq!(bits(&received), bits(&gathered));

        let root = Rank::new(seed as usize % size);
        let mut buffer = inputs[rank].clone();
        comm.broadcast(&mut buffer, root, "broadcast")?;
        assert_eq!(bits(&buffer), bits(&inputs[root.index()]));

        // Each rank sends its part r to rank r, so rank r receives part r of everybody.
        let receive_counts = vec![counts[rank]; size];
        let mut received = vec![T::draw(1); counts[rank] * size];
        comm.all_to_all_uneven(&inputs[rank], counts, &mut received, &receive_counts, "all_to_all")?;
        let expected: Vec<T> = inputs.iter().flat_map(|input| input[part(rank)].to_vec()).collect();
        assert_eq!(bits(&received), bits(&expected));
        Ok::<_, CommError>(())
    });
    outcome.map(drop).map_err(|error| TestCaseError::fail(error.to_string()))
}

/// A world of 1 to 6 ranks and at most 300 elements in parts that may be empty.
fn parts() -> impl Strategy<Value = Vec<usize>> {
    let part = prop_oneof![1 => Just(0), 3 => 0..=50_usize];
    prop::collection::vec(part, 1..=6)
}

macro_rules! against_reference {
    ($($name:ident: $element:ty),* $(,)?) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
            $(
                #[test]
                fn $name(counts in parts(), seed: u64) {
                    check::<$element>(counts.len(), seed, &counts)?;
                }
            )*
        }
    };
}

against_reference! {
    f64_matches_the_reference: f64,
    f32_matches_the_reference: f32,
    bf16_matches_the_reference: bf16,
    f16_matches_the_reference: f16,
    i64_matches_the_reference: i64,
    i32_matches_the_reference: i32,
    u8_matches_the_reference: u8,
}

#[test]
fn buffers_of_many_blocks_match_the_reference() {
    for size in [1, 2, 3, 5] {
        let counts: Vec<_> = (0..size).map(|rank| 4000 + 777 * rank).collect();
        check::<f32>(size, 1, &counts).unwrap();
        check::<bf16>(size, 2, &counts).unwrap();
        check::<i64>(size, 3, &counts).unwrap();
    }
}
