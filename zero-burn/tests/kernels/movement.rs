//! Rows between buffers on a device.

use zero_burn::kernels::{KernelError, MoveRow, Onto, Role, move_rows};
use zero_core::DType;

use crate::device::{Numbers, Random, client, units_between};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// What a move comes to on the host.
fn moved(from: &Numbers, to: &Numbers, rows: &[MoveRow], factor: f32, onto: Onto) -> Numbers {
    let (from, mut values) = (from.values(), to.values());
    for row in rows {
        for at in 0..row.len {
            let number = from[row.from + at];
            let to = &mut values[row.to + at];
            *to = match onto {
                Onto::Put => number * factor,
                Onto::Add => number.mul_add(factor, *to),
            };
        }
    }
    Numbers::new(to.dtype(), &values)
}

/// Runs a move on both sides and compares all of the destination, between the rows too.
fn compare(from: &Numbers, to: &Numbers, rows: &[MoveRow], factor: f32, onto: Onto) {
    let client = client();
    let (source, target) = (from.upload(&client), to.upload(&client));
    move_rows(&client, &source, &target, rows, factor, onto).unwrap();
    let found = Numbers::download(&client, &target).values();
    let expected = moved(from, to, rows, factor, onto).values();
    for (at, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
        // Sums and products are rounded once, on either side.
        let apart = units_between(found, expected, to.dtype());
        let types = (from.dtype(), to.dtype());
        assert!(apart == 0, "{types:?}, {onto:?} at {at}: {found:e} for {expected:e}");
    }
}

fn scattered(random: &mut Random, lens: &[usize]) -> (Vec<MoveRow>, usize) {
    let (mut from, mut to) = (0, 0);
    let rows = lens.iter().map(|&len| {
        let row = MoveRow { from: from + random.below(4), to: to + random.below(4), len };
        (from, to) = (row.from + len, row.to + len);
        row
    });
    let rows = rows.collect();
    (rows, from.max(to) + 3)
}

#[test]
fn rows_are_put_and_added_between_all_types() {
    let mut random = Random(30);
    let (mut rows, len) = scattered(&mut random, &[0, 1, 3, 4, 5, 63, 64, 65, 255, 256, 257, 1, 1, 1, 2]);
    // One at vectors in both.
    rows.push(MoveRow { from: len.next_multiple_of(4), to: len.next_multiple_of(4) + 8, len: 100 });
    let len = len + 120;
    for from in DTYPES {
        for to in DTYPES {
            for onto in [Onto::Put, Onto::Add] {
                for factor in [1.0, 0.3] {
                    let source = Numbers::new(from, &random.many(len, 2.0));
                    let target = Numbers::new(to, &random.many(len, 2.0));
                    compare(&source, &target, &rows, factor, onto);
                }
            }
        }
    }
}

#[test]
fn what_is_put_without_change_of_type_keeps_its_bits() {
    let client = client();
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let numbers = Numbers::Bf16(bits.iter().map(|&bits| half::bf16::from_bits(bits)).collect());
    let halves = Numbers::F16(bits.iter().map(|&bits| half::f16::from_bits(bits)).collect());
    let singles = Numbers::F32(bits.iter().map(|&bits| f32::from_bits(u32::from(bits) * 0x1_0001)).collect());
    for numbers in [numbers, halves, singles] {
        for (from, to) in [(0, 0), (1, 2)] {
            let zeros = Numbers::new(numbers.dtype(), &vec![0.0; bits.len() + 2]);
            let (source, target) = (numbers.upload(&client), zeros.upload(&client));
            let rows = [MoveRow { from, to, len: 60_000 }];
            move_rows(&client, &source, &target, &rows, 1.0, Onto::Put).unwrap();
            let bits = |numbers: &Numbers, at: usize| match numbers {
                Numbers::F32(values) => values[at].to_bits(),
                Numbers::Bf16(values) => values[at].to_bits().into(),
                Numbers::F16(values) => values[at].to_bits().into(),
            };
            let found = Numbers::download(&client, &target);
            for at in 0..60_000 {
                assert_eq!(bits(&found, to + at), bits(&numbers, from + at));
            }
        }
    }
}

#[test]
fn special_values_arrive_and_too_large_ones_become_infinite() {
    let values =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, -65520.0, 65519.0, 6e-8, 2.9e-8];
    for from in DTYPES {
        for to in DTYPES {
            let source = Numbers::new(from, &values);
            let target = Numbers::new(to, &[1.0; 10]);
            for onto in [Onto::Put, Onto::Add] {
                compare(&source, &target, &[MoveRow { from: 0, to: 0, len: 10 }], 1.0, onto);
            }
        }
    }
}

#[test]
fn rows_may_move_within_one_buffer_where_they_do_not_meet() {
    let client = client();
    let numbers = Numbers::new(DType::F32, &Random(31).many(64, 1.0));
    let buffer = numbers.upload(&client);
    let rows = [MoveRow { from: 0, to: 33, len: 10 }, MoveRow { from: 10, to: 43, len: 10 }];
    move_rows(&client, &buffer, &buffer, &rows, 1.0, Onto::Put).unwrap();
    let mut expected = numbers.values();
    expected.copy_within(0..20, 33);
    assert_eq!(Numbers::download(&client, &buffer).values(), expected);

    let meet = [MoveRow { from: 0, to: 20, len: 10 }, MoveRow { from: 29, to: 40, len: 2 }];
    let error = move_rows(&client, &buffer, &buffer, &meet, 1.0, Onto::Put).unwrap_err();
    let expected = KernelError::Overlap { row: 0, role: Role::To, other_row: 1, other_role: Role::From };
    assert_eq!(error, expected);
}

#[test]
fn a_factor_that_is_not_finite_and_rows_outside_are_refused() {
    let client = client();
    let buffer = Numbers::new(DType::F32, &[1.0; 4]).upload(&client);
    let other = Numbers::new(DType::F32, &[1.0; 3]).upload(&client);
    let row = MoveRow { from: 0, to: 0, len: 4 };
    let error = move_rows(&client, &buffer, &other, &[row], 1.0, Onto::Put).unwrap_err();
    assert_eq!(error.to_string(), "row 0 is elements 0 to 0+4 of destination, which has 3");
    let error = move_rows(&client, &other, &buffer, &[row], f32::INFINITY, Onto::Put).unwrap_err();
    assert_eq!(error, KernelError::Factor { factor: f32::INFINITY });
    move_rows(&client, &buffer, &other, &[], 1.0, Onto::Put).unwrap();
}
