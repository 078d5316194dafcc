//! Master weights on a disk change no bit, and are whole whoever asks and whatever fails.

mod common;

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::Device;
use common::{
    LR, Odd, Run, WIDTH, alter, cast, config, data_files, no_skips, restore, rows, sharded_by, weights,
    whole, with_engines,
};
use zero_burn::{
    Adam, Bytes, DType, Fused, MemorySetup, Offload, OptimizerCost, Placement, Rank, ReduceGradients, Sgd,
    Stage, Tier, WeightDecay, Zero, ZeroConfig, ZeroError,
};

const STEPS: usize = 4;

fn in_16_bits(stage: Stage, compute: DType) -> ZeroConfig {
    let mut config = config(stage);
    config.precision.compute = compute;
    config.loss_scale = Some(zero_burn::LossScaling::Static { scale: 1.0 });
    config
}

/// With the last part of states and of masters on disks, little of both so that shards are cut.
fn on_disk(config: ZeroConfig, directory: &Path, states: f64, masters: f64) -> ZeroConfig {
    let placed = |fraction| Placement { tier: Tier::Nvme, path: Some(directory.to_path_buf()), fraction };
    let (buffer_bytes, block_bytes) = (Bytes::new(64 << 10), Bytes::new(4096));
    let (optimizer, parameters) = (placed(states), placed(masters));
    let offload = Offload { optimizer, parameters, buffer_bytes, block_bytes, ..config.offload.clone() };
    ZeroConfig { offload, ..config }
}

fn adam() -> Fused {
    Fused::new(Adam::ADAMW).unwrap()
}

/// Keeps no state, so that masters are alone on the disk.
fn sgd() -> Fused {
    let weight_decay = WeightDecay::L2(0.01);
    Fused::new(Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay }).unwrap()
}

fn step(zero: &Zero, model: &Odd, at: usize) -> Result<(), ZeroError> {
    zero.backward(model.loss(cast(rows(at, 0..4, zero.device()), zero.config()), 0))
}

#[test]
fn masters_on_a_disk_change_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        for (compute, state) in [(DType::BF16, DType::F32), (DType::F16, DType::BF16)] {
            for (optimizer, reduce) in
                [(adam(), ReduceGradients::EveryBackward), (sgd(), ReduceGradients::AtStep)]
            {
                let mut config = in_16_bits(stage, compute);
                config.precision.optimizer_state = state;
                config.reduce_gradients = Some(reduce);
                let run = |config: &ZeroConfig| sharded_by(&optimizer, config, size, STEPS, 8, &no_skips);
                let expected = run(&config);
                assert!(expected.losses.iter().all(|loss| loss.is_finite()));
                for (states, masters) in [(1.0, 1.0), (1.0, 0.3), (0.6, 0.6), (0.0, 0.0)] {
                    let mut offloaded = on_disk(config.clone(), directory.path(), states, masters);
                    if reduce == ReduceGradients::EveryBackward && states == 1.0 {
                        offloaded.offload.gradients = offloaded.offload.optimizer.clone();
                    }
                    assert_eq!(
                        run(&offloaded),
                        expected,
                        "{states} and {masters} at {stage} on {size} ranks in {compute}"
                    );
                }
            }
        }
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn masters_may_be_on_another_disk_than_states_and_update_beside_compute() {
    let [states, masters] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for stage in Stage::ALL {
        let mut config = in_16_bits(stage, DType::BF16);
        (config.offload.delayed_update, config.offload.exact_steps) = (true, 1);
        let run = |config: &ZeroConfig| {
            with_engines(config, 2, |_, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adam())?;
                let mut run = Run::new();
                for at in 0..STEPS {
                    step(&zero, &model, at)?;
                    run.record(&optimizer.step(LR, &mut model)?);
                }
                assert!(matches!(zero.unshard_to(&model, Rank::ROOT), Err(ZeroError::UpdatePending)));
                optimizer.flush()?;
                run.weights = weights(&whole(&zero, &model)?);
                Ok(run)
            })
        };
        let mut offloaded = on_disk(config.clone(), states.path(), 0.9, 0.5);
        offloaded.offload.parameters.path = Some(masters.path().to_path_buf());
        assert_eq!(run(&offloaded), run(&config), "{stage}");
    }
}

#[test]
fn a_step_that_the_disk_of_masters_fails_changes_nothing_on_any_rank() {
    for (stage, fraction) in [(Stage::Zero, 1.0), (Stage::Two, 0.5), (Stage::Three, 1.0), (Stage::Three, 0.5)]
    {
        let disks = [(); 2].map(|()| [(); 2].map(|()| tempfile::tempdir().unwrap()));
        with_engines(&config(stage), 2, |comm, plain| {
            drop(plain);
            let rank = comm.rank().index();
            let [states, masters] = disks[rank].each_ref().map(|disk| disk.path());
            let mut config = on_disk(in_16_bits(stage, DType::BF16), states, 1.0, fraction);
            config.offload.parameters.path = Some(masters.to_path_buf());
            let zero = Zero::new(config, comm, Device::default())?;
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adam())?;
            step(&zero, &model, 0)?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            let before = weights(&whole(&zero, &model)?);

            let files = data_files(disks[1][1].path());
            assert!(!files.is_empty());
            comm.barrier("before the damage").unwrap();
            let contents = if rank == 1 { alter(&files) } else { Vec::new() };
            comm.barrier("after the damage").unwrap();
            let told = |error: ZeroError, during: &str| {
                let text = error.to_string();
                match rank {
                    1 => {
                        assert!(matches!(error, ZeroError::Offload { .. }), "{text}");
                        assert!(text.contains("weight") || text.contains("bias"), "{text}");
                        assert!(text.starts_with(during), "{text}");
                        assert!(text.contains(&masters.display().to_string()), "{text}");
                    }
                    _ => assert!(matches!(error, ZeroError::RefusedElsewhere { rank } if rank.index() == 1)),
                }
            };
            step(&zero, &model, 1)?;
            let error = optimizer.step(LR, &mut model).expect_err("the disk was altered");
            told(error, "updating parameters");
            if stage != Stage::Zero {
                let error = zero.unshard_to(&model, Rank::ROOT).map(drop).expect_err("the disk was altered");
                told(error, "reading master weights");
            }
            comm.barrier("before the repair").unwrap();
            restore(&files, &contents);
            comm.barrier("after the repair").unwrap();
            assert_eq!(weights(&whole(&zero, &model)?), before, "{stage}");
            step(&zero, &model, 1)?;
            assert!(optimizer.step(LR, &mut model)?.applied);

            let after = weights(&whole(&zero, &model)?);

            let zero = Zero::new(in_16_bits(stage, DType::BF16), comm, Device::default())?;
            let mut undisturbed = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adam())?;
            for at in 0..2 {
                step(&zero, &undisturbed, at)?;
                optimizer.step(LR, &mut undisturbed)?;
            }
            assert_eq!(after, weights(&zero.unshard(&undisturbed)?), "{stage}");
            Ok(())
        });
    }
}

#[test]
fn whole_masters_are_for_who_can_read_them() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        let plain = in_16_bits(stage, DType::BF16);
        let expected = with_engines(&plain, size, |_, zero| {
            let model = zero.shard(Odd::new)?;
            let at_last = zero.unshard_to(&model, Rank::new(size - 1))?;
            let is_last = zero.communicator().rank().index() == size - 1;
            assert_eq!(at_last.is_some(), is_last);
            let expected = weights(&zero.unshard(&model)?);
            assert!(at_last.is_none_or(|model| weights(&model) == expected));
            Ok(expected)
        });
        with_engines(&config(stage), size, |comm, zero| {
            let model = zero.shard(Odd::new)?;
            let at_first = zero.unshard_to(&model, Rank::ROOT)?;
            assert_eq!(at_first.is_some(), comm.rank() == Rank::ROOT);
            let expected = weights(&zero.unshard(&model)?);
            assert!(at_first.is_none_or(|model| weights(&model) == expected), "{stage} in f32");
            Ok(())
        });
        with_engines(&on_disk(plain, directory.path(), 1.0, 0.7), size, |_, zero| {
            let model = zero.shard(Odd::new)?;
            let is_whole_here = size == 1 || stage == Stage::Zero;
            match zero.unshard(&model) {
                Ok(here) => assert!(is_whole_here && weights(&here) == expected[0], "{stage}"),
                Err(ZeroError::MastersOnDisk) => assert!(!is_whole_here, "{stage}"),
                Err(other) => return Err(other),
            }
            assert_eq!(weights(&whole(&zero, &model)?), expected[0], "{stage} on {size} ranks");

            // A record is made by one rank alone: it says that it is not whole, or is.
            let record = model.clone().into_record();
            match zero.check() {
                Ok(()) => {
                    let loaded = Odd::new(&Device::default()).load_record(record);
                    assert!(is_whole_here && weights(&loaded) == expected[0], "{stage}");
                }
                Err(ZeroError::MastersOnDisk) => assert!(!is_whole_here, "{stage}"),
                Err(other) => return Err(other),
            }
            zero.check()?;

            let refused = zero.unshard_to(&model, Rank::new(size)).map(drop);
            assert!(matches!(refused, Err(ZeroError::NoSuchRank { .. })), "{refused:?}");
            Ok(())
        });
    }
}

#[test]
fn ranks_that_name_different_roots_are_told() {
    let directory = tempfile::tempdir().unwrap();
    for stage in [Stage::Zero, Stage::Three] {
        let config = on_disk(in_16_bits(stage, DType::BF16), directory.path(), 1.0, 1.0);
        with_engines(&config, 2, |comm, zero| {
            let model = zero.shard(Odd::new)?;
            let error = zero.unshard_to(&model, comm.rank()).map(drop).expect_err("each names itself");
            assert!(error.to_string().contains("rank 1"), "{error}");
            Ok(())
        });
    }
}

#[test]
fn masters_stay_on_the_disk_while_the_layout_changes() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2].map(|size| (stage, size))) {
        let run = |config: &ZeroConfig| {
            with_engines(config, size, |_, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adam())?;
                let mut run = Run::new();
                for at in 0..2 * STEPS {
                    model = match at {
                        2 => zero.freeze(model, "blocks.*")?,
                        4 => zero.unfreeze(model, "*")?,
                        5 => zero.extend(model, |mut model, device| {
                            model.blocks.push(LinearConfig::new(WIDTH, WIDTH).init(device));
                            model
                        })?,
                        _ => model,
                    };
                    step(&zero, &model, at)?;
                    run.record(&optimizer.step(LR, &mut model)?);
                }
                run.weights = weights(&whole(&zero, &model)?);
                Ok(run)
            })
        };
        let plain = in_16_bits(stage, DType::BF16);
        assert_eq!(run(&on_disk(plain.clone(), directory.path(), 1.0, 0.8)), run(&plain), "{stage} {size}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn masters_outlive_an_optimizer_whose_update_is_under_way() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = on_disk(in_16_bits(Stage::Three, DType::BF16), directory.path(), 1.0, 1.0);
    (config.offload.delayed_update, config.offload.exact_steps) = (true, 0);
    with_engines(&config, 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let before = weights(&whole(&zero, &model)?);
        let mut optimizer = zero.optimizer(adam())?;
        step(&zero, &model, 0)?;
        optimizer.step(LR, &mut model)?;
        drop(optimizer);
        assert_eq!(weights(&whole(&zero, &model)?), before);
        let mut optimizer = zero.optimizer(adam())?;
        step(&zero, &model, 1)?;
        optimizer.step(LR, &mut model)?;
        optimizer.flush()?;
        assert_ne!(weights(&whole(&zero, &model)?), before);
        Ok(())
    });
}

#[test]
fn masters_on_a_disk_take_no_memory() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        let plain = in_16_bits(stage, DType::BF16);
        for config in [plain.clone(), on_disk(plain.clone(), directory.path(), 1.0, 1.0)] {
            with_engines(&config, size, |comm, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adam())?;
                for at in 0..2 {
                    step(&zero, &model, at)?;
                    optimizer.step(LR, &mut model)?;
                }
                step(&zero, &model, 2)?;
                let setup = MemorySetup::new(&config, OptimizerCost::ADAMW);
                let planned = setup.plan(&*zero.layout()?, comm.rank()).state.parameters;
                assert_eq!(zero.memory()?.state.parameters, planned, "{stage} on {size} ranks");
                Ok(())
            });
        }
    }
}

#[test]
fn a_disk_that_is_missing_is_told_on_all_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let config = on_disk(in_16_bits(Stage::Three, DType::BF16), &missing, 1.0, 1.0);
    let failed = zero_burn::LocalWorld::new(common::world(2)).run(|comm| -> Result<(), ZeroError> {
        let mut config = config.clone();
        if comm.rank() == Rank::ROOT {
            config.offload.parameters.path = Some(directory.path().to_path_buf());
        }
        let zero = Zero::new(config, &comm, Device::default())?;
        let error = zero.shard(Odd::new).map(drop).expect_err("a disk is missing");
        assert!(error.to_string().contains("missing"), "{error}");
        Err(error)
    });
    assert!(failed.is_err());
}

/// What another thread of a rank sees of a parameter while steps run is of one step, and no call of the training thread is
/// told of it.
#[test]
fn who_asks_for_masters_while_steps_run_gets_those_of_one_step() {
    let directory = tempfile::tempdir().unwrap();
    for delayed in [false, true] {
        let mut config = on_disk(in_16_bits(Stage::Zero, DType::BF16), directory.path(), 1.0, 0.5);
        (config.offload.delayed_update, config.offload.exact_steps) = (delayed, 0);
        with_engines(&config, 1, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adam())?;
            let other = model.clone();
            let is_over = std::sync::atomic::AtomicBool::new(false);
            let seen = std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut seen = Vec::new();
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        match zero.unshard(&other) {
                            Ok(whole) => seen.push(weights(&whole)),
                            Err(ZeroError::UpdatePending) if delayed => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                    seen
                });
                let mut after = vec![weights(&zero.unshard(&model).unwrap())];
                for at in 0..30 {
                    step(&zero, &model, at).unwrap();
                    optimizer.step(LR, &mut model).unwrap();
                    optimizer.flush().unwrap();
                    after.push(weights(&zero.unshard(&model).unwrap()));
                }
                is_over.store(true, std::sync::atomic::Ordering::Relaxed);
                let seen = reader.join().unwrap();
                let is_of_one_step = |weights: &common::Weights| {
                    (0..weights.len()).all(|at| after.iter().any(|after| after[at] == weights[at]))
                };
                assert!(seen.iter().all(is_of_one_step), "{delayed}");
                seen.len()
            });
            assert!(seen > 0);
            Ok(())
        });
    }
}

#[test]
fn processes_keep_masters_on_their_disks() {
    let directory = tempfile::tempdir().unwrap();
    for stage in [Stage::Two, Stage::Three] {
        let train = |config: &ZeroConfig| {
            let body = |comm: &std::sync::Arc<dyn zero_burn::Communicator>| {
                let zero = Zero::new(config.clone(), comm, Device::default())?;
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adam())?;
                let mut run = Run::new();
                for at in 0..STEPS {
                    step(&zero, &model, at)?;
                    run.record(&optimizer.step(LR, &mut model)?);
                }
                run.weights = weights(&whole(&zero, &model)?);
                Ok(run)
            };
            common::processes(config, 3, &body, |rank| rank / 2)
        };
        let plain = in_16_bits(stage, DType::BF16);
        assert_eq!(train(&on_disk(plain.clone(), directory.path(), 1.0, 0.7)), train(&plain), "{stage}");
    }
}
