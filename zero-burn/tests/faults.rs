//! What goes wrong in a step leaves the engine ready for the next one, or fails on every rank with the cause.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, Flex, backend_extension};
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor};
use common::{LR, Odd, Run, adamw, config, rows, weights, with_engines};
use zero_burn::{DType, LocalWorld, Partition, Stage, WorldError, Zero, ZeroError};

const STEPS: usize = 4;
const BATCH: usize = 8;

/// What happens at the beginning of step 2.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mishap {
    None,
    /// The forward pass panics after some layers.
    PanicInForward,
    /// The forward pass gives up after some layers.
    ErrorInForward,
    /// Backward panics when some gradients are on their way.
    PanicInBackward,
    /// A model is run and its loss thrown away.
    LossDropped,
    /// The model is evaluated, differently on each rank.
    Evaluation,
}

/// Trains as `common::sharded` does, with a mishap on the ranks that `hit` says.
fn train(stage: Stage, size: usize, mishap: Mishap, hit: fn(usize) -> bool) -> Run {
    let mut runs = with_engines(&config(stage), size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let rank = comm.rank().index();
        let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
        let mut run = Run::new();
        for step in 0..STEPS {
            let input = rows(step, share.clone(), zero.device());
            if step == 2 {
                suffer(mishap, hit, &zero, &model, input.clone(), rank)?;
            }
            zero.backward(model.loss(input, 0))?;
            run.record(&optimizer.step(LR, &mut model)?);
            assert_eq!(
                zero.memory()?.gathered.get(),
                0,
                "nothing stays gathered after {mishap:?} at {stage}"
            );
        }
        run.weights = weights(&zero.unshard(&model)?);
        Ok(run)
    });
    runs.remove(0)
}

fn suffer(
    mishap: Mishap,
    hits: fn(usize) -> bool,
    zero: &Zero,
    model: &Odd,
    input: Tensor<2>,
    rank: usize,
) -> Result<(), ZeroError> {
    let hit = hits(rank);
    match mishap {
        Mishap::None => {}
        Mishap::PanicInForward if hit => {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                let _alive = model.blocks[0].forward(model.input.forward(input));
                panic!("a layer breaks");
            }));
            assert!(caught.is_err());
        }
        Mishap::ErrorInForward if hit => {
            let failing = || -> Result<Tensor<2>, String> {
                let _alive = model.blocks[0].forward(model.input.forward(input));
                Err(String::from("a layer refuses"))
            };
            assert!(failing().is_err());
        }
        Mishap::PanicInBackward => {
            let loss = model.loss_through(input, |x| if hit { trip(x) } else { x });
            let error = zero.backward(loss).expect_err("backward fails on every rank");
            assert!(matches!(error, ZeroError::BackwardFailed { .. }), "{error}");
            let text = error.to_string();
            let lowest = (0..zero.communicator().world_size().get()).find(|&rank| hits(rank));
            let told = if hit { rank } else { lowest.expect("a rank is hit") };
            assert!(text.contains(&format!("rank {told}")), "{text}");
            assert_eq!(text.contains("tripped"), hit, "{text}");
        }
        Mishap::LossDropped => drop(model.loss(input, 0)),
        Mishap::Evaluation => {
            use burn::module::Module as _;
            for _ in 0..rank {
                drop(model.valid().loss(input.clone().inner(), 0b0101));
            }
        }
        Mishap::PanicInForward | Mishap::ErrorInForward => {}
    }
    Ok(())
}

const MISHAPS: [Mishap; 5] = [
    Mishap::PanicInForward,
    Mishap::ErrorInForward,
    Mishap::PanicInBackward,
    Mishap::LossDropped,
    Mishap::Evaluation,
];

#[test]
fn after_a_mishap_the_next_step_is_what_it_would_have_been() {
    for stage in Stage::ALL {
        for size in [1, 3] {
            let undisturbed = train(stage, size, Mishap::None, |_| false);
            for mishap in MISHAPS {
                for (who, hit) in
                    [("every rank", (|_| true) as fn(usize) -> bool), ("rank 0", |rank| rank == 0)]
                {
                    let disturbed = train(stage, size, mishap, hit);
                    assert_eq!(disturbed, undisturbed, "{mishap:?} on {who} of {size} at {stage}");
                }
            }
        }
    }
}

/// An operation that passes values on, and panics when a gradient comes back.
#[backend_extension(Flex, Autodiff)]
trait TripOps: Backend {
    fn trip(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl TripOps for Flex {
    fn trip(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

#[derive(Debug)]
struct TripBackward;

impl<B: Backend> Backward<B, 1> for TripBackward {
    type State = ();

    fn backward(self, _ops: Ops<(), 1>, _grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        panic!("tripped");
    }
}

impl<B: TripOps, S: CheckpointStrategy> TripOps for Autodiff<B, S> {
    fn trip(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match TripBackward.prepare::<S>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((), B::trip(x.into_primitive())),
            OpsKind::UnTracked(prepared) => prepared.finish(B::trip(x.into_primitive())),
        }
    }
}

fn trip(x: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as TripOps>::trip(x.into_dispatch()))
}

#[test]
fn a_rank_that_dies_in_a_step_is_named_to_the_others() {
    for stage in Stage::ALL {
        let error = LocalWorld::new(common::world(3))
            .run(|comm| -> Result<(), ZeroError> {
                let zero = Zero::new(config(stage), &comm, Device::default())?;
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adamw().build())?;
                for step in 0..STEPS {
                    assert!(!(step == 2 && comm.rank().index() == 1), "this rank dies");
                    let result = zero
                        .backward(model.loss(rows(step, 0..2, zero.device()), 0))
                        .and_then(|()| optimizer.step(LR, &mut model));
                    if let Err(error) = result {
                        assert!(step == 2 && error.to_string().contains("rank 1"), "step {step}: {error}");
                        let again = zero.check().expect_err("the engine stays failed");
                        assert!(again.to_string().contains("rank 1"), "{again}");
                        let loss = model.loss(rows(step, 0..2, zero.device()), 0);
                        assert!(zero.backward(loss).is_err(), "and fails at once");
                        return Err(error);
                    }
                }
                Ok(())
            })
            .expect_err("a rank died");
        assert!(matches!(&error, WorldError::Panicked { rank, .. } if rank.index() == 1), "{stage}: {error}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_skips_the_step_on_every_rank() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 3, |comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let before = weights(&zero.unshard(&model)?);
            let factor = if comm.rank().index() == 1 { f64::NAN } else { 1.0 };
            zero.backward(model.loss(rows(0, 0..2, zero.device()), 0) * factor)?;
            let outcome = optimizer.step(LR, &mut model)?;
            assert!(!outcome.applied && outcome.step == 0, "{outcome:?}");
            assert_eq!(weights(&zero.unshard(&model)?), before);
            comm.barrier("before the next step").expect("all ranks are here");
            zero.backward(model.loss(rows(1, 0..2, zero.device()), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn misuse_is_refused_before_anything_moves() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |_comm, zero| {
            assert!(matches!(zero.optimizer(SgdConfig::new().build()), Err(ZeroError::NotSharded)));
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            let input = rows(0, 0..2, zero.device());
            let wide = model.input.forward(input.clone());
            assert!(matches!(zero.backward(wide), Err(ZeroError::LossNotScalar { .. })));
            let free = Tensor::<1>::ones([1], zero.device());
            assert!(matches!(zero.backward(free), Err(ZeroError::LossUntracked)));
            for weight in [0.0, -1.0, 1e-45, 1e40, f64::NAN, f64::INFINITY] {
                let loss = model.loss(input.clone(), 0);
                assert!(matches!(zero.backward_weighted(loss, weight), Err(ZeroError::InvalidWeight { .. })));
            }
            assert!(matches!(optimizer.step(LR, &mut model), Err(ZeroError::NothingToStep)));
            let nan = optimizer.step(f64::NAN, &mut model);
            assert!(matches!(nan, Err(ZeroError::InvalidLearningRate { .. })));
            let mut stranger = LinearConfig::new(2, 2).init(zero.device());
            assert!(matches!(optimizer.step(LR, &mut stranger), Err(ZeroError::ForeignModel { .. })));
            // Burn's own backward: the engine says so once, and goes on.
            drop(model.loss(input.clone(), 0).backward());
            let loss = model.loss(input.clone(), 0);
            assert!(matches!(zero.backward(loss), Err(ZeroError::StrayGradient { .. })));
            zero.backward(model.loss(input, 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn freezing_a_sharded_model_is_kept_and_unfreezing_it_refused() {
    use burn::module::Module as _;
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |_comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            let before = weights(&zero.unshard(&model)?);
            model.input = model.input.no_grad();
            for step in 0..2 {
                zero.backward(model.loss(rows(step, 0..2, zero.device()), 0))?;
                assert!(optimizer.step(LR, &mut model)?.applied);
            }
            for ((path, after), (_, before)) in weights(&zero.unshard(&model)?).iter().zip(&before) {
                let still =
                    path.starts_with("input") || path.starts_with("frozen") || path.starts_with("unused");
                assert_eq!(after == before, still || after.is_empty(), "{path} at {stage}");
            }
            model.frozen = model.frozen.unfreeze();
            let error =
                zero.backward(model.loss(rows(2, 0..2, zero.device()), 0)).expect_err("it cannot be trained");
            assert!(matches!(&error, ZeroError::Unfrozen { name } if name.starts_with("frozen")), "{error}");
            Ok(())
        });
    }
}

#[test]
fn a_failed_micro_batch_drops_those_before_it_on_every_rank() {
    for stage in Stage::ALL {
        let run = |disturbed: bool| {
            let norms = with_engines(&config(stage), 3, |comm, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adamw().build())?;
                if disturbed {
                    for micro in 0..2 {
                        zero.backward(model.loss(rows(micro, 0..2, zero.device()), 0))?;
                    }
                    let tripped = |x| if comm.rank().index() == 1 { trip(x) } else { x };
                    let failing = zero.backward(model.loss_through(rows(2, 0..2, zero.device()), tripped));
                    assert!(matches!(failing, Err(ZeroError::BackwardFailed { .. })), "{failing:?}");
                }
                for micro in 0..3 {
                    zero.backward(model.loss(rows(micro, 0..2, zero.device()), 0))?;
                }
                Ok(optimizer.step(LR, &mut model)?.grad_norm)
            });
            norms[0]
        };
        assert_eq!(run(true), run(false), "{stage}");
    }
}

#[test]
fn a_model_changed_behind_the_engine_is_refused() {
    use burn::module::{Module as _, ModuleMapper, Param};
    struct Clamp;
    impl ModuleMapper for Clamp {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| {
                let graded = value.is_require_grad();
                Tensor::from_inner(value.inner().clamp(-0.1, 0.1)).set_require_grad(graded)
            })
        }
    }
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |_comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            zero.backward(model.loss(rows(0, 0..2, zero.device()), 0))?;
            let mut clamped = model.clone().map(&mut Clamp);
            let refused = optimizer.step(LR, &mut clamped);
            assert!(
                matches!(refused, Err(ZeroError::ModelChanged { .. })),
                "clamped at {stage}: {refused:?}"
            );
            let mut whole = zero.unshard(&model)?;
            let refused = optimizer.step(LR, &mut whole);
            assert!(refused.is_err(), "unsharded at {stage}: {refused:?}");
            let mut replaced = model.clone();
            replaced.output = LinearConfig::new(common::WIDTH, 1).init(zero.device());
            let refused = optimizer.step(LR, &mut replaced);
            assert!(
                matches!(refused, Err(ZeroError::ModelChanged { .. })),
                "replaced at {stage}: {refused:?}"
            );
            let mut detached = model.clone();
            detached.scale = detached.scale.map(|scale| scale);
            assert!(optimizer.step(LR, &mut detached).is_err(), "detached at {stage}");
            // The engine's own model is as good as before.
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn a_loss_from_before_a_step_is_refused_on_every_rank() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 3, |comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            let old = model.loss(rows(0, 0..2, zero.device()), 0);
            zero.backward(model.loss(rows(1, 0..2, zero.device()), 0))?;
            optimizer.step(LR, &mut model)?;
            // On one rank alone: the others learn of it.
            let stale = comm.rank().index() == 1;
            let loss = if stale { old } else { model.loss(rows(0, 0..2, zero.device()), 0) };
            let error = zero.backward(loss).expect_err("one loss is stale");
            assert_eq!(matches!(error, ZeroError::StaleLoss { .. }), stale, "{error}");
            assert!(stale || error.to_string().contains("rank 1"), "{error}");
            zero.backward(model.loss(rows(2, 0..2, zero.device()), 0))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn another_learning_rate_on_one_rank_is_named() {
    let error = LocalWorld::new(common::world(2))
        .run(|comm| {
            let zero = Zero::new(config(Stage::Zero), &comm, Device::default())?;
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            zero.backward(model.loss(rows(0, 0..2, zero.device()), 0))?;
            optimizer.step(if comm.rank().index() == 1 { 0.25 } else { 0.5 }, &mut model).map(drop)
        })
        .expect_err("the rates differ");
    let text = error.to_string();
    assert!(text.contains("0.25") && text.contains("0.5"), "{text}");
}

#[test]
fn no_rank_waits_for_one_that_refuses() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 3, |comm, zero| {
            let alone = comm.rank().index() == 1;
            let told = |result: Result<(), ZeroError>, here: fn(&ZeroError) -> bool| match result {
                Err(error) if alone => assert!(here(&error), "{error} at {stage}"),
                Err(ZeroError::RefusedElsewhere { rank } | ZeroError::BackwardFailed { rank, .. }) => {
                    assert_eq!(rank.index(), 1);
                }
                other => panic!("{other:?} at {stage}"),
            };
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(SgdConfig::new().build())?;
            let loss = |model: &Odd| model.loss(rows(0, 0..2, zero.device()), 0);

            let untracked = Tensor::<1>::ones([1], zero.device());
            let result = zero.backward(if alone { untracked } else { loss(&model) });
            told(result, |error| matches!(error, ZeroError::LossUntracked));

            zero.backward(loss(&model))?;
            let result = optimizer.step(if alone { f64::NAN } else { LR }, &mut model);
            told(result.map(drop), |error| matches!(error, ZeroError::InvalidLearningRate { .. }));
            assert!(optimizer.step(LR, &mut model)?.applied, "what was refused changed nothing");

            if alone {
                drop(loss(&model).backward());
            }
            let result = zero.freeze(model.clone(), "input.*");
            told(result.map(drop), |error| matches!(error, ZeroError::StrayGradient { .. }));
            let mut model = zero.freeze(model, "input.*")?;
            zero.backward(loss(&model))?;
            assert!(optimizer.step(LR, &mut model)?.applied);
            Ok(())
        });
    }
}

#[test]
fn a_misuse_is_told_where_layers_compute_in_16_bits() {
    use burn::module::Module as _;
    for stage in Stage::ALL {
        let mut config = config(stage);
        config.precision.compute = DType::BF16;
        with_engines(&config, 2, |_comm, zero| {
            let model = zero.shard(Odd::new)?;
            let record = zero.unshard(&model)?.into_record();
            let refused = zero.unshard(&model.clone().load_record(record));
            assert!(matches!(refused, Err(ZeroError::ModelChanged { .. })), "{stage}: {refused:?}");
            let idle = zero.memory()?.idle;
            drop(zero.unshard(&model)?);
            assert_eq!(zero.memory()?.idle, idle, "a copy leaves no memory behind at {stage}");
            Ok(())
        });
    }
}

#[test]
fn a_value_loaded_into_a_sharded_model_is_refused_at_once() {
    use burn::module::Module as _;
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |_comm, zero| {
            let model = zero.shard(Odd::new)?;
            let record = zero.unshard(&model)?.into_record();
            let loaded = model.load_record(record);
            let refused = zero.unshard(&loaded);
            assert!(matches!(refused, Err(ZeroError::ModelChanged { .. })), "{stage}: {refused:?}");
            Ok(())
        });
    }
}

#[test]
fn forwards_without_backward_share_what_they_gather() {
    with_engines(&config(Stage::Three), 2, |_comm, zero| {
        let embedding = zero.shard(|device| burn::nn::EmbeddingConfig::new(100, 8).init(device))?;
        let ids = Tensor::<2, burn::tensor::Int>::zeros([1, 3], zero.device());
        for _ in 0..10 {
            drop(embedding.forward(ids.clone()));
        }
        // Burn keeps the tapes until another backward; they hold one table among them.
        assert!(zero.memory()?.gathered.get() <= 100 * 8 * 4, "{:?}", zero.memory()?);
        Ok(())
    });
}

#[test]
fn two_engines_of_different_stages_take_turns() {
    let alone = |stage| train(stage, 3, Mishap::None, |_| false);
    let (expected_first, expected_second) = (alone(Stage::Three), alone(Stage::One));
    with_engines(&config(Stage::Three), 3, |comm, first| {
        let second = Zero::new(config(Stage::One), comm, Device::default())?;
        let mut models = [first.shard(Odd::new)?, second.shard(Odd::new)?];
        let mut optimizers = [first.optimizer(adamw().build())?, second.optimizer(adamw().build())?];
        let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
        let mut runs = [Run::new(), Run::new()];
        for step in 0..STEPS {
            for (at, zero) in [&first, &second].into_iter().enumerate() {
                zero.backward(models[at].loss(rows(step, share.clone(), zero.device()), 0))?;
                runs[at].record(&optimizers[at].step(LR, &mut models[at])?);
            }
        }
        assert_eq!(runs[0].losses, expected_first.losses);
        assert_eq!(runs[1].losses, expected_second.losses);
        Ok(())
    });
}
