//! Sums of squares on a device.
#![expect(clippy::single_range_in_vec_init, reason = "a row is a range, and there may be one row")]

use std::ops::Range;

use cubecl::client::Client;
use proptest::prelude::*;
use zero_burn::kernels::{Buffer, KernelError, Norms, Role, RowNorm};
use zero_core::DType;

use crate::device::{Numbers, Random, client, teams};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn norms(client: &Client, numbers: &Numbers, rows: &[Range<usize>]) -> Vec<RowNorm> {
    norms_of(Norms::new(client), client, numbers, rows)
}

fn norms_of(mut norms: Norms<'_>, client: &Client, numbers: &Numbers, rows: &[Range<usize>]) -> Vec<RowNorm> {
    norms.add(&numbers.upload(client), rows).unwrap();
    let mut found = norms.read().unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

/// That every row has the sum of its elements' squares, to 1e-6 of it.
fn assert_sums(client: &Client, numbers: &Numbers, rows: &[Range<usize>]) {
    check(norms(client, numbers, rows), numbers, rows);
}

fn check(found: Vec<RowNorm>, numbers: &Numbers, rows: &[Range<usize>]) {
    assert_eq!(found.len(), rows.len());
    let values = numbers.values();
    for (row, norm) in rows.iter().zip(found) {
        let expected: f64 = values[row.clone()].iter().map(|&value| f64::from(value).powi(2)).sum();
        assert_eq!(norm.is_finite, expected.is_finite(), "{row:?}");
        match norm.is_finite {
            true => {
                let off = (norm.sum_of_squares - expected).abs();
                assert!(off <= 1e-6 * expected, "{row:?}: {} for {expected}", norm.sum_of_squares);
            }
            false => assert_eq!(norm.sum_of_squares, f64::INFINITY),
        }
    }
}

/// Rows of these lengths one behind another.
fn rows_of(lens: &[usize]) -> Vec<Range<usize>> {
    let ends = lens.iter().scan(0, |at, len| {
        *at += len;
        Some(*at)
    });
    ends.zip(lens).map(|(end, len)| end - len..end).collect()
}

#[test]
fn rows_of_every_length_and_type_have_their_sums_of_squares() {
    let client = client();
    let rows = rows_of(&[0, 1, 2, 3, 4, 5, 63, 64, 65, 255, 256, 257, 4097, 8191, 8193, 40_000]);
    for dtype in DTYPES {
        let numbers = Numbers::new(dtype, &Random(20).many(61_456, 3.0));
        assert_sums(&client, &numbers, &rows);
    }
}

#[test]
fn teams_of_any_size_find_the_same() {
    let client = client();
    let rows = rows_of(&[0, 1, 5, 3000, 700, 8192, 60_001]);
    let mut values = Random(23).many(71_899, 3.0);
    for (at, value) in [(3, 1e30), (7, 1e-30), (4000, 3e38), (9000, f32::NAN), (60_000, 1e-20)] {
        values[at] = value;
    }
    for dtype in [DType::F32, DType::BF16] {
        let numbers = Numbers::new(dtype, &values);
        for team in teams(&client) {
            check(norms_of(Norms::with_team(&client, team), &client, &numbers, &rows), &numbers, &rows);
        }
    }
}

#[test]
fn a_million_equal_numbers_lose_nothing() {
    // Their sums are rounded the same way everywhere, so that errors don't cancel out.
    for value in [0.1, 1.0, 3.333_333_3] {
        assert_sums(&client(), &Numbers::new(DType::F32, &vec![value; 1_000_003]), &[1..1_000_003]);
    }
}

#[test]
fn nothing_overflows_or_underflows_where_numbers_are_finite() {
    let client = client();
    for value in [f32::MAX, 1e30, 1.1259e15, 1.1258e15, 1.0, 2.9e-14, 2.8e-14, 1e-30, f32::MIN_POSITIVE] {
        assert_sums(&client, &Numbers::new(DType::F32, &vec![value; 9000]), &[0..9000]);
        let mut mixed = Random(21).many(5000, 1.0);
        mixed[1234] = value;
        mixed[4321] = -value;
        assert_sums(&client, &Numbers::new(DType::F32, &mixed), &[0..5000]);
        let mut alone = vec![0.0; 300];
        alone[299] = value;
        assert_sums(&client, &Numbers::new(DType::F32, &alone), &[0..300]);
    }
    let halves = [65504.0, 6e-8, -65504.0, 6e-5, 0.0];
    assert_sums(&client, &Numbers::new(DType::F16, &halves.repeat(1000)), &[0..5000]);
    assert_sums(&client, &Numbers::new(DType::BF16, &[3e38, 1e-37, -3e38].repeat(1000)), &[0..3000]);
}

#[test]
fn exactly_the_rows_with_an_infinity_or_nan_are_not_finite() {
    let client = client();
    let rows = rows_of(&[5, 0, 1, 700, 3, 9000, 64]);
    for dtype in DTYPES {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for (at, row) in rows.iter().enumerate().filter(|(_, row)| !row.is_empty()) {
                for place in [row.start, row.end - 1] {
                    let mut values = vec![1.0; 9773];
                    values[place] = bad;
                    let found = norms(&client, &Numbers::new(dtype, &values), &rows);
                    let first_bad = found.iter().position(|norm| !norm.is_finite);
                    assert_eq!(first_bad, Some(at), "{bad} at {place} of {dtype}");
                    assert_eq!(found.iter().filter(|norm| !norm.is_finite).count(), 1);
                }
            }
        }
    }
}

#[test]
fn buffers_come_back_in_their_order_with_rows_that_overlap_or_are_empty() {
    let client = client();
    let first = Numbers::new(DType::F32, &[1.0, 2.0, 3.0]).upload(&client);
    let second = Numbers::new(DType::BF16, &[2.0; 5]).upload(&client);
    let empty: &[Range<usize>] = &[];
    let mut norms = Norms::new(&client);
    norms.add(&first, &[0..3, 1..3, 2..2]).unwrap();
    norms.add(&first, empty).unwrap();
    norms.add(&second, std::slice::from_ref(&(1..5))).unwrap();
    let found: Vec<Vec<f64>> = norms
        .read()
        .unwrap()
        .into_iter()
        .map(|rows| rows.iter().map(|row| row.sum_of_squares).collect())
        .collect();
    assert_eq!(found, [vec![14.0, 13.0, 0.0], vec![], vec![16.0]]);
    assert_eq!(Norms::new(&client).read().unwrap(), Vec::<Vec<RowNorm>>::new());
}

#[test]
fn the_same_numbers_have_the_same_sum_to_the_bit() {
    let client = client();
    let numbers = Numbers::new(DType::F32, &Random(22).many(100_000, 1.0));
    let once = norms(&client, &numbers, &[3..99_999]);
    for _ in 0..3 {
        assert_eq!(norms(&client, &numbers, &[3..99_999]), once);
    }
}

#[test]
fn a_row_behind_the_end_is_refused_and_not_added() {
    let client = client();
    let buffer: Buffer = Numbers::new(DType::F32, &[1.0; 4]).upload(&client);
    let mut norms = Norms::new(&client);
    let error = norms.add(&buffer, &[0..4, 2..5]).unwrap_err();
    let expected = KernelError::OutOfRange { row: 1, role: Role::Summed, start: 2, len: 3, elements: 4 };
    assert_eq!(error, expected);
    assert_eq!(norms.read().unwrap(), Vec::<Vec<RowNorm>>::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_finite_numbers_have_their_sum_of_squares(
        values in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::ZERO, 0..2000),
        start in 0usize..9,
    ) {
        let start = start.min(values.len());
        assert_sums(&client(), &Numbers::new(DType::F32, &values), &[start..values.len(), 0..start]);
    }
}
