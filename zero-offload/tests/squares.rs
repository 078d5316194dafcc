//! Norms: exact where they can be, the same everywhere, and what is not finite is found.

mod common;

use std::num::NonZeroUsize;

use common::{Numbers, Slice};
use zero_core::DType;
use zero_offload::{InstructionSet, SquareSum, Workers, sum_of_squares};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Every instruction set on one thread, and the fastest on several.
fn all_workers() -> Vec<Workers> {
    let sets = InstructionSet::available().into_iter();
    let mut workers: Vec<_> = sets.map(|set| Workers::alone().with_instruction_set(set).unwrap()).collect();
    workers.extend([2, 5].map(|threads| Workers::new(NonZeroUsize::new(threads).unwrap()).unwrap()));
    workers
}

fn everywhere(workers: &[Workers], values: &Slice) -> SquareSum {
    let found: Vec<_> = workers.iter().map(|workers| sum_of_squares(workers, values.get())).collect();
    for (found_here, workers) in found.iter().zip(workers) {
        assert_eq!(found_here.sum.to_bits(), found[0].sum.to_bits(), "{workers:?}");
        assert_eq!(found_here.first_non_finite, found[0].first_non_finite, "{workers:?}");
    }
    found[0]
}

#[test]
fn sums_of_small_integers_are_exact_at_every_length() {
    let workers = all_workers();
    for dtype in TYPES {
        let values: Vec<f32> = (0..4097).map(|at| (at % 13) as f32 - 6.0).collect();
        for len in (0..300).chain((300..4097).step_by(61)).chain([4095, 4096, 4097]) {
            let expected: f32 = values[..len].iter().map(|value| value * value).sum();
            let found = everywhere(&workers, &Slice::new(dtype, &values[..len]));
            assert_eq!(found, SquareSum { sum: expected.into(), first_non_finite: None }, "{dtype}, {len}");
        }
    }
}

#[test]
fn long_sums_do_not_depend_on_threads_and_are_close_to_a_plain_one() {
    let workers = all_workers();
    let mut numbers = Numbers::new(2);
    let values: Vec<f32> = (0..1_000_003).map(|_| numbers.ordinary()).collect();
    for dtype in TYPES {
        let slice = Slice::new(dtype, &values);
        let expected: f64 = slice.values().iter().map(|&value| f64::from(value).powi(2)).sum();
        let found = everywhere(&workers, &slice);
        assert!((found.sum - expected).abs() <= 1e-10 * expected, "{} for {expected}", found.sum);
        assert_eq!(found.first_non_finite, None);
    }
}

#[test]
fn every_machine_gives_the_recorded_sums() {
    let mut numbers = Numbers::new(3);
    let values: Vec<f32> = (0..100_003).map(|_| numbers.ordinary()).collect();
    let workers = all_workers();
    let sums = TYPES.map(|dtype| everywhere(&workers, &Slice::new(dtype, &values)).sum.to_bits());
    assert_eq!(sums, [0x40E0_4B40_6AB6_9324, 0x40E0_4B54_2E90_3193, 0x40E0_4B41_18D8_594A]);
}

#[test]
fn squares_out_of_the_range_of_f32_count() {
    let workers = all_workers();
    let large = everywhere(&workers, &Slice::F32(vec![f32::MAX; 100]));
    assert_eq!(large.sum, 100.0 * f64::from(f32::MAX).powi(2));
    let small = everywhere(&workers, &Slice::F32(vec![1e-45; 7]));
    assert_eq!(small.sum, 7.0 * f64::from(1e-45f32).powi(2));
}

#[test]
fn the_first_number_that_is_not_finite_is_found_wherever_it_is() {
    let workers = all_workers();
    for dtype in TYPES {
        for first in [0, 15, 16, 31, 32, 32_767, 32_768, 200_000, 299_999] {
            for kind in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![1.0; 300_000];
                values[first] = kind;
                values[299_999] = f32::NEG_INFINITY;
                let slice = Slice::new(dtype, &values);
                for workers in &workers {
                    let found = sum_of_squares(workers, slice.get());
                    assert_eq!(found.first_non_finite, Some(first), "{dtype}, {kind}");
                    assert!(!found.sum.is_finite());
                }
            }
        }
    }
}
