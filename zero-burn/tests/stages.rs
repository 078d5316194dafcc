//! Every stage and world size computes the same training.

mod common;

use std::hash::{DefaultHasher, Hash, Hasher};

use common::{Run, config, no_skips, plain, sharded, sharded_by};
use proptest::prelude::*;
use zero_burn::{Adam, Bytes, DType, Fused, Stage, ZeroConfig};

/// Means on the CPU backend are accurate to about 1e-5.
const CLOSE: f64 = 2e-4;
const STEPS: usize = 6;

/// Different on every rank and step.
fn scattered_skips(step: usize, rank: usize) -> u32 {
    ((step * 7 + rank * 5 + step * rank) % 16) as u32
}

/// Rank 0 runs everything, the others almost nothing.
fn lopsided_skips(step: usize, rank: usize) -> u32 {
    if rank == 0 { 0 } else { 0b1111 & !(1 << (step % 4)) }
}

fn assert_bitwise(a: &Run, b: &Run, what: &str) {
    assert_eq!(a.losses, b.losses, "{what}");
    assert_eq!(a.norms, b.norms, "{what}");
    assert_eq!(a.weights, b.weights, "{what}");
}

#[test]
fn all_stages_give_the_same_bits_at_one_world_size() {
    for size in [1, 2, 3, 4] {
        let zero = sharded(&config(Stage::Zero), size, STEPS, 8, &scattered_skips);
        assert!(zero.losses.iter().all(|loss| loss.is_finite()));
        assert!(zero.norms.iter().all(|&norm| norm > 0.0));
        for stage in [Stage::One, Stage::Two, Stage::Three] {
            let run = sharded(&config(stage), size, STEPS, 8, &scattered_skips);
            assert_bitwise(&run, &zero, &format!("{stage} and stage 0 on {size} ranks"));
        }
    }
}

#[test]
fn the_fused_optimizer_gives_the_same_bits_at_all_stages() {
    let optimizer = Fused::new(Adam::ADAMW).unwrap();
    for compute in [DType::F32, DType::BF16] {
        for state in [DType::F32, DType::BF16] {
            for size in [1, 2, 3] {
                let run = |stage| {
                    let mut config = config(stage);
                    (config.precision.compute, config.precision.optimizer_state) = (compute, state);
                    // Gradients of a parameter that is used twice are rounded twice on a 16-bit wire.
                    config.precision.reduce = Some(DType::F32);
                    sharded_by(&optimizer, &config, size, STEPS, 8, &no_skips)
                };
                let zero = run(Stage::Zero);
                assert!(zero.losses.iter().all(|loss| loss.is_finite()));
                for stage in [Stage::One, Stage::Two, Stage::Three] {
                    let what = format!("{stage} and stage 0 on {size} ranks in {compute}, states in {state}");
                    assert_bitwise(&run(stage), &zero, &what);
                }
            }
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    for stage in Stage::ALL {
        let run = || sharded(&config(stage), 4, STEPS, 8, &scattered_skips);
        assert_bitwise(&run(), &run(), &format!("two runs at {stage}"));
    }
}

#[test]
fn every_world_size_agrees_with_burn_alone() {
    let reference = plain(None, 1, STEPS, 11, &no_skips);
    for size in [1, 2, 3, 5, 8] {
        for stage in Stage::ALL {
            let run = sharded(&config(stage), size, STEPS, 11, &no_skips);
            run.assert_close(&reference, CLOSE, &format!("{stage} on {size} ranks"));
        }
    }
}

#[test]
fn ranks_without_rows_take_part() {
    let reference = plain(None, 1, STEPS, 3, &no_skips);
    for stage in Stage::ALL {
        sharded(&config(stage), 5, STEPS, 3, &no_skips).assert_close(&reference, CLOSE, &format!("{stage}"));
    }
}

#[test]
fn ranks_may_run_different_blocks() {
    for (name, skips) in [("scattered", &scattered_skips as common::Skips), ("lopsided", &lopsided_skips)] {
        for size in [2, 3, 4] {
            let reference = plain(None, size, STEPS, 8, skips);
            for stage in Stage::ALL {
                let run = sharded(&config(stage), size, STEPS, 8, skips);
                run.assert_close(&reference, CLOSE, &format!("{name} skips at {stage} on {size} ranks"));
            }
        }
    }
}

#[test]
fn clipping_uses_the_norm_over_all_parameters() {
    let reference = plain(Some(0.05), 1, STEPS, 8, &no_skips);
    assert!(reference.norms.iter().any(|&norm| norm > 0.05), "something is clipped");
    for stage in Stage::ALL {
        for size in [1, 3] {
            let config = ZeroConfig { clip_norm: Some(0.05), ..config(stage) };
            let run = sharded(&config, size, STEPS, 8, &no_skips);
            run.assert_close(&reference, CLOSE, &format!("clipped {stage} on {size} ranks"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn buckets_alignment_and_persistence_change_no_bit(
        bucket in 4_u64..2000,
        alignment in 1_usize..9,
        threshold in 0_usize..60,
        size in 2_usize..5,
    ) {
        let reference = sharded(&config(Stage::Three), size, 2, 8, &scattered_skips);
        let changed = ZeroConfig {
            bucket_bytes: Bytes::new(bucket),
            persistence_threshold: threshold,
            ..config(Stage::Three)
        };
        let run = sharded(&changed, size, 2, 8, &scattered_skips);
        prop_assert_eq!(&run.losses, &reference.losses);
        prop_assert_eq!(&run.weights, &reference.weights);
        // Another alignment makes other shards, and with them another order of summing the norm, but no other value.
        let aligned = ZeroConfig { alignment: alignment.try_into().unwrap(), ..changed };
        let run = sharded(&aligned, size, 2, 8, &scattered_skips);
        prop_assert_eq!(&run.losses, &reference.losses);
        prop_assert_eq!(&run.weights, &reference.weights);
    }
    #[test]
    fn ranks_may_skip_any_blocks_at_random(seed in any::<u64>(), size in 2_usize..5, stage in 0_usize..4) {
        let skips = |step: usize, rank: usize| {
            let mut hasher = DefaultHasher::new();
            (seed, step, rank).hash(&mut hasher);
            (hasher.finish() % 16) as u32
        };
        let stage = Stage::ALL[stage];
        let reference = plain(None, size, 3, 8, &skips);
        sharded(&config(stage), size, 3, 8, &skips).assert_close(&reference, CLOSE, "random skips");
    }
}
