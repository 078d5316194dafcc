//! Numbers in eight bits on a device.

use cubecl::client::Client;
use proptest::prelude::*;
use zero_burn::kernels::{KernelError, Quantized, dequantize, quantize, quantize_by_team};
use zero_core::DType;

use crate::device::{Numbers, Random, client, teams};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The scales, and what comes back, as f32 at `to` of a buffer of sevens.
fn round_trip(
    client: &Client,
    numbers: &Numbers,
    from: usize,
    len: usize,
    block: usize,
    to: (DType, usize),
) -> (Vec<f32>, Vec<f32>) {
    let quantized = Quantized::empty(client, len, block).unwrap();
    quantize(client, &numbers.upload(client), from, &quantized).unwrap();
    let (dtype, at) = to;
    let target = Numbers::new(dtype, &vec![7.0; at + len + 5]).upload(client);
    dequantize(client, &quantized, &target, at).unwrap();
    let found = Numbers::download(client, &target).values();
    assert!(found[..at].iter().chain(&found[at + len..]).all(|&value| value == 7.0), "written outside");
    let scales = client.read_one(quantized.scales().clone()).unwrap();
    let scales: Vec<f32> = bytemuck::pod_collect_to_vec(&scales[..len.div_ceil(block) * 4]);
    (scales, found[at..at + len].to_vec())
}

/// That each number comes back within half a scale and roundings.
fn assert_within(values: &[f32], block: usize, (scales, found): (Vec<f32>, Vec<f32>), what: &str) {
    assert_eq!(found.len(), values.len());
    for ((values, found), scale) in values.chunks(block).zip(found.chunks(block)).zip(scales) {
        let greatest = values.iter().fold(0f32, |greatest, value| greatest.max(value.abs()));
        let off = (f64::from(scale) - f64::from(greatest) / 127.0).abs();
        assert!(off <= f64::from(greatest) * 1e-6, "{what}: scale {scale:e} for {greatest:e}");
        for (&value, &found) in values.iter().zip(found) {
            let off = (f64::from(value) - f64::from(found)).abs();
            let bound = f64::from(scale) / 2.0 + f64::from(value.abs()) * 2f64.powi(-22);
            assert!(off <= bound, "{what}: {found} for {value}, scale {scale}");
            assert!(value != 0.0 || found == 0.0);
        }
    }
}

#[test]
fn numbers_come_back_within_half_a_scale_whatever_their_type_and_place() {
    let client = client();
    for (seed, dtype) in DTYPES.into_iter().enumerate() {
        for (from, to) in [(0, 0), (4, 8), (1, 0), (3, 2)] {
            for len in [0, 1, 3, 4, 5, 255, 256, 257, 4097] {
                let numbers = Numbers::new(dtype, &Random(40 + seed as u64).many(from + len, 5.0));
                let values = &numbers.values()[from..];
                let what = format!("{len} of {dtype} from {from} to {to}");
                assert_within(
                    values,
                    256,
                    round_trip(&client, &numbers, from, len, 256, (DType::F32, to)),
                    &what,
                );
            }
        }
    }
}

#[test]
fn blocks_may_have_any_length_that_is_a_multiple_of_four() {
    let client = client();
    let numbers = Numbers::new(DType::F32, &Random(44).many(10_001, 1.0));
    for block in [4, 8, 12, 100, 1024, 4096, 65536] {
        let found = round_trip(&client, &numbers, 0, 10_001, block, (DType::F32, 0));
        assert_within(&numbers.values(), block, found, &format!("blocks of {block}"));
    }
    for block in [0, 2, 6, 65540] {
        let error = Quantized::empty(&client, 8, block).unwrap_err();
        assert_eq!(error, KernelError::Block { block, limit: 65536 });
    }
}

#[test]
fn teams_of_any_size_quantize_alike() {
    let client = client();
    let numbers = Numbers::new(DType::BF16, &Random(48).many(5001, 1.0));
    let buffer = numbers.upload(&client);
    for block in [4, 256, 1000] {
        let quantized = |team| {
            let to = Quantized::empty(&client, 5000, block).unwrap();
            quantize_by_team(&client, &buffer, 1, &to, team).unwrap();
            let bytes = |handle: &cubecl::server::Handle| client.read_one(handle.clone()).unwrap().to_vec();
            (bytes(to.codes())[..5000].to_vec(), bytes(to.scales())[..5000usize.div_ceil(block) * 4].to_vec())
        };
        let alone = quantized(1);
        for team in teams(&client) {
            assert!(quantized(team) == alone, "teams of {team}, blocks of {block}");
        }
    }
}

#[test]
fn what_comes_back_narrower_is_the_nearest_of_its_type() {
    let client = client();
    let numbers = Numbers::new(DType::F32, &Random(45).many(1003, 9.0));
    for at in [0, 3] {
        let (_, exact) = round_trip(&client, &numbers, 0, 1003, 256, (DType::F32, 0));
        for dtype in [DType::BF16, DType::F16] {
            let (_, found) = round_trip(&client, &numbers, 0, 1003, 256, (dtype, at));
            assert_eq!(found, Numbers::new(dtype, &exact).values());
        }
    }
}

#[test]
fn zeros_stay_zeros_and_large_and_small_blocks_keep_their_accuracy() {
    let client = client();
    for scale in [0.0, 1e-30, 1e-20, 1e20, 3e38] {
        let numbers = Numbers::new(DType::F32, &Random(46).many(700, scale));
        let found = round_trip(&client, &numbers, 0, 700, 256, (DType::F32, 0));
        assert_within(&numbers.values(), 256, found, &format!("around {scale}"));
    }
    let (scales, found) =
        round_trip(&client, &Numbers::new(DType::F32, &[1e-36, -1e-37]), 0, 2, 256, (DType::F32, 0));
    assert_eq!((scales, found), (vec![0.0], vec![0.0, 0.0]));
}

#[test]
fn a_block_with_a_number_that_is_not_finite_becomes_nan_and_no_other() {
    let client = client();
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut values = Random(47).many(600, 1.0);
        values[300] = bad;
        let numbers = Numbers::new(DType::F32, &values);
        let (scales, found) = round_trip(&client, &numbers, 0, 600, 256, (DType::F32, 0));
        assert!(scales[1].is_nan());
        assert!(found[256..512].iter().all(|value| value.is_nan()));
        assert!(found[..256].iter().chain(&found[512..]).all(|value| value.is_finite()));
    }
}

#[test]
fn what_was_quantized_is_words_and_scales_that_can_be_sent() {
    let client = client();
    let values = [1.0, -127.0, 126.4, 0.0, 127.0, -1.0];
    let quantized = Quantized::empty(&client, 6, 4).unwrap();
    quantize(&client, &Numbers::new(DType::F32, &values).upload(&client), 0, &quantized).unwrap();
    let codes = client.read_one(quantized.codes().clone()).unwrap();
    assert_eq!(codes.iter().map(|&code| code as i8).collect::<Vec<_>>(), [1, -127, 126, 0, 127, -1, 0, 0]);
    let (codes, scales) = (quantized.codes().clone(), quantized.scales().clone());
    let received = Quantized::from_parts(codes.clone(), scales.clone(), 6, 4).unwrap();
    let target = Numbers::new(DType::F32, &[0.0; 6]).upload(&client);
    dequantize(&client, &received, &target, 0).unwrap();
    assert_eq!(Numbers::download(&client, &target).values(), [1.0, -127.0, 126.0, 0.0, 127.0, -1.0]);

    let error = Quantized::from_parts(codes, scales, 100, 4).unwrap_err();
    assert!(matches!(error, KernelError::Short { .. }), "{error}");
    let error = quantize(&client, &target, 1, &quantized).unwrap_err();
    assert!(matches!(error, KernelError::OutOfRange { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_numbers_come_back_within_half_a_scale(
        values in prop::collection::vec(-1e30f32..1e30, 1..1000),
        words in 1usize..100,
    ) {
        let numbers = Numbers::new(DType::F32, &values);
        let found = round_trip(&client(), &numbers, 0, values.len(), 4 * words, (DType::F32, 0));
        assert_within(&values, 4 * words, found, "any");
    }
}
