//! Several backwards before one step.

mod common;

use common::{LR, Odd, Run, adamw, config, plain, rows, weights, with_engines};
use proptest::prelude::*;
use zero_burn::{Bytes, DType, LossScaling, Partition, Precision, ReduceGradients, Stage, ZeroConfig};

const STEPS: usize = 4;
const BATCH: usize = 12;

/// Trains on micro-batches of `sizes` rows each.
fn accumulated(stage: Stage, size: usize, sizes: &[usize]) -> Run {
    accumulated_with(&config(stage), size, sizes)
}

fn accumulated_with(config: &ZeroConfig, size: usize, sizes: &[usize]) -> Run {
    assert_eq!(sizes.iter().sum::<usize>(), BATCH);
    let mut runs = with_engines(config, size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let mut run = Run::new();
        for step in 0..STEPS {
            let mut begin = 0;
            for &rows_in_all in sizes {
                let share = Partition::new(rows_in_all, comm.world_size()).range(comm.rank());
                let share = begin + share.start..begin + share.end;
                begin += rows_in_all;
                if share.is_empty() {
                    zero.skip_backward()?;
                } else {
                    let loss = model.loss(rows(step, share.clone(), zero.device()), 0);
                    zero.backward_weighted(loss, share.len() as f64)?;
                }
            }
            let outcome = optimizer.step(LR, &mut model)?;
            if let Some(limit) = config.clip_norm {
                assert!(outcome.grad_norm * outcome.clip_factor <= limit, "{outcome:?}");
            }
            run.record(&outcome);
        }
        run.weights = weights(&zero.unshard(&model)?);
        Ok(run)
    });
    runs.remove(0)
}

#[test]
fn micro_batches_add_up_to_the_whole_batch() {
    let reference = plain(None, 1, STEPS, BATCH, &common::no_skips);
    for stage in Stage::ALL {
        for size in [1, 2, 3] {
            for sizes in [&[BATCH][..], &[6, 6], &[1, 8, 3]] {
                let run = accumulated(stage, size, sizes);
                run.assert_close(&reference, 2e-4, &format!("{sizes:?} at {stage} on {size} ranks"));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is accumulated, reduced when, sent as what and in buckets of any size: a step is that of the whole batch.
    #[test]
    fn any_way_to_a_step_is_one_large_batch(
        (stage, size) in (0..4_usize, 1..4_usize),
        cuts in proptest::collection::vec(0..=BATCH, 0..3),
        bucket_bytes in prop_oneof![Just(4_u64), 40..2000_u64, Just(1 << 30)],
        (at_step, overlap) in (any::<bool>(), any::<bool>()),
        (wire, sums) in (0..3_usize, 0..3_usize),
        clip in prop_oneof![Just(None), (0.01..1.0).prop_map(Some)],
    ) {
        let types = [DType::F32, DType::BF16, DType::F16];
        let exact = types[wire] == DType::F32 && types[sums] == DType::F32;
        let policy = if at_step { ReduceGradients::AtStep } else { ReduceGradients::EveryBackward };
        let config = ZeroConfig {
            bucket_bytes: Bytes::new(bucket_bytes),
            reduce_gradients: Some(policy),
            overlap,
            clip_norm: clip,
            precision: Precision { reduce: Some(types[wire]), accumulate: types[sums], ..Precision::default() },
            loss_scale: Some(LossScaling::NONE),
            ..config(Stage::ALL[stage])
        };
        let mut cuts = cuts;
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([BATCH]);
        let sizes: Vec<_> = ends.scan(0, |begin, end| Some(end - std::mem::replace(begin, end))).collect();
        let run = accumulated_with(&config, size, &sizes);
        let reference = plain(clip, 1, STEPS, BATCH, &common::no_skips);
        run.assert_close(&reference, if exact { 2e-4 } else { 5e-2 }, "one large batch");
    }
}

#[test]
fn shared_layers_and_two_losses_add_up() {
    for stage in Stage::ALL {
        let norms = with_engines(&config(stage), 2, |_comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            // The same layer three times in one pass, and two losses of one forward each.
            let input = model.input.forward(rows(0, 0..4, zero.device()));
            let thrice = (0..3).fold(input, |x, _| model.shared.forward(x).tanh());
            let second =
                model.shared.forward(model.input.forward(rows(1, 0..4, zero.device()))).square().mean();
            zero.backward(thrice.square().mean())?;
            zero.backward(second)?;
            Ok(optimizer.step(LR, &mut model)?.grad_norm)
        });
        let device = burn::tensor::Device::default().autodiff();
        let model = zero_burn::materialize(&device, common::SEED, Odd::new);
        let input = model.input.forward(rows(0, 0..4, &device));
        let thrice = (0..3).fold(input, |x, _| model.shared.forward(x).tanh());
        let second = model.shared.forward(model.input.forward(rows(1, 0..4, &device))).square().mean();
        let gradients = ((thrice.square().mean() + second) / 2.0).backward();
        let square = |norm: f32| f64::from(norm).powi(2);
        let mut expected = 0.0;
        for layer in [&model.input, &model.shared] {
            expected +=
                square(layer.weight.grad(&gradients).unwrap().square().sum().sqrt().into_scalar::<f32>());
            let bias = layer.bias.as_ref().unwrap();
            expected += square(bias.grad(&gradients).unwrap().square().sum().sqrt().into_scalar::<f32>());
        }
        let expected = expected.sqrt();
        for norm in norms {
            assert!((norm - expected).abs() < 1e-4 * expected, "{norm} instead of {expected} at {stage}");
        }
    }
}
