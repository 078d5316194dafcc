//! Parameters are frozen, unfrozen and added in the middle of a run, and nothing else changes.

mod common;

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use common::{INPUT, LR, Odd, Run, SEED, WIDTH, adamw, config, rows, weights, with_engines, world};
use zero_burn::{
    Bytes, DType, GroupRate, Layout, LocalWorld, MemorySetup, OptimizerCost, Partition, Precision, Stage,
    Zero, ZeroConfig, ZeroError, materialize,
};

const CLOSE: f64 = 2e-5;
const ROWS: usize = 12;
const STEPS: usize = 14;

#[derive(Clone, Copy, Debug)]
enum Act {
    Freeze(&'static str),
    Unfreeze(&'static str),
    AddBlock,
}

/// What happens before which step.
const ACTS: [(usize, Act); 8] = [
    (2, Act::Freeze("blocks.*")),
    (4, Act::Unfreeze("frozen.*")),
    (5, Act::Freeze("shared.*")),
    (6, Act::Unfreeze("blocks.?.weight")),
    (7, Act::AddBlock),
    (9, Act::Unfreeze("*")),
    (10, Act::Freeze("blocks.4.bias")),
    (12, Act::AddBlock),
];

fn acts(step: usize) -> impl Iterator<Item = Act> {
    ACTS.into_iter().filter(move |(at, _)| *at == step).map(|(_, act)| act)
}

fn block(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).init(device)
}

/// Trains [`Odd`] with all of [`ACTS`].
fn sharded(config: &ZeroConfig, size: usize) -> Run {
    let mut runs = with_engines(config, size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let share = Partition::new(ROWS, world(size)).range(comm.rank());
        let mut run = Run::new();
        let mut counted = zero.statistics()?;
        for step in 0..STEPS {
            for act in acts(step) {
                model = match act {
                    Act::Freeze(pattern) => zero.freeze(model, pattern)?,
                    Act::Unfreeze(pattern) => zero.unfreeze(model, pattern)?,
                    Act::AddBlock => zero.extend(model, |mut model, device| {
                        model.blocks.push(block(device));
                        model
                    })?,
                };
            }
            let now = zero.statistics()?;
            assert!(now.lookahead_hits >= counted.lookahead_hits && now.gathered >= counted.gathered);
            counted = now;
            let loss = model.loss(rows(step, share.clone(), zero.device()), 0);
            zero.backward_weighted(loss, share.len() as f64)?;
            run.record(&optimizer.step(LR, &mut model)?);
        }
        assert_eq!(optimizer.steps(), STEPS as u64);
        run.weights = weights(&zero.unshard(&model)?);
        Ok(run)
    });
    let first = runs.remove(0);
    assert!(runs.iter().all(|run| *run == first), "every rank sees the same run");
    first
}

/// The same with Burn alone, which leaves alone what has no gradient.
fn plain() -> Run {
    let device = Device::default().autodiff();
    let mut model = materialize(&device, SEED, Odd::new);
    model.frozen = model.frozen.unfreeze();
    let mut frozen: BTreeSet<String> = ["frozen.weight", "frozen.bias"].map(String::from).into();
    let mut optimizer = adamw().init();
    let mut run = Run::new();
    for step in 0..STEPS {
        for act in acts(step) {
            let paths = weights(&model.valid()).into_iter().map(|(path, _)| path);
            match act {
                Act::Freeze(pattern) => frozen.extend(paths.filter(|path| matches(pattern, path))),
                Act::Unfreeze(pattern) => frozen.retain(|path| !matches(pattern, path)),
                Act::AddBlock => {
                    let seed = SEED + count(&model) as u64;
                    model.blocks.push(materialize(&device, seed, block));
                }
            }
        }
        let loss = Odd { tied: model.shared.clone(), ..model.clone() }.loss(rows(step, 0..ROWS, &device), 0);
        run.losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let mut taken =
            Taken { gradients, frozen: &frozen, path: Vec::new(), seen: HashSet::new(), squares: 0.0 };
        model.visit(&mut taken);
        run.norms.push(taken.squares.sqrt());
        let gradients = taken.gradients;
        model = optimizer.step(LR, model, gradients);
        model.tied = model.shared.clone();
    }
    run.weights = weights(&model.valid());
    run
}

fn matches(pattern: &str, path: &str) -> bool {
    match pattern.split_once('?') {
        Some((before, after)) => {
            path.strip_prefix(before).is_some_and(|rest| rest.get(1..).is_some_and(|rest| rest == after))
        }
        None => match pattern.strip_suffix('*') {
            Some(before) => path.starts_with(before),
            None => path == pattern,
        },
    }
}

fn count<M: Module>(model: &M) -> usize {
    struct Ids(HashSet<ParamId>);
    impl ModuleVisitor for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.insert(param.id);
        }
    }
    let mut ids = Ids(HashSet::new());
    model.visit(&mut ids);
    ids.0.len()
}

/// Takes away the gradients of what is frozen, and sums up the squares of the others.
struct Taken<'a> {
    gradients: GradientsParams,
    frozen: &'a BTreeSet<String>,
    path: Vec<String>,
    seen: HashSet<ParamId>,
    squares: f64,
}

impl ModuleVisitor for Taken<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        if !self.frozen.contains(&self.path.join(".")) {
            let values = gradient.clone().into_data();
            self.squares += values.iter::<f32>().map(|value| f64::from(value).powi(2)).sum::<f64>();
            self.gradients.register(param.id, gradient);
        }
    }
}

#[test]
fn freezing_unfreezing_and_adding_equal_burn_alone_at_every_stage() {
    let reference = plain();
    for size in [1, 2, 3] {
        let base = ZeroConfig { overlap: false, lookahead_bytes: Bytes::ZERO, ..config(Stage::Zero) };
        let first = sharded(&base, size);
        first.assert_close(&reference, CLOSE, &format!("{size} ranks"));
        for stage in Stage::ALL {
            for (overlap, lookahead_bytes, persistence_threshold) in
                [(false, Bytes::ZERO, 0), (true, Bytes::new(1 << 20), 10), (true, Bytes::new(120), 0)]
            {
                // Settings for stage 3 alone.
                let (lookahead_bytes, persistence_threshold) = match stage {
                    Stage::Three => (lookahead_bytes, persistence_threshold),
                    _ => (Bytes::ZERO, 0),
                };
                let config = ZeroConfig { overlap, lookahead_bytes, persistence_threshold, ..config(stage) };
                assert_eq!(sharded(&config, size), first, "{size} ranks, {config:?}");
            }
        }
    }
}

#[test]
fn sixteen_bits_change_nothing_about_it() {
    let runs = [Stage::Zero, Stage::Two, Stage::Three].map(|stage| {
        let precision =
            Precision { compute: DType::BF16, optimizer_state: DType::BF16, ..Precision::default() };
        let config = ZeroConfig { precision, ..config(stage) };
        let mut runs = with_engines(&config, 2, |_, zero| {
            let mut model: Vec<Linear> = zero.shard(|device| vec![block(device), block(device)])?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let mut losses = Vec::new();
            for step in 0..8 {
                model = match step {
                    2 => zero.freeze(model, "0.*")?,
                    4 => zero.extend(model, |mut model, device| {
                        model.push(block(device));
                        model
                    })?,
                    6 => zero.unfreeze(model, "0.weight")?,
                    _ => model,
                };
                let input = Tensor::<2>::ones([3, WIDTH], zero.device()).cast(burn::tensor::FloatDType::BF16);
                let output = model.iter().fold(input, |x, layer| layer.forward(x).tanh());
                zero.backward(output.cast(burn::tensor::FloatDType::F32).square().mean())?;
                losses.push(optimizer.step(LR, &mut model)?.loss);
            }
            Ok((losses, weights(&zero.unshard(&model)?)))
        });
        runs.remove(0)
    });
    assert!(runs[0].0.iter().all(|loss| loss.is_finite()));
    assert_eq!(runs[0], runs[1]);
    assert_eq!(runs[0], runs[2]);
}

#[test]
fn what_is_frozen_keeps_every_bit() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        with_engines(&config(stage), size, |_, zero| {
            let model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let mut model = zero.freeze(model, "*weight")?;
            assert!(
                !model.input.weight.is_require_grad() && model.input.bias.as_ref().unwrap().is_require_grad()
            );
            let before = weights(&zero.unshard(&model)?);
            for step in 0..3 {
                zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
                assert!(optimizer.step(LR, &mut model)?.applied);
            }
            // Forward passes without backward go by the same values.
            let whole = zero.unshard(&model)?;
            let plain = Device::default();
            let [sharded, whole_loss] = [
                model.valid().loss(rows(9, 0..4, &zero.device().clone().inner()), 0),
                whole.loss(rows(9, 0..4, &plain), 0),
            ];
            assert_eq!(sharded.into_data(), whole_loss.into_data());
            for ((path, after), (_, before)) in weights(&whole).iter().zip(&before) {
                let is_still = path.ends_with("weight")
                    || path.starts_with("frozen")
                    || path.starts_with("unused")
                    || path == "nothing";
                assert_eq!(after == before, is_still, "{path} at {stage} on {size} ranks");
            }
            Ok(())
        });
    }
}

/// A model around another one.
#[derive(Module, Debug)]
struct Longer {
    body: Odd,
    head: Linear,
    again: Linear,
    fixed: Linear,
}

#[test]
fn a_model_may_be_put_into_a_larger_one() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2, 3].map(|size| (stage, size))) {
        with_engines(&config(stage), size, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer =
                zero.optimizer(adamw().build())?.group("*bias", adamw().build(), GroupRate::Own(0.0))?;
            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
            optimizer.step(LR, &mut model)?;
            let before = weights(&zero.unshard(&model)?);
            let mut model = zero.extend(model, |body, device| {
                let head = block(device);
                Longer { body, again: head.clone(), head, fixed: block(device).no_grad() }
            })?;

            let layout = zero.layout()?;
            let names: Vec<_> = layout.parameters().iter().map(|parameter| parameter.name()).collect();
            assert_eq!(names[0], "body.input.weight");
            assert_eq!(names[20..], ["head.weight", "head.bias", "fixed.weight", "fixed.bias"]);
            assert_eq!(layout.find("again.weight"), layout.find("head.weight"));
            assert!(!layout.find("fixed.bias").unwrap().trainable());
            let added = weights(&zero.unshard(&model)?);
            assert_eq!(added.len(), before.len() + 6);
            for ((path, after), (old_path, before)) in added.iter().zip(&before) {
                assert_eq!((path, after), (&format!("body.{old_path}"), before), "{stage}, {size} ranks");
            }
            let seed = SEED + 20;
            let fresh = materialize(&Device::default(), seed, |device| vec![block(device), block(device)]);
            let fresh = weights(&fresh);
            let values = |path: &str| &added.iter().find(|(other, _)| other == path).unwrap().1;
            assert_eq!(values("head.weight"), &fresh[0].1);
            assert_eq!(values("again.bias"), &fresh[1].1);
            assert_eq!(values("fixed.weight"), &fresh[2].1);

            let x = rows(1, 0..4, zero.device());
            let hook = |model: &Longer, x| model.fixed.forward(model.again.forward(model.head.forward(x)));
            zero.backward(model.body.loss_through(x, |x| hook(&model, x)))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            for ((path, after), (_, before)) in weights(&zero.unshard(&model)?).iter().zip(&added) {
                let is_still = ["bias", "nothing"].iter().any(|end| path.ends_with(end))
                    || ["frozen", "unused", "fixed"].iter().any(|part| path.contains(part));
                assert_eq!(after == before, is_still, "{path} at {stage} on {size} ranks");
            }
            Ok(())
        });
    }
}

#[test]
fn memory_follows_the_plan() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2, 3].map(|size| (stage, size))) {
        with_engines(&config(stage), size, |comm, zero| {
            let layers = |device: &Device| -> Vec<Linear> {
                vec![
                    LinearConfig::new(INPUT, 32).init(device),
                    LinearConfig::new(32, 32).init(device).no_grad(),
                ]
            };
            let mut model = zero.shard(layers)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let mut step = |model: &mut Vec<Linear>| {
                let input = rows(0, 0..4, zero.device());
                let output = model.iter().fold(input, |x, layer| layer.forward(x).tanh());
                zero.backward(output.square().mean())?;
                Ok::<_, ZeroError>(optimizer.step(LR, model)?.memory.state)
            };
            let setup = MemorySetup::new(&config(stage), OptimizerCost::ADAMW);
            let planned = |layout: Arc<Layout>| setup.plan(&layout, comm.rank()).state;

            assert_eq!(step(&mut model)?, planned(zero.layout()?), "{stage}, {size} ranks");
            let mut model = zero.unfreeze(model, "1.*")?;
            let all = planned(zero.layout()?);
            assert_eq!(step(&mut model)?, all, "unfrozen at {stage}, {size} ranks");
            let mut model = zero.freeze(model, "0.*")?;
            let some = planned(zero.layout()?);
            assert!(some.gradients < all.gradients && some.parameters == all.parameters);
            let held = step(&mut model)?;
            assert_eq!((held.parameters, held.gradients), (some.parameters, some.gradients));
            // For when they are unfrozen.
            assert_eq!(held.optimizer, all.optimizer);
            let mut model = zero.extend(zero.unfreeze(model, "*")?, |mut model, device| {
                model.push(LinearConfig::new(32, 16).init(device));
                model
            })?;
            assert_eq!(step(&mut model)?, planned(zero.layout()?), "extended at {stage}, {size} ranks");
            drop(optimizer);
            assert_eq!(zero.memory()?.state.optimizer, Bytes::ZERO);
            Ok(())
        });
    }
}

#[test]
fn models_and_losses_from_before_are_refused() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2].map(|size| (stage, size))) {
        with_engines(&config(stage), size, |_, zero| {
            let model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let mut old = model.clone();
            let loss = model.loss(rows(0, 0..4, zero.device()), 0);
            let late = model.loss(rows(0, 0..4, zero.device()), 0);
            let mut model = zero.freeze(model, "input.*")?;

            let replaced = |result: Result<(), ZeroError>, what: &str| {
                let refused = matches!(&result, Err(ZeroError::Replaced));
                assert!(refused, "{what} at {stage} on {size} ranks: {result:?}");
            };
            replaced(zero.backward(loss), "a loss");
            replaced(optimizer.step(LR, &mut old).map(drop), "a step");
            replaced(zero.freeze(old.clone(), "*").map(drop), "freezing");
            replaced(zero.extend(old.clone(), |model, _| model).map(drop), "extending");
            replaced(zero.unshard(&old).map(drop), "a copy");
            let from_old = old.loss(rows(0, 0..4, zero.device()), 0);
            replaced(zero.backward(from_old), "a loss of the old model");
            // The old engine goes with the last that knew it.
            drop(old);
            assert!(matches!(optimizer.step(LR, &mut model), Err(ZeroError::NothingToStep)));
            replaced(zero.backward(late), "a loss whose engine is gone");

            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn what_cannot_be_done_is_refused_and_changes_nothing() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2].map(|size| (stage, size))) {
        with_engines(&config(stage), size, |comm, zero| {
            let device = zero.device().clone();
            assert!(matches!(zero.freeze(Odd::new(&device), "*"), Err(ZeroError::NotSharded)));
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let error = zero.freeze(model.clone(), "inputs.*").unwrap_err().to_string();
            assert!(error.contains("`inputs.*`") && error.contains("`input.weight`"), "{error}");
            let foreign = zero.unfreeze(block(&device), "*");
            assert!(matches!(foreign, Err(ZeroError::ForeignModel { .. })), "{foreign:?}");

            // One rank without rows has gradients waiting, too.
            match comm.rank().index() {
                0 => zero.backward(model.loss(rows(0, 0..4, &device), 0))?,
                _ => zero.skip_backward()?,
            }
            let pending = [
                zero.freeze(model.clone(), "input.*").err(),
                zero.unfreeze(model.clone(), "frozen.*").err(),
                zero.extend(model.clone(), |model, _| model).err(),
            ];
            assert!(pending.iter().all(|error| matches!(error, Some(ZeroError::GradientsPending))));
            optimizer.step(LR, &mut model)?;

            // Nobody brings a gradient: then there is none that waits.
            zero.skip_backward()?;
            assert!(matches!(optimizer.step(LR, &mut model), Err(ZeroError::NothingToStep)));

            let lost = zero.extend(model.clone(), |mut model, device| {
                model.blocks.pop();
                model.output = LinearConfig::new(WIDTH, 1).init(device);
                model
            });
            let Err(ZeroError::ParametersLost { names }) = &lost else { panic!("{lost:?}") };
            assert_eq!(names[..], ["blocks.3.weight", "blocks.3.bias", "output.weight", "output.bias"]);

            let mut model = zero.extend(zero.freeze(model, "input.*")?, |model, _| model)?;
            zero.backward(model.loss(rows(1, 0..4, &device), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn what_the_module_alone_holds_back_stays_held_back() {
    with_engines(&config(Stage::Three), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        model.input = model.input.no_grad();
        let model = zero.freeze(model, "output.*")?;
        assert!(!model.input.weight.is_require_grad() && model.shared.weight.is_require_grad());
        let model = zero.extend(model, |model, _| model)?;
        assert!(!model.input.weight.is_require_grad() && !model.output.weight.is_require_grad());
        let model = zero.unfreeze(model, "input.weight")?;
        assert!(model.input.weight.is_require_grad());
        assert!(!model.input.bias.as_ref().unwrap().is_require_grad());
        Ok(())
    });
}

#[test]
fn no_rank_waits_for_one_whose_extension_is_refused() {
    let outcome = LocalWorld::new(world(3)).with_deadline(config(Stage::Two).deadline()).run(|comm| {
        let zero = Zero::new(config(Stage::Two), &comm, Device::default())?;
        let model = zero.shard(Odd::new)?;
        let record = zero.unshard(&model)?.into_record();
        let alone = comm.rank().index() == 1;
        zero.extend(model, |model, _| if alone { model.load_record(record) } else { model }).map(drop)
    });
    let error = outcome.expect_err("one rank changed values").to_string();
    assert!(error.contains("rank 1") && error.contains("input.weight"), "{error}");
}

#[test]
fn ranks_that_do_different_things_are_told() {
    for (stage, size) in [(Stage::One, 2), (Stage::Three, 3)] {
        let errors = Mutex::new(Vec::new());
        let outcome = LocalWorld::new(world(size)).with_deadline(config(stage).deadline()).run(|comm| {
            let zero = Zero::new(config(stage), &comm, Device::default())?;
            let model = zero.shard(Odd::new)?;
            let pattern = if comm.rank().index() == 1 { "input.weight" } else { "input.*" };
            let result = zero.freeze(model, pattern).map(drop);
            let error = result.expect_err("ranks differ");
            errors.lock().unwrap().push((comm.rank().index(), error.clone()));
            assert!(zero.check().is_err() || matches!(error, ZeroError::RanksDiffer { .. }));
            Err::<(), _>(error)
        });
        assert!(outcome.is_err());
        let errors = errors.into_inner().unwrap();
        assert_eq!(errors.len(), size);
        for (rank, error) in errors {
            let text = error.to_string();
            assert!(
                text.contains("freeze input.weight") && text.contains("freeze input.*"),
                "{rank}: {text}"
            );
            assert_eq!(rank == 1, matches!(error, ZeroError::RanksDiffer { .. }));
        }
    }
}

#[test]
fn what_cannot_be_added_fails_the_engine_on_every_rank() {
    // A layer stored in another layout than it is used in, and a layer that one rank has larger.
    let col = |_: usize, device: &Device| {
        LinearConfig::new(WIDTH, WIDTH).with_layout(LinearLayout::Col).init(device)
    };
    let uneven = |rank: usize, device: &Device| LinearConfig::new(WIDTH, WIDTH + rank).init(device);
    for stage in [Stage::One, Stage::Three] {
        let unsupported = errors_of_extending(stage, &col);
        assert!(
            unsupported.iter().all(|error| error.to_string().contains("`blocks.4.weight`")),
            "{unsupported:?}"
        );
        let differ = errors_of_extending(stage, &uneven);
        assert!(matches!(differ[1], ZeroError::RanksDiffer { .. }), "{differ:?}");
        assert!(
            differ.iter().all(|error| error.to_string().contains("blocks.4.weight [5, 6]")),
            "{differ:?}"
        );
    }
}

/// What each of two ranks is told when `layer`, by rank, is added to [`Odd`].
fn errors_of_extending(stage: Stage, layer: &(dyn Fn(usize, &Device) -> Linear + Sync)) -> Vec<ZeroError> {
    let errors = Mutex::new(Vec::new());
    let outcome = LocalWorld::new(world(2)).with_deadline(config(stage).deadline()).run(|comm| {
        let zero = Zero::new(config(stage), &comm, Device::default())?;
        let model = zero.shard(Odd::new)?;
        let rank = comm.rank().index();
        let extended = zero.extend(model.clone(), |mut model, device| {
            model.blocks.push(layer(rank, device));
            model
        });
        let error = extended.expect_err("it cannot be added");
        assert!(zero.skip_backward().is_err(), "the engine has failed");
        errors.lock().unwrap().push((rank, error.clone()));
        Err::<(), _>(error)
    });
    assert!(outcome.is_err());
    let mut errors = errors.into_inner().unwrap();
    errors.sort_by_key(|(rank, _)| *rank);
    assert_eq!(errors.len(), 2);
    errors.into_iter().map(|(_, error)| error).collect()
}
