//! A flush right after a step makes the step an exact one, whatever is still on its way.

mod common;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use common::{LR, Weights, config, weights, with_engines};
use zero_burn::{Bytes, Fused, Offload, Sgd, Stage, ZeroConfig};

fn delayed(config: ZeroConfig, exact_steps: u64) -> ZeroConfig {
    let offload = Offload { delayed_update: true, exact_steps, ..config.offload.clone() };
    ZeroConfig { offload, ..config }
}

/// Large enough that replicas are renewed for a while after a step.
fn big(device: &Device) -> Vec<Linear> {
    (0..6).map(|_| LinearConfig::new(500, 501).init(device)).collect()
}

fn big_loss(model: &[Linear], device: &Device) -> Tensor<1> {
    let x = Tensor::<2>::ones([1, 500], device);
    let parts: Vec<_> = model.iter().map(|layer| layer.forward(x.clone()).square().mean()).collect();
    parts.into_iter().reduce(|a, b| a + b).unwrap()
}

/// `flush` right after `step`, again and again: exact training, said otherwise.
fn flushed_at_once(config: &ZeroConfig, size: usize, steps: usize, flush: bool) -> Vec<Weights> {
    with_engines(config, size, |_, zero| {
        let mut model = zero.shard(big)?;
        let mut optimizer = zero.optimizer(Fused::new(Sgd::default())?)?;
        for _ in 0..steps {
            zero.backward(big_loss(&model, zero.device()))?;
            optimizer.step(LR, &mut model)?;
            if flush {
                optimizer.flush()?;
            }
        }
        optimizer.flush()?;
        Ok(weights(&zero.unshard(&model)?))
    })
}

fn flush_race(stage: Stage, size: usize) {
    let mut base = config(stage);
    base.bucket_bytes = Bytes::new(4 << 20);
    let exact = flushed_at_once(&base, size, 12, false);
    for _ in 0..3 {
        let flushed = flushed_at_once(&delayed(base.clone(), 0), size, 12, true);
        for (rank, (flushed, exact)) in flushed.iter().zip(&exact).enumerate() {
            for ((path, a), (_, b)) in flushed.iter().zip(exact) {
                let differing = a.iter().zip(b).filter(|(a, b)| a != b).count();
                assert_eq!(differing, 0, "{stage}, {size} ranks, rank {rank}: `{path}` of {}", a.len());
            }
        }
    }
}

#[test]
fn flush_right_after_step_is_an_exact_step_stage_0() {
    flush_race(Stage::Zero, 2);
}
#[test]
fn flush_right_after_step_is_an_exact_step_stage_1() {
    flush_race(Stage::One, 3);
}
#[test]
fn flush_right_after_step_is_an_exact_step_stage_2() {
    flush_race(Stage::Two, 2);
}
#[test]
fn flush_right_after_step_is_an_exact_step_stage_3() {
    flush_race(Stage::Three, 3);
}

/// A step whose pending update ends, then a flush with nothing in between: replicas of the first are still on their way.
fn flush_after_pending(stage: Stage, size: usize, persistent: bool) {
    let mut base = config(stage);
    base.bucket_bytes = Bytes::new(4 << 20);
    if persistent {
        base.persistence_threshold = usize::MAX >> 2;
    }
    let run = |config: &ZeroConfig, always: bool| {
        with_engines(config, size, |_, zero| {
            let mut model = zero.shard(big)?;
            let mut optimizer = zero.optimizer(Fused::new(Sgd::default())?)?;
            for _ in 0..8 {
                // Two steps on one loss's worth of parameters each, then flushed.
                zero.backward(big_loss(&model, zero.device()))?;
                optimizer.step(LR, &mut model)?;
                if always {
                    // Waits for all replicas.
                    drop(model.valid().iter().map(|layer| layer.weight.val()).collect::<Vec<_>>());
                    zero.communicator().barrier("slow").unwrap();
                }
                zero.backward(big_loss(&model, zero.device()))?;
                optimizer.step(LR, &mut model)?;
                if always {
                    drop(
                        model
                            .valid()
                            .iter()
                            .map(|layer| (layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val())))
                            .collect::<Vec<_>>(),
                    );
                    zero.communicator().barrier("slow").unwrap();
                }
                optimizer.flush()?;
            }
            Ok(weights(&zero.unshard(&model)?))
        })
    };
    let config = delayed(base, 0);
    let careful = run(&config, true);
    for _ in 0..3 {
        let quick = run(&config, false);
        for (rank, (quick, careful)) in quick.iter().zip(&careful).enumerate() {
            for ((path, a), (_, b)) in quick.iter().zip(careful) {
                let differing = a.iter().zip(b).filter(|(a, b)| a != b).count();
                assert_eq!(differing, 0, "{stage}, {size} ranks, rank {rank}: `{path}` of {}", a.len());
            }
        }
    }
}

#[test]
fn flush_while_replicas_come_stage_1() {
    flush_after_pending(Stage::One, 3, false);
}
#[test]
fn flush_while_replicas_come_stage_2() {
    flush_after_pending(Stage::Two, 2, false);
}
#[test]
fn flush_while_replicas_come_stage_3_persistent() {
    flush_after_pending(Stage::Three, 3, true);
}
