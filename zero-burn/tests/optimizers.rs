//! Element-wise optimizers run on shards; others are refused.

mod common;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, GradientsParams, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::Device;
use common::{LR, Odd, SEED, Weights, config, rows, weights, with_engines};
use zero_burn::{Partition, Stage, ZeroError, materialize};

const STEPS: usize = 4;
const BATCH: usize = 6;
/// Steps move weights by about 1e-2; sums over ranks round differently from one sum.
const TOLERANCE: f32 = 2e-5;

fn reference(optimizer: impl Optimizer) -> Weights {
    let device = Device::default().autodiff();
    let mut model = materialize(&device, SEED, Odd::new);
    let mut optimizer = ModuleOptimizer::from(optimizer);
    for step in 0..STEPS {
        // Without the tied layer, which Burn's optimizers update apart.
        let loss =
            model.blocks[0].forward(model.input.forward(rows(step, 0..BATCH, &device))).square().mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LR, model, gradients);
    }
    weights(&model)
}

fn check(optimizer: impl Optimizer) {
    let expected = reference(optimizer.clone());
    for stage in Stage::ALL {
        let runs = with_engines(&config(stage), 3, |comm, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(optimizer.clone())?;
            let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
            for step in 0..STEPS {
                let input = rows(step, share.clone(), zero.device());
                zero.backward(model.blocks[0].forward(model.input.forward(input)).square().mean())?;
                optimizer.step(LR, &mut model)?;
            }
            Ok(weights(&zero.unshard(&model)?))
        });
        assert_eq!(runs[0].len(), expected.len());
        for ((path, values), (_, expected)) in runs[0].iter().zip(&expected) {
            assert_eq!(values.len(), expected.len(), "{path}");
            for (value, expected) in values.iter().zip(expected) {
                assert!(
                    (value - expected).abs() < TOLERANCE,
                    "{path} at {stage}: {value} instead of {expected}"
                );
            }
        }
    }
}

#[test]
fn adamw_runs_on_shards() {
    check(AdamWConfig::new().with_weight_decay(0.1).build());
}

#[test]
fn adam_runs_on_shards() {
    check(AdamConfig::new().build());
}

#[test]
fn sgd_with_momentum_runs_on_shards() {
    check(SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9))).build());
}

#[test]
fn sgd_without_state_runs_on_shards() {
    check(SgdConfig::new().build());
}

#[test]
fn lion_runs_on_shards() {
    check(LionConfig::new().build());
}

#[test]
fn rmsprop_runs_on_shards() {
    check(RmsPropConfig::new().build());
}

#[test]
fn adagrad_runs_on_shards() {
    check(AdaGradConfig::new().build());
}

fn refused(optimizer: impl Optimizer, name: &str) {
    with_engines(&config(Stage::Three), 2, |_comm, zero| {
        zero.shard(Odd::new)?;
        match zero.optimizer(optimizer.clone()) {
            Err(error @ ZeroError::NotElementwise { .. }) => {
                let text = error.to_string();
                assert!(text.contains(name) && text.contains("element-wise"), "{text}");
            }
            other => panic!("{name} gives {other:?}"),
        }
        Ok(())
    });
}

#[test]
fn optimizers_that_need_whole_matrices_are_refused() {
    refused(MuonConfig::new().build(), "Muon");
    refused(AdafactorConfig::new().build(), "Adafactor");
    refused(LambConfig::new().build(), "Lamb");
}
