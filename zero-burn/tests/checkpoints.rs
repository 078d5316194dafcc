//! A run that is taken up from a checkpoint is the run that was not interrupted, whoever saved it.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdaGradConfig, AdamWConfig, LionConfig, RmsPropConfig, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::Device;
use common::{INPUT, LR, Odd, Run, WIDTH, adamw, cast, config, rows, weights, whole, with_engines, world};
use zero_burn::{
    Adagrad, Adam, Allow, Bytes, CheckpointError, Checkpoints, DType, Fused, GroupRate, LoadOptions,
    LocalStorage, LocalWorld, MemoryStorage, NameMap, Notes, Offload, Partition, Placement, PublishedWeights,
    SaverOptions, Sgd, ShardOptimizer, Stage, Storage, Tier, WeightDecay, Zero, ZeroConfig, ZeroError,
    ZeroOptimizer, write_record,
};
use zero_checkpoint::{
    Checkpoint, ConsolidateOptions, Solo, Target, Wanted, WantedParameter, WantedState, consolidate,
};

const ROWS: usize = 8;
const STEPS: usize = 6;

fn memory() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new())
}

fn adam() -> Fused {
    Fused::new(Adam::ADAMW).unwrap()
}

/// One rank of a run.
struct Learner<O: ShardOptimizer> {
    zero: Zero,
    model: Odd,
    optimizer: ZeroOptimizer<O>,
    checkpoints: Checkpoints,
    run: Run,
}

impl<O: ShardOptimizer + Clone> Learner<O> {
    fn new(zero: Zero, optimizer: &O, storage: &Arc<dyn Storage>) -> Result<Self, ZeroError> {
        let model = zero.shard(Odd::new)?;
        let optimizer = zero.optimizer(optimizer.clone())?;
        let checkpoints = zero.checkpoints(Arc::clone(storage), SaverOptions::default())?;
        Ok(Self { zero, model, optimizer, checkpoints, run: Run::new() })
    }

    fn step(&mut self, at: usize) -> Result<(), ZeroError> {
        let comm = self.zero.communicator();
        let share = Partition::new(ROWS, comm.world_size()).range(comm.rank());
        let rows = cast(rows(at, share.clone(), self.zero.device()), self.zero.config());
        self.zero.backward_weighted(self.model.loss(rows, 0), share.len() as f64)?;
        self.run.record(&self.optimizer.step(LR, &mut self.model)?);
        Ok(())
    }

    fn finish(mut self) -> Result<Run, ZeroError> {
        self.optimizer.flush()?;
        self.run.weights = weights(&whole(&self.zero, &self.model)?);
        Ok(self.run)
    }
}

/// Runs steps, and saves after that many, if any; the steps before it are loaded.
fn run(
    config: &ZeroConfig,
    size: usize,
    optimizer: &(impl ShardOptimizer + Clone + Sync),
    storage: &Arc<dyn Storage>,
    steps: std::ops::Range<usize>,
    save_at: Option<usize>,
) -> Run {
    let mut runs = with_engines(config, size, |_, zero| {
        let mut learner = Learner::new(zero, optimizer, storage)?;
        if steps.start > 0 {
            let loaded = learner.checkpoints.load(&mut learner.optimizer, None, &LoadOptions::default())?;
            assert_eq!(loaded.step, learner.optimizer.steps());
            assert_eq!(loaded.notes.data, serde_json::json!({ "step": steps.start }));
        }
        for at in steps.clone() {
            learner.step(at)?;
            if save_at == Some(at + 1) {
                let data = serde_json::json!({ "step": at + 1 });
                learner.checkpoints.save(&mut learner.optimizer, &Notes { data, ..Notes::default() })?;
            }
        }
        learner.finish()
    });
    let first = runs.remove(0);
    // By their text, for skipped steps have a norm that is NaN.
    assert!(runs.iter().all(|other| format!("{other:?}") == format!("{first:?}")));
    first
}

fn check_resume(
    config: &ZeroConfig,
    size: usize,
    optimizer: &(impl ShardOptimizer + Clone + Sync),
    what: &str,
) {
    let storage = memory();
    let half = STEPS / 2;
    let mut expected = run(config, size, optimizer, &storage, 0..STEPS, Some(half));
    let resumed = run(config, size, optimizer, &storage, half..STEPS, None);
    expected.losses.drain(..half);
    expected.norms.drain(..half);
    assert_eq!(format!("{resumed:?}"), format!("{expected:?}"), "{what}");
}

fn in_16_bits(mut config: ZeroConfig, compute: DType, state: DType) -> ZeroConfig {
    (config.precision.compute, config.precision.optimizer_state) = (compute, state);
    config
}

fn on_disk(mut config: ZeroConfig, directory: &Path, states: f64, masters: f64) -> ZeroConfig {
    let placed = |fraction| Placement { tier: Tier::Nvme, path: Some(directory.to_path_buf()), fraction };
    let (buffer_bytes, block_bytes) = (Bytes::new(64 << 10), Bytes::new(4096));
    config.offload = Offload { optimizer: placed(states), buffer_bytes, block_bytes, ..config.offload };
    if masters > 0.0 {
        config.offload.parameters = placed(masters);
    }
    config
}

#[test]
fn a_resumed_run_is_the_one_that_was_not_interrupted() {
    let directory = tempfile::tempdir().unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        let plain = config(stage);
        let bf16 = in_16_bits(plain.clone(), DType::BF16, DType::F32);
        let f16 = in_16_bits(plain.clone(), DType::F16, DType::BF16);
        let mut delayed = plain.clone();
        (delayed.offload.delayed_update, delayed.offload.exact_steps) = (true, 1);
        let configs = [
            ("f32", plain.clone()),
            ("bf16", bf16.clone()),
            ("f16, whose first steps overflow", f16),
            ("states on a disk", on_disk(plain.clone(), directory.path(), 0.7, 0.0)),
            ("masters on a disk", on_disk(bf16, directory.path(), 1.0, 0.6)),
            ("updates beside compute", delayed),
        ];
        for (what, config) in configs {
            check_resume(&config, size, &adam(), &format!("{what} at {stage} on {size} ranks"));
        }
        let config = in_16_bits(plain, DType::F32, DType::BF16);
        check_resume(&config, size, &adamw().build(), &format!("Burn's AdamW at {stage} on {size} ranks"));
    }
}

#[test]
fn every_optimizer_is_taken_up() {
    let size = 2;
    let config = config(Stage::Three);
    let adagrad =
        Adagrad { lr_decay: 0.0, initial_accumulator: 0.1, epsilon: 1e-8, weight_decay: WeightDecay::None };
    let sgd = |momentum| Sgd { momentum, dampening: 0.0, nesterov: false, weight_decay: WeightDecay::None };
    check_resume(&config, size, &Fused::new(adagrad).unwrap(), "Adagrad");
    check_resume(&config, size, &Fused::new(sgd(0.9)).unwrap(), "momentum");
    check_resume(&config, size, &Fused::new(sgd(0.0)).unwrap(), "no state");
    check_resume(&config, size, &AdaGradConfig::new().with_lr_decay(0.1).build(), "Burn's Adagrad");
    check_resume(&config, size, &LionConfig::new().build(), "Burn's Lion");
    check_resume(&config, size, &RmsPropConfig::new().build(), "Burn's RmsProp");
    check_resume(&config, size, &SgdConfig::new().build(), "Burn's Sgd");
}

/// All numbers of the newest checkpoint, by parameter and state.
fn numbers(storage: &Arc<dyn Storage>) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open_latest(Arc::clone(storage)).unwrap();
    let manifest = checkpoint.manifest().clone();
    let numel = |shape: &[usize]| shape.iter().product::<usize>();
    let mut all: Vec<Vec<(String, DType, Vec<u8>)>> = manifest
        .parameters
        .iter()
        .map(|parameter| {
            let values = (String::from("values"), DType::F32, vec![0; 4 * numel(&parameter.shape)]);
            let states = parameter.states.iter().map(|(name, state)| {
                (name.clone(), state.dtype, vec![0; state.dtype.size() * numel(&parameter.shape)])
            });
            std::iter::once(values).chain(states).collect()
        })
        .collect();
    let parameters = manifest.parameters.iter().zip(&mut all).map(|(parameter, tensors)| {
        let mut tensors = tensors.iter_mut();
        let (_, dtype, values) = tensors.next().unwrap();
        WantedParameter {
            spec: parameter.spec(),
            layout: parameter.layout,
            range: 0..numel(&parameter.shape),
            values: Target::bytes(*dtype, values),
            states: tensors
                .map(|(name, dtype, bytes)| WantedState {
                    name: name.clone(),
                    target: Target::bytes(*dtype, bytes),
                })
                .collect(),
        }
    });
    let wanted = Wanted { parameters: parameters.collect() };
    checkpoint.load(wanted, &LoadOptions::default(), &Solo).unwrap();
    let named = manifest.parameters.iter().zip(all).flat_map(|(parameter, tensors)| {
        tensors.into_iter().map(|(what, _, bytes)| (format!("{} {what}", parameter.name), bytes))
    });
    named.collect()
}

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Configurations of every stage, and some with state on a disk.
fn configs(directory: &Path) -> Vec<(String, ZeroConfig)> {
    let stages = Stage::ALL.map(|stage| (stage.to_string(), config(stage)));
    let offloaded = on_disk(config(Stage::Two), directory, 0.5, 0.0);
    stages.into_iter().chain([(String::from("stage 2 on a disk"), offloaded)]).collect()
}

#[test]
fn any_world_size_and_stage_takes_up_any_other() {
    let directory = tempfile::tempdir().unwrap();
    for (saved_as, saving) in configs(directory.path()) {
        for saved_by in SIZES {
            let storage = memory();
            run(&saving, saved_by, &adam(), &storage, 0..2, Some(2));
            let expected = numbers(&storage);
            assert!(expected.values().flatten().any(|byte| *byte != 0));
            for (loaded_as, loading) in configs(directory.path()) {
                for loaded_by in SIZES {
                    let again = memory();
                    with_engines(&loading, loaded_by, |_, zero| {
                        let mut from = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
                        let mut to = zero.checkpoints(Arc::clone(&again), SaverOptions::default())?;
                        zero.shard(Odd::new)?;
                        let mut optimizer = zero.optimizer(adam())?;
                        from.load(&mut optimizer, Some(2), &LoadOptions::default())?;
                        to.save(&mut optimizer, &Notes::default()).map(drop)
                    });
                    let what = format!("{saved_as} by {saved_by}, {loaded_as} by {loaded_by}");
                    assert_eq!(numbers(&again), expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn ten_more_steps_at_another_world_size_agree_as_world_sizes_do() {
    for stage in Stage::ALL {
        let config = config(stage);
        let storage = memory();
        let mut expected = run(&config, 2, &adam(), &storage, 0..12, Some(2));
        expected.losses.drain(..2);
        expected.norms.drain(..2);
        for size in SIZES {
            let resumed = run(&config, size, &adam(), &storage, 2..12, None);
            match size {
                2 => assert_eq!(resumed, expected, "{stage}"),
                _ => resumed.assert_close(&expected, 1e-4, &format!("{stage} on {size} ranks")),
            }
        }
    }
}

#[test]
fn a_save_beside_training_is_of_the_moment_when_it_began() {
    let directory = tempfile::tempdir().unwrap();
    let configs = [config(Stage::Three), on_disk(config(Stage::Two), directory.path(), 1.0, 0.0)];
    for config in configs {
        let [beside, at_once] = [memory(), memory()];
        run(&config, 2, &adam(), &at_once, 0..2, Some(2));
        with_engines(&config, 2, |_, zero| {
            let mut learner = Learner::new(zero, &adam(), &beside)?;
            learner.step(0)?;
            learner.step(1)?;
            let pending = learner.checkpoints.save_async(&mut learner.optimizer, &Notes::default())?;
            for at in 2..5 {
                learner.step(at)?;
            }
            assert_eq!(pending.wait()?.step, 2);
            learner.checkpoints.finish()?;
            learner.finish().map(drop)
        });
        assert_eq!(numbers(&beside), numbers(&at_once));
    }
}

#[test]
fn groups_have_their_rates_and_parameters_their_groups() {
    let storage = memory();
    let grouped = |zero: &Zero| -> Result<ZeroOptimizer<Fused>, ZeroError> {
        zero.optimizer(adam())?.group("*bias", adam(), GroupRate::Times(0.5))
    };
    let runs = with_engines(&config(Stage::Three), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = grouped(&zero)?;
        optimizer.set_rate("*bias", GroupRate::Own(0.03))?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let mut losses = Vec::new();
        for at in 0..3 {
            zero.backward(model.loss(rows(at, 0..4, zero.device()), 0))?;
            losses.push(optimizer.step(LR, &mut model)?.loss);
            if at == 0 {
                checkpoints.save(&mut optimizer, &Notes::default())?;
            }
        }
        Ok([losses[1], losses[2]])
    });
    let manifest = Checkpoint::open_latest(Arc::clone(&storage)).unwrap().manifest().clone();
    let group = |name: &str| manifest.parameter(name).unwrap().group.clone().unwrap();
    assert_eq!((group("input.bias").as_str(), group("input.weight").as_str()), ("*bias", "*"));
    assert_eq!(manifest.groups[0].hyper_parameters["rate"], serde_json::json!({ "own": 0.03 }));
    assert_eq!(manifest.groups[0].hyper_parameters["optimizer"], "adam");
    let resumed = with_engines(&config(Stage::Three), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = grouped(&zero)?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        checkpoints.load(&mut optimizer, None, &LoadOptions::default())?;
        let mut step = |at| -> Result<f64, ZeroError> {
            zero.backward(model.loss(rows(at, 0..4, zero.device()), 0))?;
            Ok(optimizer.step(LR, &mut model)?.loss)
        };
        Ok([step(1)?, step(2)?])
    });
    assert_eq!(resumed, runs);

    // Other groups are a difference.
    with_engines(&config(Stage::Three), 2, |_, zero| {
        zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let refused = checkpoints.load(&mut optimizer, None, &LoadOptions::default()).map(drop);
        let Err(ZeroError::OddCheckpoint { reason }) = refused else { panic!("{refused:?}") };
        assert!(reason.contains("was in the group `*bias`, and is in `*` now"), "{reason}");
        let allow = Allow { groups: true, ..Allow::default() };
        checkpoints.load(&mut optimizer, None, &LoadOptions { allow, ..LoadOptions::default() })?;
        assert_eq!(optimizer.steps(), 1);
        let same = zero.optimizer(adam())?.group("*", adam(), GroupRate::Times(1.0)).map(drop);
        assert!(matches!(same, Err(ZeroError::SameGroup { .. })), "{same:?}");
        Ok(())
    });
}

#[test]
fn states_that_are_missing_begin_anew_and_change_nothing_before_that_is_allowed() {
    let plain = Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: WeightDecay::None };
    let storage = memory();
    run(&config(Stage::Two), 2, &Fused::new(plain).unwrap(), &storage, 0..2, Some(2));
    let allow = Allow { missing: true, ..Allow::default() };
    let allowed = LoadOptions { allow, ..LoadOptions::default() };
    check_fresh(&adam(), &storage, &allowed);
    check_fresh(&adamw().build(), &storage, &allowed);
}

/// An optimizer that has taken steps takes up a checkpoint without its states: its next step is that of a new one.
fn check_fresh(
    optimizer: &(impl ShardOptimizer + Clone + Sync),
    storage: &Arc<dyn Storage>,
    allowed: &LoadOptions,
) {
    let next = |before: usize| {
        with_engines(&config(Stage::Three), 2, |_, zero| {
            let mut learner = Learner::new(zero, optimizer, storage)?;
            for at in 0..before {
                learner.step(at)?;
            }
            let Learner { checkpoints, optimizer, .. } = &mut learner;
            let refused = checkpoints.load(optimizer, None, &LoadOptions::default()).map(drop);
            assert!(matches!(refused, Err(ZeroError::Checkpoint(_))), "{refused:?}");
            checkpoints.load(optimizer, None, allowed)?;
            learner.run = Run::new();
            learner.step(2)?;
            learner.finish()
        })
    };
    assert_eq!(next(3), next(0));
}

#[test]
fn a_model_that_was_frozen_and_extended_is_taken_up_by_one_like_it() {
    for stage in [Stage::One, Stage::Three] {
        let storage = memory();
        let train = |from: usize, save_at: Option<usize>| {
            with_engines(&config(stage), 2, |_, zero| {
                let mut learner = Learner::new(zero, &adam(), &storage)?;
                let changed = learner.zero.extend(learner.model, |mut model, device| {
                    model.blocks.push(LinearConfig::new(WIDTH, WIDTH).init(device));
                    model
                })?;
                learner.model = learner.zero.freeze(changed, "input.*")?;
                if from > 0 {
                    learner.checkpoints.load(&mut learner.optimizer, None, &LoadOptions::default())?;
                }
                for at in from..6 {
                    if at == 4 {
                        learner.model = learner.zero.unfreeze(learner.model, "*")?;
                    }
                    learner.step(at)?;
                    if save_at == Some(at + 1) {
                        learner.checkpoints.save(&mut learner.optimizer, &Notes::default())?;
                    }
                }
                learner.finish()
            })
        };
        let (whole, resumed) = (train(0, Some(3)).remove(0), train(3, None).remove(0));
        assert_eq!((resumed.losses, resumed.weights), (whole.losses[3..].to_vec(), whole.weights), "{stage}");
    }
}

#[test]
fn what_is_new_begins_anew_if_that_is_allowed() {
    let storage = memory();
    run(&config(Stage::Two), 2, &adam(), &storage, 0..3, Some(3));
    with_engines(&config(Stage::Three), 3, |_, zero| {
        let model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let mut model = zero.extend(model, |mut model, device| {
            model.blocks.push(LinearConfig::new(WIDTH, WIDTH).init(device));
            model
        })?;
        let before = weights(&zero.unshard(&model)?);
        let refused = checkpoints.load(&mut optimizer, None, &LoadOptions::default()).map(drop);
        let Err(ZeroError::Checkpoint(error)) = refused else { panic!("{refused:?}") };
        assert!(matches!(&*error, CheckpointError::Differences { .. }), "{error}");
        assert!(error.to_string().contains("blocks.4.weight"), "{error}");
        assert_eq!(weights(&zero.unshard(&model)?), before, "nothing has changed");
        assert_eq!(optimizer.steps(), 0);

        let options =
            LoadOptions { allow: Allow { missing: true, ..Allow::default() }, ..LoadOptions::default() };
        let loaded = checkpoints.load(&mut optimizer, None, &options)?;
        assert_eq!(loaded.report.parameters.iter().filter(|parameter| !parameter.values).count(), 2);
        let after = weights(&zero.unshard(&model)?);
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            let is_fresh = name.starts_with("blocks.4") || name.starts_with("frozen");
            assert!(
                is_fresh == (before == after) || before.is_empty() || name.starts_with("unused"),
                "{name}"
            );
        }
        zero.backward(model.loss(rows(3, 0..4, zero.device()), 0))?;
        assert!(optimizer.step(LR, &mut model)?.applied);
        assert_eq!(optimizer.steps(), 4);
        Ok(())
    });
}

#[test]
fn weights_alone_leave_the_optimizer_as_it_is() {
    let storage = memory();
    let saved = run(&config(Stage::Three), 2, &adam(), &storage, 0..3, Some(3));
    with_engines(&config(Stage::Two), 2, |_, zero| {
        let model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(AdamWConfig::new().build())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let options = LoadOptions { optimizer: false, ..LoadOptions::default() };
        checkpoints.load(&mut optimizer, Some(3), &options)?;
        assert_eq!((weights(&zero.unshard(&model)?), optimizer.steps()), (saved.weights.clone(), 0));
        // With states they do not go together: they are kept under other names.
        let refused = checkpoints.load(&mut optimizer, Some(3), &LoadOptions::default()).map(drop);
        assert!(matches!(refused, Err(ZeroError::Checkpoint(_))), "{refused:?}");
        Ok(())
    });
}

#[test]
fn a_file_that_was_altered_ends_the_engine_and_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(directory.path()));
    run(&config(Stage::Three), 2, &adam(), &storage, 0..2, Some(2));
    let folder = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    let folder = folder.into_iter().find(|path| path.join("manifest.json").exists()).unwrap();
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file =
        files.into_iter().find(|file| file.extension().is_some_and(|end| end == "safetensors")).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    with_engines(&config(Stage::Three), 2, |_, zero| {
        let model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let error = checkpoints.load(&mut optimizer, None, &LoadOptions::default()).expect_err("altered");
        assert!(error.to_string().contains(&*file.file_name().unwrap().to_string_lossy()), "{error}");
        assert!(zero.unshard(&model).is_err(), "parameters of two kinds are given to nobody");
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Normed {
    linear: Linear,
    norm: BatchNorm,
}

#[test]
fn what_cannot_be_saved_is_refused() {
    let storage = memory();
    with_engines(&config(Stage::Two), 2, |_, zero| {
        zero.shard(|device| Normed {
            linear: LinearConfig::new(INPUT, WIDTH).init(device),
            norm: BatchNormConfig::new(WIDTH).init(device),
        })?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let error = checkpoints.save(&mut optimizer, &Notes::default()).map(drop).unwrap_err();
        assert!(matches!(&error, ZeroError::RunningState { name } if name.contains("norm")), "{error}");
        Ok(())
    });
    with_engines(&config(Stage::Three), 2, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        let missing = checkpoints.load(&mut optimizer, None, &LoadOptions::default()).map(drop);
        let Err(ZeroError::Checkpoint(missing)) = missing else { panic!("{missing:?}") };
        let rank = comm.rank().index();
        assert!(rank > 0 || matches!(&*missing, CheckpointError::NoCheckpoint { .. }), "{missing}");

        zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
        let pending = checkpoints.save(&mut optimizer, &Notes::default()).map(drop);
        assert!(matches!(pending, Err(ZeroError::GradientsPending)), "{pending:?}");
        optimizer.step(LR, &mut model)?;

        let other = Zero::new(config(Stage::Three), comm, Device::default())?;
        other.shard(|device| LinearConfig::new(2, 2).init(device))?;
        let mut foreign = other.optimizer(adam())?;
        let refused = checkpoints.save(&mut foreign, &Notes::default()).map(drop);
        assert!(matches!(refused, Err(ZeroError::ForeignOptimizer)), "{refused:?}");

        checkpoints.save(&mut optimizer, &Notes::default())?;
        checkpoints.save(&mut optimizer, &Notes::default())?;
        zero.backward(model.loss(rows(1, 0..4, zero.device()), 0))?;
        assert!(optimizer.step(LR, &mut model)?.applied, "the engine goes on");
        Ok(())
    });
}

#[test]
fn a_save_that_a_rank_stays_away_from_names_it() {
    let storage = memory();
    let mut config = config(Stage::Three);
    config.deadline_seconds = 0.5;
    let told = LocalWorld::new(world(3)).run(|comm| -> Result<(), ZeroError> {
        let zero = Zero::new(config.clone(), &comm, Device::default())?;
        zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adam())?;
        let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
        if comm.rank().index() == 1 {
            std::thread::sleep(std::time::Duration::from_secs(3));
            return Ok(());
        }
        let error = checkpoints.save(&mut optimizer, &Notes::default()).map(drop).expect_err("one is away");
        assert!(error.to_string().contains("rank 1"), "{error}");
        Err(error)
    });
    assert!(told.is_err());
    assert!(Checkpoint::open_latest(storage).is_err(), "there is no half of one");
}

#[test]
fn linear_weights_are_told_from_others() {
    let storage = memory();
    run(&config(Stage::One), 1, &adam(), &storage, 0..1, Some(1));
    let manifest = Checkpoint::open_latest(storage).unwrap().manifest().clone();
    let layout = |name: &str| manifest.parameter(name).unwrap().layout;
    assert_eq!(layout("input.weight"), zero_checkpoint::WeightLayout::InOut);
    assert_eq!(layout("nothing"), zero_checkpoint::WeightLayout::Plain);
    assert_eq!(manifest.parameter("tied.weight").unwrap().name, "shared.weight");
}

#[test]
fn published_weights_are_loaded_shard_by_shard() {
    let directory = tempfile::tempdir().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(directory.path().join("checkpoints")));
    let expected = run(&config(Stage::Three), 2, &adam(), &storage, 0..2, Some(2)).weights;
    let published = directory.path().join("published");
    let checkpoint = Checkpoint::open_latest(storage).unwrap();
    consolidate(&checkpoint, &published, &ConsolidateOptions::default(), &mut |_| {}).unwrap();
    let weights_of = || PublishedWeights::open(&published, NameMap::default()).unwrap();
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        let plain = config(stage);
        let masters = on_disk(in_16_bits(plain.clone(), DType::BF16, DType::F32), directory.path(), 1.0, 0.5);
        for config in [plain, masters] {
            with_engines(&config, size, |_, zero| {
                let mut model = zero.shard(Odd::new)?;
                let report = zero.load_weights(&weights_of(), &LoadOptions::default())?;
                assert!(report.parameters.iter().all(|parameter| parameter.values));
                assert_eq!(weights(&whole(&zero, &model)?), expected, "{stage} on {size} ranks");
                let mut optimizer = zero.optimizer(adam())?;
                zero.backward(model.loss(cast(rows(0, 0..4, zero.device()), zero.config()), 0))?;
                assert!(optimizer.step(LR, &mut model)?.applied);
                Ok(())
            });
        }
    }
    with_engines(&config(Stage::Three), 2, |_, zero| {
        let model = zero.shard(|device| LinearConfig::new(INPUT, WIDTH).init(device))?;
        let before = weights(&zero.unshard(&model)?);
        let refused = zero.load_weights(&weights_of(), &LoadOptions::default()).map(drop);
        let Err(ZeroError::Checkpoint(error)) = refused else { panic!("{refused:?}") };
        assert!(error.to_string().contains("`weight` is missing"), "{error}");
        assert_eq!(weights(&zero.unshard(&model)?), before);
        Ok(())
    });
}

#[test]
fn a_record_of_burn_has_the_weights_of_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let storage = memory();
    let expected = run(&config(Stage::Three), 3, &adam(), &storage, 0..2, Some(2)).weights;
    let path = directory.path().join("model.bpk");
    let open = || Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
    write_record(open(), &path, DType::F32).unwrap();
    let load = |path: &Path| Odd::new(&Device::default()).load_record(ModuleRecord::load(path).unwrap());
    assert_eq!(weights(&load(&path)), expected);
    let refused = write_record(open(), &path, DType::F32).unwrap_err().to_string();
    assert!(refused.contains("model.bpk") && refused.contains("exists"), "{refused}");

    let half = directory.path().join("half.bpk");
    write_record(open(), &half, DType::BF16).unwrap();
    for ((name, half), (_, full)) in weights(&load(&half)).iter().zip(&expected) {
        let rounded = full.iter().map(|full| half::bf16::from_f32(*full).to_f32());
        assert_eq!(*half, rounded.collect::<Vec<_>>(), "{name}");
    }
}
