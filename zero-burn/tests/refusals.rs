//! Calls that are refused, or fail, on one rank only.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use common::{Body, LR, Odd, Weights, adamw, config, processes, rows, weights, world};
use zero_burn::{
    Adam, Communicator, Fused, GroupRate, LocalWorld, Offload, Partition, ReduceGradients, ShardOptimizer,
    Stage, Zero, ZeroConfig, ZeroError, ZeroOptimizer,
};

fn threads<T: Send>(config: &ZeroConfig, size: usize, body: Body<'_, T>) -> Vec<T> {
    LocalWorld::new(world(size)).with_deadline(config.deadline()).run(|comm| body(&comm)).unwrap()
}

/// Waits for all replicas (a `ModuleVisitor` sees stand-ins, which waits for none).
fn touch(model: &Odd) {
    let model = model.valid();
    let layers = [&model.input, &model.frozen, &model.shared, &model.tied, &model.unused, &model.output];
    for layer in model.blocks.iter().chain(layers) {
        drop((layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val())));
    }
    drop((model.scale.val(), model.nothing.val()));
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Refusal {
    Calm,
    NotScalar,
    Untracked,
    Weight(f64),
    StaleLoss,
    StrayGradient,
    NotANumberRate,
    NegativeRate,
    ForeignModel,
    ChangedModel,
    FreezeChangedModel,
    FreezeForeign,
    ExtendForeign,
    ExtendPending,
    FreezeNothing,
    NothingToStep,
    RecordLoaded,
    GroupOfNothing,
    EvaluateNothing,
}

use Refusal::*;

const REFUSALS: [Refusal; 20] = [
    NotScalar,
    Untracked,
    Weight(0.0),
    Weight(f64::NAN),
    Weight(-1.0),
    StaleLoss,
    StrayGradient,
    NotANumberRate,
    NegativeRate,
    ForeignModel,
    ChangedModel,
    FreezeChangedModel,
    FreezeForeign,
    ExtendForeign,
    ExtendPending,
    FreezeNothing,
    NothingToStep,
    RecordLoaded,
    GroupOfNothing,
    EvaluateNothing,
];

/// What rank `hit` gets, and what the others do.
fn told<T>(outcome: Result<T, ZeroError>, here: bool, hit: usize, what: Refusal) {
    let Err(error) = outcome else { panic!("{what:?} went through") };
    let text = error.to_string();
    if here {
        assert!(
            !matches!(error, ZeroError::RefusedElsewhere { .. } | ZeroError::Communication { .. }),
            "{what:?}: {text}"
        );
    } else {
        assert!(
            matches!(error, ZeroError::RefusedElsewhere { .. } | ZeroError::BackwardFailed { .. }),
            "{what:?}: {text}"
        );
        assert!(text.contains(&format!("rank {hit}")), "{what:?}: {text}");
    }
}

fn changed(mut model: Odd) -> Odd {
    model.scale = model.scale.map(|value| value * 2.0);
    model
}

fn suffer<O: ShardOptimizer>(
    what: Refusal,
    hit: usize,
    zero: &Zero,
    model: &mut Odd,
    (optimizer, rule): (&mut ZeroOptimizer<O>, &O),
    step: usize,
) -> Result<(), ZeroError> {
    let rank = zero.communicator().rank().index();
    let here = rank == hit;
    let loss = |model: &Odd| model.loss(rows(step, 0..2, zero.device()), 0);
    let foreign = || Odd::new(zero.device());
    match what {
        Calm => {}
        NotScalar => {
            let outcome = match here {
                true => zero.backward(model.input.forward(rows(step, 0..2, zero.device()))),
                false => zero.backward(loss(model)),
            };
            told(outcome, here, hit, what);
        }
        Untracked => {
            let loss = if here { loss(model).detach() } else { loss(model) };
            told(zero.backward(loss), here, hit, what);
        }
        Weight(weight) => {
            told(zero.backward_weighted(loss(model), if here { weight } else { 1.0 }), here, hit, what);
        }
        StaleLoss => {
            let old = loss(model);
            zero.backward(loss(model))?;
            // A step that is not applied does not make it stale.
            optimizer.step(0.0, model)?;
            let outcome = zero.backward(if here { old } else { loss(model) });
            told(outcome, here, hit, what);
        }
        StrayGradient => {
            if here {
                drop(loss(model).backward());
            }
            told(zero.backward(loss(model)), here, hit, what);
        }
        NotANumberRate | NegativeRate | ForeignModel | ChangedModel => {
            zero.backward(loss(model))?;
            let (rate, mut given) = match what {
                _ if !here => (LR, model.clone()),
                NotANumberRate => (f64::INFINITY, model.clone()),
                NegativeRate => (-1.0, model.clone()),
                ForeignModel => (LR, foreign()),
                _ => (LR, changed(model.clone())),
            };
            told(optimizer.step(rate, &mut given), here, hit, what);
            // Then the gradients are of no use.
            let outcome = match here {
                true => zero.backward(loss(model).detach()),
                false => zero.backward(loss(model)),
            };
            told(outcome, here, hit, what);
        }
        FreezeChangedModel => {
            let given = if here { changed(model.clone()) } else { model.clone() };
            told(zero.freeze(given, "*"), here, hit, what);
        }
        FreezeForeign => {
            let given = if here { foreign() } else { model.clone() };
            told(zero.freeze(given, "*"), here, hit, what);
        }
        ExtendForeign => {
            let given = if here { foreign() } else { model.clone() };
            told(zero.extend(given, |model, _| model), here, hit, what);
        }
        ExtendPending => {
            zero.backward(loss(model))?;
            assert!(matches!(zero.extend(model.clone(), |m, _| m), Err(ZeroError::GradientsPending)));
            assert!(matches!(zero.freeze(model.clone(), "*"), Err(ZeroError::GradientsPending)));
            assert!(zero.backward(loss(model).detach()).is_err());
        }
        FreezeNothing => {
            assert!(matches!(zero.freeze(model.clone(), "nosuch"), Err(ZeroError::NoSuchParameter { .. })));
        }
        NothingToStep => {
            assert!(matches!(optimizer.step(LR, model), Err(ZeroError::NothingToStep)));
            zero.skip_backward()?;
            assert!(matches!(optimizer.step(LR, model), Err(ZeroError::NothingToStep)));
        }
        RecordLoaded => {
            let record = model.clone().into_record();
            let given = match here {
                true => model.clone().load_record(record),
                false => {
                    drop(record);
                    model.clone()
                }
            };
            told(zero.backward(loss(model)), here, hit, what);
            drop(given);
        }
        GroupOfNothing => {
            if here {
                let other = zero.optimizer(rule.clone())?;
                let group = other.group("nosuch", rule.clone(), GroupRate::Times(1.0));
                assert!(matches!(group, Err(ZeroError::EmptyGroup { .. })));
                let other = zero.optimizer(rule.clone())?;
                let group = other.group("*", rule.clone(), GroupRate::Own(f64::NAN));
                assert!(matches!(group, Err(ZeroError::InvalidLearningRate { .. })));
            }
        }
        EvaluateNothing => {
            if here {
                drop(zero.unshard(model)?);
                let _: Vec<Param<Tensor<2>>> = vec![model.input.weight.clone()];
            }
        }
    }
    Ok(())
}

fn train<O: ShardOptimizer>(
    config: &ZeroConfig,
    comm: &Arc<dyn Communicator>,
    rule: O,
    (what, hit): (Refusal, usize),
) -> Result<(Vec<(f64, f64)>, Weights), ZeroError> {
    let zero = Zero::new(config.clone(), comm, Device::default())?;
    let mut model = zero.shard(Odd::new)?;
    let mut optimizer = zero.optimizer(rule.clone())?;
    let share = Partition::new(10, comm.world_size()).range(comm.rank());
    let mut outcomes = Vec::new();
    for step in 0..4 {
        if step == 2 && what != Refusal::StaleLoss {
            suffer(what, hit, &zero, &mut model, (&mut optimizer, &rule), step)?;
        }
        for micro in 0..2 {
            zero.backward(model.loss(rows(step * 3 + micro, share.clone(), zero.device()), 0))?;
        }
        let outcome = optimizer.step(LR, &mut model)?;
        outcomes.push((outcome.loss, outcome.grad_norm));
    }
    if what == Refusal::StaleLoss {
        optimizer.flush()?;
        suffer(what, hit, &zero, &mut model, (&mut optimizer, &rule), 7)?;
        return Ok((outcomes, Vec::new()));
    }
    // `flush` right after `step` is another test's (break_delay): all replicas have come before this one.
    touch(&model);
    comm.barrier("all replicas are here").unwrap();
    optimizer.flush()?;
    Ok((outcomes, weights(&zero.unshard(&model)?)))
}

fn attack<O: ShardOptimizer + Sync>(
    rule: &O,
    configure: impl Fn(Stage) -> ZeroConfig,
    sizes: &[usize],
    skip: &[Refusal],
) {
    for stage in Stage::ALL {
        let config = configure(stage);
        for &size in sizes {
            let expected = threads(&config, size, &|comm| train(&config, comm, rule.clone(), (Calm, 0)));
            for what in REFUSALS.into_iter().filter(|what| !skip.contains(what)) {
                for hit in [0, size - 1] {
                    let begun = Instant::now();
                    eprintln!("{stage} {size} {what:?} on {hit}");
                    let found =
                        threads(&config, size, &|comm| train(&config, comm, rule.clone(), (what, hit)));
                    assert!(begun.elapsed() < Duration::from_secs(10), "{stage} {size} {what:?} hung");
                    for ((losses, weights), (expected, expected_weights)) in found.iter().zip(&expected) {
                        assert_eq!(losses, expected, "{stage} {size} {what:?} on {hit}");
                        if what != StaleLoss {
                            assert_eq!(weights, expected_weights, "{stage} {size} {what:?} on {hit}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn refusals_change_nothing_with_fused() {
    attack(&Fused::new(Adam::ADAMW).unwrap(), config, &[1, 2, 3, 5], &[]);
}

#[test]
fn refusals_change_nothing_with_burns_optimizer() {
    attack(&adamw().build(), config, &[1, 3], &[NegativeRate]);
}

#[test]
fn refusals_change_nothing_with_the_other_time_to_reduce_and_without_overlap() {
    let configure = |stage: Stage| {
        let other = match ReduceGradients::of_stage(stage) {
            ReduceGradients::AtStep => ReduceGradients::EveryBackward,
            _ => ReduceGradients::AtStep,
        };
        ZeroConfig {
            reduce_gradients: Some(other),
            overlap: false,
            lookahead_bytes: ZeroConfig::default().lookahead_bytes,
            ..config(stage)
        }
    };
    attack(&Fused::new(Adam::ADAMW).unwrap(), configure, &[2, 3], &[]);
}

#[test]
fn refusals_change_nothing_with_delayed_updates() {
    let configure = |stage| ZeroConfig {
        offload: Offload { delayed_update: true, exact_steps: 1, ..Offload::default() },
        ..config(stage)
    };
    // Freezing is refused anyway; records are refused; unshard is.
    let skip = [
        StaleLoss,
        ExtendPending,
        FreezeNothing,
        RecordLoaded,
        EvaluateNothing,
        FreezeForeign,
        FreezeChangedModel,
        ExtendForeign,
    ];
    attack(&Fused::new(Adam::ADAMW).unwrap(), configure, &[1, 2, 3], &skip);
}

/// Ranks as processes have them, on one host, on two, and each on its own.
#[test]
fn refusals_change_nothing_over_processes() {
    let rule = Fused::new(Adam::ADAMW).unwrap();
    for stage in [Stage::Zero, Stage::Two, Stage::Three] {
        for delayed in [false, true] {
            let config = ZeroConfig {
                offload: Offload { delayed_update: delayed, exact_steps: 1, ..Offload::default() },
                ..config(stage)
            };
            let size = 3;
            let expected = threads(&config, size, &|comm| train(&config, comm, rule, (Calm, 0)));
            for host in [(|_| 0) as fn(usize) -> usize, |rank| rank / 2, |rank| rank] {
                for what in [
                    Calm,
                    Untracked,
                    StrayGradient,
                    NotANumberRate,
                    ChangedModel,
                    NothingToStep,
                    GroupOfNothing,
                ] {
                    let begun = Instant::now();
                    let found = processes(&config, size, &|comm| train(&config, comm, rule, (what, 1)), host);
                    assert!(begun.elapsed() < Duration::from_secs(15), "{stage} {what:?} hung");
                    assert_eq!(found, expected, "{stage} {what:?} delayed {delayed}");
                }
            }
        }
    }
}

/// Burn's way back from `valid`: the same handle to the same parameters.
fn to_valid_and_back(stage: Stage, size: usize) {
    let config = config(stage);
    let run = |back: bool| {
        threads(&config, size, &|comm| {
            let zero = Zero::new(config.clone(), comm, Device::default())?;
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
            for step in 0..3 {
                if back {
                    model = model.valid().train();
                }
                zero.backward(model.loss(rows(step, 0..2, zero.device()), 0))?;
                optimizer.step(LR, &mut model)?;
            }
            Ok(weights(&zero.unshard(&model)?))
        })
    };
    assert_eq!(run(true), run(false), "{stage} {size}");
}

#[test]
fn valid_and_train_again_stage_0() {
    to_valid_and_back(Stage::Zero, 2);
}
#[test]
fn valid_and_train_again_stage_3_alone() {
    to_valid_and_back(Stage::Three, 1);
}
/// `RefusedElsewhere` says that nothing has changed on any rank; so the same call again is the way to go on.
#[test]
fn refused_elsewhere_for_a_disk_says_what_became_of_the_gradients() {
    let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let config = config(Stage::Two);
    threads(&config, 2, &|comm| {
        let rank = comm.rank().index();
        let mut config = config.clone();
        config.offload.optimizer = zero_burn::Placement {
            tier: zero_burn::Tier::Nvme,
            path: Some(directories[rank].path().to_path_buf()),
            fraction: 1.0,
        };
        config.offload.block_bytes = zero_burn::Bytes::new(4096);
        let zero = Zero::new(config, comm, Device::default())?;
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        for step in 0..2 {
            zero.backward(model.loss(rows(step, 0..2, zero.device()), 0))?;
            if step == 0 {
                optimizer.step(LR, &mut model)?;
            }
        }
        comm.barrier("damage").unwrap();
        let run = std::fs::read_dir(directories[1].path()).unwrap().next().unwrap().unwrap().path();
        let data = run.join("data");
        let good = std::fs::read(&data).unwrap();
        comm.barrier("read").unwrap();
        if rank == 1 {
            std::fs::write(&data, good.iter().map(|byte| byte ^ 1).collect::<Vec<_>>()).unwrap();
        }
        let error = optimizer.step(LR, &mut model).unwrap_err();
        comm.barrier("failed").unwrap();
        if rank == 1 {
            std::fs::write(&data, &good).unwrap();
        }
        comm.barrier("repaired").unwrap();
        let again = optimizer.step(LR, &mut model);
        if rank == 0 {
            let text = error.to_string();
            assert!(matches!(error, ZeroError::RefusedElsewhere { .. }), "{text}");
            assert!(
                again.is_ok() || !text.contains("nothing has changed on any rank"),
                "told \"{text}\", then \"{}\"",
                again.unwrap_err()
            );
        }
        Ok(())
    });
}
