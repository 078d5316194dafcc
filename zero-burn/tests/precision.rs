//! Training in 16 bits: what is rounded, what is not, and what becomes of gradients that overflow.

mod common;

use std::num::NonZeroU32;

use burn::optim::AdamWConfig;
use common::{LR, Odd, Run, adamw, cast, config, no_skips, rows, sharded, weights, with_engines, world};
use zero_burn::{
    AtMinScale, DType, DynamicLossScale, LossScaling, Partition, Precision, ReduceGradients, Stage,
    StepOutcome, ZeroConfig, ZeroError,
};

const RANKS: usize = 3;
const ROWS: usize = 12;

fn precise(stage: Stage, precision: Precision) -> ZeroConfig {
    ZeroConfig { precision, loss_scale: Some(LossScaling::NONE), ..config(stage) }
}

fn compute(compute: DType) -> Precision {
    Precision { compute, ..Precision::default() }
}

/// Trains for some steps; in those that `overflows` names, the loss of rank 1 is infinite.
fn train(config: &ZeroConfig, steps: usize, overflows: &[usize]) -> (Run, Vec<StepOutcome>) {
    let mut runs = with_engines(config, RANKS, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let share = Partition::new(ROWS, world(RANKS)).range(comm.rank());
        let (mut run, mut outcomes, mut data) = (Run::new(), Vec::new(), 0);
        for step in 0..steps {
            let overflows = overflows.contains(&step);
            let loss = model.loss(cast(rows(data, share.clone(), zero.device()), config), 0);
            let factor = if overflows && comm.rank().index() == 1 { f32::INFINITY } else { 1.0 };
            zero.backward(loss * factor)?;
            let outcome = optimizer.step(LR, &mut model)?;
            assert_eq!(outcome.applied, !overflows);
            if !overflows {
                data += 1;
                run.record(&outcome);
            }
            outcomes.push(outcome);
        }
        run.weights = weights(&zero.unshard(&model)?);
        Ok((run, outcomes))
    });
    runs.swap_remove(0)
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_changes_nothing() {
    for (stage, compute_in) in Stage::ALL
        .into_iter()
        .flat_map(|stage| [DType::F32, DType::BF16, DType::F16].map(|dtype| (stage, dtype)))
    {
        let mut config = precise(stage, compute(compute_in));
        config.clip_norm = Some(0.5);
        let (never, _) = train(&config, 4, &[]);
        let (skipping, outcomes) = train(&config, 6, &[2, 3]);
        assert_eq!(never, skipping, "{stage}, {compute_in}");
        for (step, outcome) in outcomes.iter().enumerate() {
            let skipped = step.saturating_sub(1).min(2) as u64;
            assert_eq!((outcome.skipped, outcome.step), (skipped, step as u64 + 1 - skipped));
            match (&outcome.not_finite, outcome.applied) {
                (Some(found), false) => {
                    assert_eq!(found.rank.index(), 1, "{stage}, {compute_in}");
                    // The last to be used; where gradients are looked at in the step, the last of the model.
                    let first = if stage.shards_gradients() { "scale" } else { "output.bias" };
                    assert_eq!(found.parameter, first, "{stage}");
                }
                (None, true) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn sums_that_overflow_are_found_where_each_gradient_is_finite() {
    // Each rank's gradient is about half of the largest number of the type in which sums are kept.
    let precision = Precision { accumulate: DType::F16, ..compute(DType::F32) };
    let mut config = precise(Stage::Two, precision);
    config.reduce_gradients = Some(ReduceGradients::EveryBackward);
    let outcomes = with_engines(&config, RANKS, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let share = Partition::new(ROWS, world(RANKS)).range(comm.rank());
        zero.backward(model.loss(rows(0, share, zero.device()), 0) * 1e6)?;
        optimizer.step(LR, &mut model)
    });
    for outcome in outcomes {
        assert!(!outcome.applied && outcome.not_finite.is_some(), "{outcome:?}");
    }
}

#[test]
fn a_loss_scale_that_is_a_power_of_two_changes_no_bit() {
    for stage in Stage::ALL {
        let plain = sharded(&config(stage), RANKS, 4, ROWS, &no_skips);
        let scaling = Some(LossScaling::Static { scale: 4096.0 });
        let scaled = sharded(&ZeroConfig { loss_scale: scaling, ..config(stage) }, RANKS, 4, ROWS, &no_skips);
        assert_eq!(plain, scaled, "{stage}");
    }
}

#[test]
fn the_scale_falls_with_overflows_and_grows_after_its_window() {
    let dynamic = DynamicLossScale {
        initial_scale: 1024.0,
        window: NonZeroU32::new(2).unwrap(),
        hysteresis: NonZeroU32::MIN,
        ..DynamicLossScale::default()
    };
    let mut config = precise(Stage::Three, compute(DType::F16));
    config.loss_scale = Some(LossScaling::Dynamic(dynamic));
    let (_, outcomes) = train(&config, 6, &[1]);
    let scales: Vec<_> = outcomes.iter().map(|outcome| outcome.loss_scale).collect();
    assert_eq!(scales, [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]);
}

#[test]
fn an_overflow_at_the_smallest_scale_is_an_error_or_a_skip_as_configured() {
    for at_min in [AtMinScale::Error, AtMinScale::Skip] {
        let dynamic = DynamicLossScale {
            initial_scale: 1.0,
            hysteresis: NonZeroU32::MIN,
            at_min,
            ..DynamicLossScale::default()
        };
        let loss_scale = Some(LossScaling::Dynamic(dynamic));
        let config = ZeroConfig { loss_scale, ..config(Stage::Three) };
        let outcomes = with_engines(&config, 2, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0) * f32::INFINITY)?;
            let outcome = optimizer.step(LR, &mut model);
            // Either way it goes on.
            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(outcome)
        });
        for outcome in outcomes {
            match (at_min, outcome) {
                (AtMinScale::Skip, Ok(outcome)) => assert!(!outcome.applied),
                (AtMinScale::Error, Err(error @ ZeroError::ScaleAtMinimum { .. })) => {
                    let text = error.to_string();
                    assert!(
                        text.contains("`scale`") && text.contains("rank 0") && text.contains("minimum of 1"),
                        "{text}"
                    );
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn every_choice_of_types_follows_f32() {
    let types = [DType::F32, DType::BF16, DType::F16];
    for stage in Stage::ALL {
        let exact = train(&precise(stage, compute(DType::F32)), 4, &[]).0;
        for (reduce, accumulate) in types.into_iter().flat_map(|wire| types.map(|sums| (wire, sums))) {
            for policy in [ReduceGradients::EveryBackward, ReduceGradients::AtStep] {
                let precision = Precision { reduce: Some(reduce), accumulate, ..Precision::default() };
                let config = ZeroConfig { reduce_gradients: Some(policy), ..precise(stage, precision) };
                let rounded = train(&config, 4, &[]).0;
                rounded.assert_close(&exact, 3e-2, &format!("{stage}, {reduce}, {accumulate}, {policy:?}"));
            }
        }
    }
}

#[test]
fn masters_keep_what_sixteen_bits_lose() {
    for stage in Stage::ALL {
        let config = precise(stage, compute(DType::BF16));
        let outcomes = with_engines(&config, RANKS, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let before = weights(&zero.unshard(&model)?);
            // Steps far smaller than the distance between two numbers of 8 bits.
            let mut optimizer = zero.optimizer(AdamWConfig::new().with_weight_decay(0.0).build())?;
            for step in 0..3 {
                zero.backward(model.loss(cast(rows(step, 0..4, zero.device()), &config), 0))?;
                optimizer.step(1e-6, &mut model)?;
            }
            let after = weights(&zero.unshard(&model)?);
            let moved = before.iter().zip(&after).filter(|((path, before), (_, after))| {
                path.starts_with("input") && before.iter().zip(after).all(|(before, after)| before != after)
            });
            Ok(moved.count())
        });
        assert!(outcomes.iter().all(|moved| *moved == 2), "{stage}: {outcomes:?}");
    }
}

#[test]
fn optimizer_state_of_sixteen_bits_takes_half_and_follows() {
    for stage in Stage::ALL {
        let (exact, whole) = train(&precise(stage, compute(DType::F32)), 4, &[]);
        let precision = Precision { optimizer_state: DType::BF16, ..Precision::default() };
        let (rounded, half) = train(&precise(stage, precision), 4, &[]);
        rounded.assert_close(&exact, 3e-2, &format!("{stage}"));
        assert_ne!(rounded, exact);
        let bytes = |outcomes: &[StepOutcome]| outcomes.last().unwrap().memory.state.optimizer.get();
        assert_eq!(bytes(&half) * 2, bytes(&whole), "{stage}");
    }
}
