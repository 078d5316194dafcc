//! Every machine, instruction set and number of threads gives the same bits.

mod common;

use std::num::NonZeroUsize;

use common::{Numbers, Slice, Slices, UPDATE, configs};
use xxhash_rust::xxh3::Xxh3;
use zero_core::DType;
use zero_offload::{Adam, FloatsMut, HostOptimizer, InstructionSet, Sgd, Update, Workers};

const GRADIENTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const STATES: [DType; 2] = [DType::F32, DType::BF16];
const COPIES: [Option<DType>; 4] = [None, Some(DType::F32), Some(DType::BF16), Some(DType::F16)];

/// About the sizes of vectors and blocks; longer ones come in the tests of single combinations.
const LENGTHS: [usize; 16] = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 127, 200];
const LONGEST: usize = 4097;

fn alone(set: InstructionSet) -> Workers {
    Workers::alone().with_instruction_set(set).unwrap()
}

fn threads(threads: usize) -> Workers {
    Workers::new(NonZeroUsize::new(threads).unwrap()).unwrap()
}

/// Updates prefixes of `slices` on every instruction set: an element's result depends on no other element.
fn compare(optimizer: &HostOptimizer, slices: &Slices, lengths: impl Iterator<Item = usize> + Clone) {
    let mut expected = slices.clone();
    expected.update(optimizer, &alone(InstructionSet::Scalar), UPDATE);
    let expected = expected.bits();
    for set in InstructionSet::available() {
        let workers = alone(set);
        for len in lengths.clone() {
            let mut slices = slices.truncated(len);
            slices.update(optimizer, &workers, UPDATE);
            for (at, (found, expected)) in slices.bits().iter().zip(&expected).enumerate() {
                assert_eq!(found, &expected[..len], "{set}, {len} elements, slice {at}, {optimizer:?}");
            }
        }
    }
}

#[test]
fn all_optimizers_and_types_give_the_same_bits_on_every_instruction_set() {
    for (seed, config) in configs().into_iter().enumerate() {
        let optimizer = HostOptimizer::new(config).unwrap();
        for gradient in GRADIENTS {
            for state in STATES {
                for copy in COPIES {
                    let mut numbers = Numbers::new(seed as u64 + 1);
                    let slices = Slices::new(&optimizer, 200, [gradient, state], copy, || numbers.any());
                    compare(&optimizer, &slices, LENGTHS.into_iter());
                }
            }
        }
    }
}

#[test]
fn adamw_gives_the_same_bits_at_every_length() {
    let optimizer = HostOptimizer::new(Adam::ADAMW).unwrap();
    for (dtype, step) in [(DType::BF16, 1), (DType::F32, 7)] {
        let mut numbers = Numbers::new(9);
        let slices = Slices::new(&optimizer, LONGEST, [dtype; 2], Some(dtype), || numbers.any());
        let last = LONGEST - 40;
        compare(&optimizer, &slices, (0..last).step_by(step).chain(last..=LONGEST));
    }
}

#[test]
fn all_optimizers_give_the_same_bits_on_thousands_of_numbers() {
    for config in configs() {
        let optimizer = HostOptimizer::new(config).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let mut numbers = Numbers::new(11);
            let slices = Slices::new(&optimizer, LONGEST, [dtype; 2], Some(DType::F16), || numbers.any());
            compare(&optimizer, &slices, [4095, 4096, LONGEST].into_iter());
        }
    }
}

#[cfg(target_arch = "aarch64")]
#[test]
fn arm_has_neon() {
    assert_eq!(InstructionSet::available(), [InstructionSet::Scalar, InstructionSet::Neon]);
}

/// The hashes of what updates with each configuration come to.
const RECORDED: [u64; 8] = [
    0xA71F_E43E_278F_0F36,
    0x82F6_76FE_9539_F735,
    0xBB27_13FC_9E62_D91F,
    0xE6C7_89D8_CCD0_65FF,
    0xA861_214B_480B_819D,
    0xB091_3F94_185E_31D3,
    0xB313_ACA4_E12E_64BB,
    0x4C70_B381_7AB8_24DA,
];

#[test]
fn every_machine_gives_the_recorded_bits() {
    for set in InstructionSet::available() {
        let hashes = configs().into_iter().zip(1..).map(|(config, seed)| {
            let optimizer = HostOptimizer::new(config).unwrap();
            let mut numbers = Numbers::new(seed);
            let mut hash = Xxh3::new();
            for gradient in GRADIENTS {
                for state in STATES {
                    for copy in COPIES {
                        let types = [gradient, state];
                        let mut slices = Slices::new(&optimizer, 500, types, copy, || numbers.any());
                        slices.update(&optimizer, &alone(set), UPDATE);
                        let bits = slices.bits().into_iter().flatten();
                        bits.for_each(|bits| hash.update(&bits.to_le_bytes()));
                    }
                }
            }
            hash.digest()
        });
        assert_eq!(hashes.collect::<Vec<_>>(), RECORDED, "{set}");
    }
}

#[test]
fn several_steps_on_ten_million_numbers_do_not_depend_on_threads() {
    const LEN: usize = 10_000_000;
    let optimizer = HostOptimizer::new(Adam::ADAMW).unwrap();
    let mut numbers = Numbers::new(5);
    let slices = Slices::new(&optimizer, LEN, [DType::BF16, DType::F32], Some(DType::BF16), || {
        numbers.ordinary().abs()
    });
    let [mut one, mut many] = [slices.clone(), slices];
    for step in 1..=2 {
        let update = Update { step, ..UPDATE };
        one.update(&optimizer, &Workers::alone(), update);
        many.update(&optimizer, &threads(5), update);
    }
    assert!(one.bits() == many.bits());
    // And nothing is left out where tiles and ranges of threads meet.
    for at in [0, (1 << 15) - 1, 1 << 15, LEN / 5, LEN - 1] {
        assert!(one.parameters[at].is_finite());
        let copied = one.copy.as_ref().map(|copy| copy.values()[at]);
        assert_eq!(copied, Some(half::bf16::from_f32(one.parameters[at]).to_f32()));
    }
}

#[test]
fn long_copies_are_the_same_wherever_they_begin() {
    const LEN: usize = (1 << 20) + 100;
    let optimizer = HostOptimizer::new(Adam::ADAMW).unwrap();
    for dtype in GRADIENTS {
        let mut numbers = Numbers::new(6);
        let slices = Slices::new(&optimizer, LEN, [DType::F32; 2], Some(dtype), || numbers.ordinary().abs());
        let mut expected = slices.clone();
        expected.update(&optimizer, &alone(InstructionSet::Scalar), UPDATE);
        let copied = expected.copy.as_ref().unwrap().values();
        for set in InstructionSet::available() {
            for offset in 0..3 {
                let mut slices = slices.clone();
                let mut longer = Slice::new(dtype, &vec![7.0; LEN + 4]);
                let mut states: Vec<_> = slices.states.iter_mut().map(Slice::get_mut).collect();
                let copy = part(longer.get_mut(), offset, LEN);
                let gradient = slices.gradient.get();
                optimizer
                    .update(&alone(set), UPDATE, &mut slices.parameters, gradient, &mut states, Some(copy))
                    .unwrap();
                let written = longer.values();
                assert!(written[offset..][..LEN] == copied, "{set}, {dtype}, offset {offset}");
                assert!(written[..offset].iter().chain(&written[offset + LEN..]).all(|&value| value == 7.0));
            }
        }
    }
}

fn part(slice: FloatsMut<'_>, offset: usize, len: usize) -> FloatsMut<'_> {
    match slice {
        FloatsMut::F32(values) => FloatsMut::F32(&mut values[offset..][..len]),
        FloatsMut::Bf16(values) => FloatsMut::Bf16(&mut values[offset..][..len]),
        FloatsMut::F16(values) => FloatsMut::F16(&mut values[offset..][..len]),
    }
}

#[test]
fn every_number_is_rounded_to_16_bits_alike() {
    // A descent of size 0 copies its parameters. Every 977th bit pattern, and those next to a tie.
    let optimizer = HostOptimizer::new(Sgd::default()).unwrap();
    let ties = (0..=u16::MAX).flat_map(|upper| {
        let tie = (u32::from(upper) << 16) | 0x8000;
        [tie - 1, tie, tie + 1]
    });
    let halves = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32().to_bits());
    let halfway = halves.flat_map(|bits| [bits | 0x1000, bits | 0x0FFF, bits | 0x1001]);
    let patterns = (0..=u32::MAX).step_by(977).chain(ties).chain(halfway);
    let parameters: Vec<f32> = patterns.map(f32::from_bits).collect();
    for copy in [DType::BF16, DType::F16] {
        let slices = Slices {
            gradient: Slice::new(DType::F32, &vec![0.0; parameters.len()]),
            states: vec![],
            copy: Some(Slice::new(copy, &parameters)),
            parameters: parameters.clone(),
        };
        let expected = slices.bits();
        for set in InstructionSet::available() {
            let mut slices = slices.clone();
            slices.copy = Some(Slice::new(copy, &vec![0.0; parameters.len()]));
            slices.update(&optimizer, &alone(set), Update { lr: 0.0, ..UPDATE });
            // -0 + 0 is 0 in parameters too.
            let written = slices.bits().pop();
            let same =
                |(found, expected): (&u32, &u32)| found == expected || (*found, *expected) == (0, 1 << 31);
            assert!(written.iter().flatten().zip(&expected[1]).all(same), "{set}, {copy}");
        }
    }
}
