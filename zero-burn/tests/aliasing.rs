//! What somebody holds does not change while a fused optimizer updates in place.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use common::{LR, Odd, Weights, config, rows, weights, with_engines};
use zero_burn::{
    Adagrad, Adam, DType, Fused, GroupRate, Lion, Sgd, ShardOptimizer, Stage, WeightDecay, ZeroConfig,
};

fn rules() -> Vec<(&'static str, Fused)> {
    let decay = WeightDecay::Decoupled(0.01);
    vec![
        ("adamw", Fused::new(Adam::ADAMW).unwrap()),
        ("lion", Fused::new(Lion { weight_decay: decay, ..Lion::default() }).unwrap()),
        ("sgd", Fused::new(Sgd::default()).unwrap()),
        ("momentum", Fused::new(Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }).unwrap()),
        ("adagrad", Fused::new(Adagrad { initial_accumulator: 0.1, ..Adagrad::default() }).unwrap()),
    ]
}

fn numbers<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().iter::<f32>().collect()
}

#[test]
fn what_a_user_holds_does_not_change() {
    for (name, rule) in rules() {
        for stage in Stage::ALL {
            for size in [1, 3] {
                for (compute, threshold) in [(DType::F32, 0), (DType::BF16, 0), (DType::F32, 20)] {
                    if threshold > 0 && stage != Stage::Three {
                        continue;
                    }
                    let mut config = config(stage);
                    config.precision.compute = compute;
                    config.persistence_threshold = threshold;
                    with_engines(&config, size, |_, zero| {
                        let float = if compute == DType::BF16 {
                            burn::tensor::FloatDType::BF16
                        } else {
                            burn::tensor::FloatDType::F32
                        };
                        let mut model = zero.shard(Odd::new)?;
                        let mut optimizer = zero.optimizer(rule)?;
                        let mut held: Vec<(usize, Weights, Odd)> = Vec::new();
                        let mut tensors: Vec<(Vec<f32>, Tensor<2>)> = Vec::new();
                        let mut views: Vec<(Vec<f32>, Tensor<2>)> = Vec::new();
                        for step in 0..4 {
                            let unsharded = zero.unshard(&model)?;
                            held.push((step, weights(&unsharded), unsharded));
                            for linear in model.blocks.iter().chain([&model.input, &model.output]) {
                                let weight = linear.weight.val();
                                tensors.push((numbers(&weight), weight.clone()));
                                let view = weight.inner().transpose().narrow(0, 0, 1);
                                views.push((numbers(&view), view));
                                let weight = linear.valid().weight.val();
                                tensors.push((numbers(&weight), weight));
                            }
                            let record = model.clone().into_record();
                            let valid = model.valid();
                            let output = valid
                                .input
                                .forward(rows(step, 0..2, &zero.device().clone().inner()).cast(float));
                            tensors.push((numbers(&output), output));
                            let rows = rows(step, 0..4, zero.device()).cast(float);
                            // A tape that is alive over the step.
                            let alive = model.loss(rows.clone(), 0);
                            zero.backward(model.loss(rows, 0))?;
                            optimizer.step(LR, &mut model)?;
                            drop((alive, record));
                            for (at, expected, model) in &held {
                                assert_eq!(
                                    weights(model),
                                    *expected,
                                    "{name} {stage} {size}: unsharded at {at}"
                                );
                            }
                            for (expected, tensor) in tensors.iter().chain(&views) {
                                assert_eq!(numbers(tensor), *expected, "{name} {stage} {size} at {step}");
                            }
                        }
                        Ok(())
                    });
                }
            }
        }
    }
}

/// Training with everything held equals training with nothing held.
#[test]
fn what_is_held_changes_no_bit() {
    let run = |config: &ZeroConfig, rule: Fused, size: usize, hold: bool| {
        with_engines(config, size, |comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(rule)?.group(
                "*bias",
                Fused::new(Sgd { momentum: 0.5, ..Sgd::default() })?,
                GroupRate::Times(0.5),
            )?;
            let mut held = Vec::new();
            let mut losses = Vec::new();
            for step in 0..8 {
                match step {
                    2 => model = zero.freeze(model, "blocks.*")?,
                    4 => model = zero.unfreeze(model, "*")?,
                    _ => {}
                }
                if hold {
                    held.push((zero.unshard(&model)?, model.clone().into_record(), model.valid()));
                    let valid = model.valid();
                    for _ in 0..comm.rank().index() {
                        drop(valid.loss(rows(step, 0..2, &zero.device().clone().inner()), 0));
                    }
                }
                zero.backward(model.loss(rows(step, 0..3, zero.device()), 0))?;
                if hold {
                    held.push((zero.unshard(&model)?, model.clone().into_record(), model.valid()));
                }
                losses.push(optimizer.step(LR, &mut model)?.grad_norm);
            }
            Ok((losses, weights(&zero.unshard(&model)?)))
        })
        .remove(0)
    };
    for (name, rule) in rules() {
        let expected = run(&config(Stage::Zero), rule, 3, false);
        for stage in Stage::ALL {
            assert_eq!(run(&config(stage), rule, 3, true), expected, "{name} {stage}");
            assert_eq!(run(&config(stage), rule, 3, false), expected, "{name} {stage}");
            for size in [1, 2, 5] {
                let held = run(&config(stage), rule, size, true);
                assert_eq!(held, run(&config(stage), rule, size, false), "{name} {stage} {size}");
            }
        }
    }
}

fn wide(device: &Device) -> Vec<Linear> {
    (0..4).map(|_| LinearConfig::new(300, 301).init(device)).collect()
}

/// "All others are local and may be made by any rank at any time": `unshard` and forward passes in a thread of their own,
/// while the same rank steps.
fn evaluated_beside(stage: Stage, size: usize, rule: impl ShardOptimizer + Clone + Sync) {
    with_engines(&config(stage), size, |comm, zero| {
        let mut model = zero.shard(wide)?;
        let mut optimizer = zero.optimizer(rule.clone())?;
        let stop = AtomicBool::new(false);
        let eval = model.clone();
        thread::scope(|scope| {
            let (stop, zero_ref) = (&stop, &zero);
            let reader = (comm.rank().index() == 0).then(|| {
                scope.spawn(move || {
                    let mut seen = 0;
                    while !stop.load(Ordering::Acquire) {
                        let whole = zero_ref.unshard(&eval).map_err(|error| error.to_string())?;
                        let nan = weights(&whole).iter().any(|(_, v)| v.iter().any(|v| v.is_nan()));
                        if nan {
                            return Err(String::from("NaN without an error"));
                        }
                        seen += 1;
                    }
                    Ok::<_, String>(seen)
                })
            });
            let mut outcome = Ok(());
            for _ in 0..30 {
                let x = Tensor::<2>::ones([2, 300], zero.device());
                let loss = model.iter().map(|l| l.forward(x.clone()).square().mean()).reduce(|a, b| a + b);
                outcome = zero
                    .backward(loss.unwrap())
                    .and_then(|()| optimizer.step(1e-4, &mut model).map(drop))
                    .map_err(|error| error.to_string());
                if outcome.is_err() {
                    break;
                }
            }
            stop.store(true, Ordering::Release);
            let seen = reader.map(|reader| reader.join().unwrap());
            assert!(outcome.is_ok(), "{stage} on {size}: training: {outcome:?}, reader {seen:?}");
            if let Some(seen) = seen {
                assert!(seen.is_ok(), "{stage} on {size}: {seen:?}");
            }
        });
        Ok(())
    });
}

#[test]
fn unshard_in_another_thread_while_fused_steps_world_1() {
    evaluated_beside(Stage::Three, 1, Fused::new(Adam::ADAMW).unwrap());
}
#[test]
fn unshard_in_another_thread_while_fused_steps_stage_3() {
    evaluated_beside(Stage::Three, 2, Fused::new(Adam::ADAMW).unwrap());
}
#[test]
fn unshard_in_another_thread_while_fused_steps_stage_2() {
    evaluated_beside(Stage::Two, 2, Fused::new(Adam::ADAMW).unwrap());
}
#[test]
fn unshard_in_another_thread_while_burn_steps_world_1() {
    evaluated_beside(Stage::Three, 1, common::adamw().build());
}
#[test]
fn unshard_in_another_thread_while_burn_steps_stage_3() {
    evaluated_beside(Stage::Three, 2, common::adamw().build());
}

/// Two engines in one process and one loss; extend with Fused; a model of odd sizes.
#[test]
fn two_fused_engines_do_not_disturb_each_other() {
    let run = |both: bool| {
        common::with_engines(&config(Stage::Three), 3, |comm, zero| {
            let second = match both {
                true => {
                    let second = zero_burn::Zero::new(config(Stage::Two), comm, Device::default())?;
                    let model = second.shard(Odd::new)?;
                    let optimizer = second.optimizer(Fused::new(Lion::default())?)?;
                    Some((second, model, optimizer))
                }
                false => None,
            };
            let mut second = second;
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
            for step in 0..5 {
                if let Some((second, model, optimizer)) = &mut second {
                    second.backward(model.loss(rows(step, 0..2, second.device()), 0))?;
                    optimizer.step(LR, model)?;
                }
                zero.backward(model.loss(rows(step, 0..3, zero.device()), 0))?;
                optimizer.step(LR, &mut model)?;
            }
            Ok(weights(&zero.unshard(&model)?))
        })
        .remove(0)
    };
    assert_eq!(run(true), run(false));
}
