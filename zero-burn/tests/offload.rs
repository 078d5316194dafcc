//! Optimizer state on a disk changes no bit, and what goes wrong there changes nothing at all.

mod common;

use std::fs;
use std::path::Path;

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use common::{
    LR, Odd, Weights, alter, cast, config, data_files, no_skips, restore, rows, sharded_by, weights,
    with_engines,
};
use zero_burn::{
    Adagrad, Adam, Bytes, DType, Fused, Offload, Partition, Placement, ReduceGradients, ShardOptimizer,
    Stage, Tier, WeightDecay, Zero, ZeroConfig, ZeroError,
};

const STEPS: usize = 4;

fn on_disk(config: ZeroConfig, directory: &Path, fraction: f64) -> ZeroConfig {
    let path = Some(directory.to_path_buf());
    let optimizer = Placement { tier: Tier::Nvme, path, fraction };
    // Little of both, so that shards are cut.
    let (buffer_bytes, block_bytes) = (Bytes::new(64 << 10), Bytes::new(4096));
    ZeroConfig { offload: Offload { optimizer, buffer_bytes, block_bytes, ..Offload::default() }, ..config }
}

#[test]
fn state_on_a_disk_changes_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    let adagrad =
        Adagrad { lr_decay: 0.0, initial_accumulator: 0.1, epsilon: 1e-8, weight_decay: WeightDecay::None };
    for optimizer in [Fused::new(Adam::ADAMW).unwrap(), Fused::new(adagrad).unwrap()] {
        for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
            for (compute, state) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16)] {
                for reduce in [ReduceGradients::EveryBackward, ReduceGradients::AtStep] {
                    let mut config = config(stage);
                    (config.precision.compute, config.precision.optimizer_state) = (compute, state);
                    config.reduce_gradients = Some(reduce);
                    let run = |config: &ZeroConfig| sharded_by(&optimizer, config, size, STEPS, 8, &no_skips);
                    let expected = run(&config);
                    assert!(expected.losses.iter().all(|loss| loss.is_finite()));
                    for fraction in [1.0, 0.5, 0.0] {
                        let offloaded = run(&on_disk(config.clone(), directory.path(), fraction));
                        assert_eq!(offloaded, expected, "{fraction} at {stage} on {size} ranks in {compute}");
                    }
                }
            }
        }
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_step_that_the_disk_fails_changes_nothing_on_any_rank() {
    for stage in [Stage::Zero, Stage::Two, Stage::Three] {
        let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let deadline_config = config(stage);
        with_engines(&deadline_config, 2, |comm, plain| {
            drop(plain);
            let rank = comm.rank().index();
            let config = on_disk(config(stage), directories[rank].path(), 1.0);
            let zero = Zero::new(config, comm, Device::default())?;
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
            let backward = |model: &Odd, step| zero.backward(model.loss(rows(step, 0..4, zero.device()), 0));
            backward(&model, 0)?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            let before = weights(&zero.unshard(&model)?);

            let files = data_files(directories[1].path());
            assert!(!files.is_empty());
            comm.barrier("before the damage").unwrap();
            let contents = if rank == 1 { alter(&files) } else { Vec::new() };
            backward(&model, 1)?;
            let error = optimizer.step(LR, &mut model).expect_err("the disk was altered");
            match rank {
                1 => {
                    let text = error.to_string();
                    assert!(matches!(error, ZeroError::Offload { .. }), "{text}");
                    assert!(text.contains("weight") || text.contains("bias"), "{text}");
                    assert!(text.contains(&directories[1].path().display().to_string()), "{text}");
                }
                _ => assert!(matches!(error, ZeroError::RefusedElsewhere { rank } if rank.index() == 1)),
            }
            assert_eq!(weights(&zero.unshard(&model)?), before, "{stage}");

            // With what was there, training goes on as if nothing had been.
            comm.barrier("before the repair").unwrap();
            restore(&files, &contents);
            backward(&model, 1)?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            let after = weights(&zero.unshard(&model)?);
            let undisturbed = {
                let zero = Zero::new(common::config(stage), comm, Device::default())?;
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
                for step in 0..2 {
                    zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
                    optimizer.step(LR, &mut model)?;
                }
                weights(&zero.unshard(&model)?)
            };
            assert_eq!(after, undisturbed, "{stage}");
            Ok(())
        });
    }
}

#[test]
fn what_cannot_be_offloaded_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    with_engines(&on_disk(config(Stage::Two), directory.path(), 1.0), 1, |_, zero| {
        zero.shard(Odd::new)?;
        let refused = zero.optimizer(AdamWConfig::new().build()).map(drop);
        assert!(matches!(refused, Err(ZeroError::NotOffloadable { .. })), "{refused:?}");
        Ok(())
    });
    let missing = directory.path().join("missing");
    with_engines(&on_disk(config(Stage::Two), &missing, 1.0), 1, |_, zero| {
        zero.shard(Odd::new)?;
        let error = zero.optimizer(Fused::new(Adam::ADAMW)?).map(drop).unwrap_err().to_string();
        assert!(error.contains("missing") && error.contains("directory"), "{error}");
        Ok(())
    });
}

#[test]
fn gradients_on_a_disk_change_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        for (compute, accumulate) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16)] {
            let mut config = config(stage);
            (config.precision.compute, config.precision.accumulate) = (compute, accumulate);
            config.precision.reduce = Some(DType::F32);
            config.reduce_gradients = Some(ReduceGradients::EveryBackward);
            config.clip_norm = Some(0.5);
            let expected = accumulate_twice(&config, size, &Fused::new(Adam::ADAMW).unwrap());
            for (fraction, states) in [(1.0, false), (0.4, false), (1.0, true)] {
                let path = Some(directory.path().to_path_buf());
                let gradients = Placement { tier: Tier::Nvme, path, fraction };
                let mut offloaded = on_disk(config.clone(), directory.path(), if states { 0.7 } else { 0.0 });
                offloaded.offload.gradients = gradients;
                for overlap in [true, false] {
                    offloaded.overlap = overlap;
                    let run = accumulate_twice(&offloaded, size, &Fused::new(Adam::ADAMW).unwrap());
                    assert_eq!(
                        run, expected,
                        "{fraction} at {stage} on {size} ranks in {compute}, {overlap}"
                    );
                }
                if !states {
                    offloaded.offload.optimizer = Placement::default();
                    let burn = AdamWConfig::new().with_weight_decay(0.01).build();
                    let expected = accumulate_twice(&config, size, &burn);
                    assert_eq!(accumulate_twice(&offloaded, size, &burn), expected, "{fraction} at {stage}");
                }
            }
        }
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}

/// Two backwards for each step.
fn accumulate_twice(
    config: &ZeroConfig,
    size: usize,
    optimizer: &(impl ShardOptimizer + Clone + Sync),
) -> (Vec<(f64, f64)>, Weights) {
    let mut runs = with_engines(config, size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(optimizer.clone())?;
        let share = Partition::new(6, comm.world_size()).range(comm.rank());
        let mut outcomes = Vec::new();
        for step in 0..STEPS {
            for micro in 0..2 {
                let input = cast(rows(2 * step + micro, share.clone(), zero.device()), config);
                zero.backward(model.loss(input, 0))?;
                let gradients = zero.memory()?.state.gradients;
                let all =
                    config.offload.gradients.tier == Tier::Nvme && config.offload.gradients.fraction == 1.0;
                assert!(!all || gradients == Bytes::ZERO, "{gradients} stay in memory");
            }
            let outcome = optimizer.step(LR, &mut model)?;
            outcomes.push((outcome.loss, outcome.grad_norm));
        }
        Ok((outcomes, weights(&zero.unshard(&model)?)))
    });
    runs.remove(0)
}

#[test]
fn gradients_that_the_disk_loses_are_told_and_dropped_on_all_ranks() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    with_engines(&config(Stage::Two), 2, |comm, plain| {
        drop(plain);
        let rank = comm.rank().index();
        let mut config = config(Stage::Two);
        let path = Some(directories[rank].path().to_path_buf());
        config.offload.gradients = Placement { tier: Tier::Nvme, path, fraction: 1.0 };
        let zero = Zero::new(config, comm, Device::default())?;
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        let backward = |model: &Odd, step| zero.backward(model.loss(rows(step, 0..4, zero.device()), 0));
        let before = weights(&zero.unshard(&model)?);
        backward(&model, 0)?;
        comm.barrier("before the damage").unwrap();
        if rank == 1 {
            alter(&data_files(directories[1].path()));
        }
        comm.barrier("after the damage").unwrap();
        let error = optimizer.step(LR, &mut model).expect_err("the disk was altered");
        match rank {
            1 => assert!(matches!(error, ZeroError::Offload { .. }), "{error}"),
            _ => assert!(matches!(error, ZeroError::RefusedElsewhere { .. }), "{error}"),
        }
        assert_eq!(weights(&zero.unshard(&model)?), before);
        backward(&model, 0)?;
        assert!(optimizer.step(LR, &mut model)?.applied, "what is written anew is read");
        Ok(())
    });
}

#[test]
fn tiers_that_are_left_to_the_engine_are_chosen_alike_on_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let plans = with_engines(
        &{
            let mut config = config(Stage::Three);
            let path = Some(directory.path().to_path_buf());
            config.offload.optimizer = Placement { tier: Tier::Auto, path, fraction: 1.0 };
            config
        },
        3,
        |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            zero.placement()
        },
    );
    let plan = plans[0].as_ref().expect("a tier was left to the engine");
    // All of it fits into memory, and nothing is faster.
    assert_eq!(plan.offload.optimizer.tier, Tier::Device);
    assert!(plan.seconds > 0.0 && plan.to_string().contains("optimizer"), "{plan}");
    assert!(plans.iter().all(|other| other.as_ref() == Some(plan)));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}
