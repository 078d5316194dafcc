//! Element-wise optimizers run on shards; others are refused.

mod common;

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, GradientsParams, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::Device;
use common::{LR, Odd, SEED, Weights, config, rows, weights, with_engines};
use zero_burn::{
    Adagrad, Adam, Fused, Lion, OptimizerConfig, Partition, Sgd, ShardOptimizer, Stage, WeightDecay,
    ZeroError, materialize,
};

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
    check_against(&reference(optimizer.clone()), &optimizer);
}

fn check_against(expected: &Weights, optimizer: &(impl ShardOptimizer + Clone + Sync)) {
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
        for ((path, values), (_, expected)) in runs[0].iter().zip(expected) {
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

fn fused(config: impl Into<OptimizerConfig>, burn: impl Optimizer) {
    check_against(&reference(burn), &Fused::new(config).unwrap());
}

#[test]
fn fused_adamw_does_what_burns_does() {
    let config = Adam { epsilon: 1e-5, weight_decay: WeightDecay::Decoupled(0.1), ..Adam::ADAM };
    fused(config, AdamWConfig::new().with_epsilon(1e-5).with_weight_decay(0.1).build());
}

#[test]
fn fused_adam_does_what_burns_does() {
    let decay = Some(WeightDecayConfig::new(0.1));
    let config = Adam { epsilon: 1e-5, weight_decay: WeightDecay::L2(0.1), ..Adam::ADAM };
    fused(config, AdamConfig::new().with_epsilon(1e-5).with_weight_decay(decay).build());
}

#[test]
fn fused_sgd_does_what_burns_does() {
    let momentum = MomentumConfig { momentum: 0.9, dampening: 0.0, nesterov: true };
    let config = Sgd { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: WeightDecay::None };
    fused(config, SgdConfig::new().with_momentum(Some(momentum)).build());
    let config = Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: WeightDecay::None };
    fused(config, SgdConfig::new().build());
}

#[test]
fn fused_lion_does_what_burns_does() {
    let config = Lion { beta1: 0.9, beta2: 0.99, weight_decay: WeightDecay::Decoupled(0.1) };
    fused(config, LionConfig::new().with_beta_1(0.9).with_beta_2(0.99).with_weight_decay(0.1).build());
}

#[test]
fn fused_adagrad_does_what_burns_does() {
    let config =
        Adagrad { lr_decay: 0.01, initial_accumulator: 0.0, epsilon: 1e-5, weight_decay: WeightDecay::None };
    fused(config, AdaGradConfig::new().with_lr_decay(0.01).with_epsilon(1e-5).build());
}

#[test]
fn hyper_parameters_and_rates_out_of_range_are_refused() {
    let error = Fused::new(Adam { beta2: 1.0, ..Adam::ADAMW }).unwrap_err();
    assert!(error.to_string().contains("beta2"), "{error}");
    with_engines(&config(Stage::Two), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        zero.backward(model.loss(rows(0, 0..2, zero.device()), 0))?;
        let refused = optimizer.step(-0.1, &mut model);
        assert!(matches!(refused, Err(ZeroError::InvalidLearningRate { .. })), "{refused:?}");
        assert!(optimizer.step(0.1, &mut model)?.applied);
        Ok(())
    });
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
