//! What optimizers compute, against PyTorch and plain arithmetic in `f64`, and what they refuse.

mod common;

use common::{Numbers, Slice, Slices, UPDATE, configs};
use half::{bf16, f16};
use serde::Deserialize;
use zero_core::DType;
use zero_offload::{
    Adagrad, Adam, FloatsMut, HostOptimizer, HyperParameterError, Lion, OptimizerConfig, Sgd, Update,
    UpdateError, WeightDecay, Workers,
};

/// Half a unit in the last place of 1, in f32.
const U: f64 = 1.0 / (1u32 << 24) as f64;

/// Recorded runs of PyTorch in f64 are followed to this: the parameter is rounded at first and by each step, its direction
/// a few times. Of Adam's, the first moment is off by a few `U` of the largest gradient, which is at most the root of the
/// number of steps times the divisor.
fn tolerance(step: usize, parameter: f64, lr: f64) -> f64 {
    U * ((step + 1) as f64 * parameter.abs() + step as f64 * 64.0 * lr)
}

/// The states that an optimizer begins with.
fn fresh(optimizer: &HostOptimizer, len: usize) -> Vec<Slice> {
    optimizer.states().iter().map(|state| Slice::F32(vec![state.initial; len])).collect()
}

fn follow(optimizer: HostOptimizer, lr: f64, init: &[f64], grads: &[Vec<f64>], params: &[Vec<f64>]) {
    let single = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<_>>();
    assert!(!grads.is_empty() && grads.len() == params.len());
    let mut slices = Slices {
        parameters: single(init),
        gradient: Slice::F32(vec![]),
        states: fresh(&optimizer, init.len()),
        copy: None,
    };
    for (step, (grads, params)) in (1..).zip(grads.iter().zip(params)) {
        // As a loss scale of 4 would make it.
        slices.gradient = Slice::F32(single(grads).iter().map(|value| value * 4.0).collect());
        let update = Update { lr, step: step as u64, gradient_factor: 0.25 };
        slices.update(&optimizer, &Workers::alone(), update);
        for (&found, &expected) in slices.parameters.iter().zip(params) {
            let off = (f64::from(found) - expected).abs();
            assert!(
                off <= tolerance(step, expected, lr),
                "step {step}: {found} for {expected}, off by {off:e}, {optimizer:?}",
            );
        }
    }
}

#[derive(Deserialize)]
struct RecordedAdam {
    decoupled_weight_decay: bool,
    lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    init: Vec<f64>,
    grads: Vec<Vec<f64>>,
    params: Vec<Vec<f64>>,
}

#[test]
fn adam_and_adamw_follow_pytorch() {
    let runs: Vec<RecordedAdam> = serde_json::from_str(include_str!("vectors/adamw.json")).unwrap();
    assert_eq!(runs.len(), 8);
    for run in runs {
        let weight_decay = match run.decoupled_weight_decay {
            true => WeightDecay::Decoupled(run.weight_decay),
            false => WeightDecay::L2(run.weight_decay),
        };
        let [beta1, beta2] = run.betas;
        let optimizer = HostOptimizer::new(Adam { beta1, beta2, epsilon: run.eps, weight_decay }).unwrap();
        follow(optimizer, run.lr, &run.init, &run.grads, &run.params);
    }
}

/// A run that `vectors/torch_optimizers.py` recorded.
#[derive(Deserialize)]
struct Recorded {
    name: String,
    options: Options,
    init: Vec<f64>,
    grads: Vec<Vec<f64>>,
    params: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    lr: f64,
    #[serde(default)]
    weight_decay: f64,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    dampening: f64,
    #[serde(default)]
    nesterov: bool,
    #[serde(default)]
    lr_decay: f64,
    #[serde(default)]
    initial_accumulator_value: f64,
    #[serde(default = "default_epsilon")]
    eps: f64,
}

fn default_epsilon() -> f64 {
    Adagrad::default().epsilon
}

#[test]
fn sgd_and_adagrad_follow_pytorch() {
    let runs: Vec<Recorded> = serde_json::from_str(include_str!("vectors/torch_optimizers.json")).unwrap();
    assert_eq!(runs.len(), 8);
    for Recorded { name, options, init, grads, params } in runs {
        let weight_decay = WeightDecay::L2(options.weight_decay);
        let config: OptimizerConfig = match &*name {
            "SGD" => {
                let Options { momentum, dampening, nesterov, .. } = options;
                Sgd { momentum, dampening, nesterov, weight_decay }.into()
            }
            "Adagrad" => {
                let (lr_decay, epsilon) = (options.lr_decay, options.eps);
                let initial_accumulator = options.initial_accumulator_value;
                Adagrad { lr_decay, initial_accumulator, epsilon, weight_decay }.into()
            }
            other => panic!("no such optimizer: {other}"),
        };
        follow(HostOptimizer::new(config).unwrap(), options.lr, &init, &grads, &params);
    }
}

/// One update of one parameter in f64: the parameter, the states, and what each state may be off by.
fn reference(
    config: &OptimizerConfig,
    Update { lr, step, gradient_factor }: Update,
    parameter: f64,
    gradient: f64,
    states: &[f64],
) -> (f64, f64, Vec<(f64, f64)>) {
    let mut gradient = gradient * gradient_factor;
    let weight_decay = match *config {
        OptimizerConfig::Adam(Adam { weight_decay, .. })
        | OptimizerConfig::Adagrad(Adagrad { weight_decay, .. })
        | OptimizerConfig::Lion(Lion { weight_decay, .. })
        | OptimizerConfig::Sgd(Sgd { weight_decay, .. }) => weight_decay,
        _ => panic!("no such optimizer: {config:?}"),
    };
    let mut decayed = 0.0;
    let size = gradient.abs() + parameter.abs();
    match weight_decay {
        WeightDecay::None => {}
        WeightDecay::L2(rate) => gradient += rate * parameter,
        WeightDecay::Decoupled(rate) => decayed = lr * rate * parameter,
    }
    // What a sum of a state and a gradient may be off by.
    let off = |state: f64| 4.0 * U * (size + state.abs());
    let (step_size, direction, direction_off, states) = match *config {
        OptimizerConfig::Adam(Adam { beta1, beta2, epsilon, .. }) => {
            let first = beta1 * states[0] + (1.0 - beta1) * gradient;
            let second = beta2 * states[1] + (1.0 - beta2) * gradient * gradient;
            let correction = |beta: f64| 1.0 - beta.powf(step as f64);
            let divisor = (second / correction(beta2)).sqrt() + epsilon;
            let second_off = 2.0 * off(0.0) * gradient.abs() + 4.0 * U * second;
            // A root is off by half of what is below it, relatively.
            let divisor_off = (second_off / second / 2.0 + 3.0 * U) * divisor;
            let first_off = off(states[0]);
            let direction_off = first_off / divisor + (first / divisor).abs() * divisor_off / divisor;
            (
                lr / correction(beta1),
                first / divisor,
                direction_off,
                vec![(first, first_off), (second, second_off)],
            )
        }
        OptimizerConfig::Adagrad(Adagrad { lr_decay, epsilon, .. }) => {
            let sum = states[0] + gradient * gradient;
            let sum_off = 2.0 * off(0.0) * gradient.abs() + 2.0 * U * sum;
            let divisor = sum.sqrt() + epsilon;
            let direction_off =
                off(0.0) / divisor + (gradient / divisor).abs() * (sum_off / sum / 2.0 + 2.0 * U);
            let step_size = lr / (1.0 + (step - 1) as f64 * lr_decay);
            (step_size, gradient / divisor, direction_off, vec![(sum, sum_off)])
        }
        OptimizerConfig::Lion(Lion { beta1, beta2, .. }) => {
            let mixed = beta1 * states[0] + (1.0 - beta1) * gradient;
            assert!(mixed.abs() > off(states[0]), "the test must not ask for the sign of next to nothing");
            let momentum = beta2 * states[0] + (1.0 - beta2) * gradient;
            (lr, mixed.signum(), 0.0, vec![(momentum, off(states[0]))])
        }
        OptimizerConfig::Sgd(Sgd { momentum: 0.0, .. }) => (lr, gradient, off(0.0), vec![]),
        OptimizerConfig::Sgd(Sgd { momentum, dampening, nesterov, .. }) => {
            let buffer =
                if step == 1 { gradient } else { momentum * states[0] + (1.0 - dampening) * gradient };
            let buffer_off = off(states[0]);
            let direction = if nesterov { gradient + momentum * buffer } else { buffer };
            (lr, direction, 3.0 * buffer_off, vec![(buffer, buffer_off)])
        }
        _ => panic!("no such optimizer: {config:?}"),
    };
    let taken = decayed + step_size * direction;
    let parameter = parameter - taken;
    let taken_off = step_size * direction_off + 3.0 * U * (decayed.abs() + (step_size * direction).abs());
    (parameter, U * parameter.abs() + taken_off, states)
}

#[test]
fn every_step_is_that_of_plain_arithmetic_within_a_few_roundings() {
    const LEN: usize = 300;
    for config in configs() {
        let optimizer = HostOptimizer::new(config).unwrap();
        for gradient in [DType::F32, DType::BF16, DType::F16] {
            for state in [DType::F32, DType::BF16] {
                let mut numbers = Numbers::new(3);
                let mut slices =
                    Slices::new(&optimizer, LEN, [gradient, state], Some(DType::BF16), || numbers.ordinary());
                for state in &mut slices.states {
                    let values: Vec<_> = state.values().iter().map(|value| value.abs()).collect();
                    *state = Slice::new(state.get().dtype(), &values);
                }
                for step in 1..=10 {
                    slices.gradient =
                        Slice::new(gradient, &(0..LEN).map(|_| numbers.ordinary()).collect::<Vec<_>>());
                    let update = Update { lr: 0.01, step, gradient_factor: 0.3 };
                    let before = slices.clone();
                    slices.update(&optimizer, &Workers::alone(), update);
                    check(&config, update, &before, &slices, state);
                }
            }
        }
    }
}

fn check(config: &OptimizerConfig, update: Update, before: &Slices, after: &Slices, state: DType) {
    let states = |slices: &Slices| slices.states.iter().map(Slice::values).collect::<Vec<_>>();
    let (old, new) = (states(before), states(after));
    let gradient = before.gradient.values();
    for at in 0..before.parameters.len() {
        let values: Vec<_> = old.iter().map(|state| f64::from(state[at])).collect();
        let (parameter, off, expected) =
            reference(config, update, f64::from(before.parameters[at]), f64::from(gradient[at]), &values);
        let found = after.parameters[at];
        assert!(
            (f64::from(found) - parameter).abs() <= off,
            "{found} for {parameter}, {config:?}, {update:?}"
        );
        let copied = after.copy.as_ref().unwrap().values()[at];
        assert_eq!(copied, bf16::from_f32(found).to_f32());
        for ((expected, off), found) in expected.into_iter().zip(&new) {
            let found = f64::from(found[at]);
            let rounded = if state == DType::BF16 { expected.abs() / 256.0 } else { U * expected.abs() };
            assert!(
                (found - expected).abs() <= off + rounded,
                "{found} for {expected}, {config:?}, {update:?}"
            );
        }
    }
}

#[test]
fn a_new_optimizer_names_its_states() {
    let names = |config: OptimizerConfig| {
        let states = HostOptimizer::new(config).unwrap().states();
        states.iter().map(|state| (state.name, state.initial)).collect::<Vec<_>>()
    };
    assert_eq!(names(Adam::ADAMW.into()), [("exp_avg", 0.0), ("exp_avg_sq", 0.0)]);
    let adagrad = Adagrad { initial_accumulator: 0.5, ..Adagrad::default() };
    assert_eq!(names(adagrad.into()), [("sum", 0.5)]);
    assert_eq!(names(Lion::default().into()), [("exp_avg", 0.0)]);
    assert_eq!(names(Sgd::default().into()), []);
    assert_eq!(names(Sgd { momentum: 0.9, ..Sgd::default() }.into()), [("momentum_buffer", 0.0)]);
}

#[test]
fn a_hyper_parameter_out_of_range_is_named_with_its_range() {
    let message = |config: OptimizerConfig| HostOptimizer::new(config).unwrap_err().to_string();
    let cases = [
        (
            Adam { beta1: 1.0, ..Adam::ADAM }.into(),
            "beta1 is 1; it must be at least 0 and less than 1, in f32 too",
        ),
        (
            Adam { beta2: f64::NAN, ..Adam::ADAM }.into(),
            "beta2 is NaN; it must be at least 0 and less than 1, in f32 too",
        ),
        (
            Adam { epsilon: -1e-8, ..Adam::ADAM }.into(),
            "epsilon is -0.00000001; it must be finite and at least 0, in f32 too",
        ),
        (
            Adam { weight_decay: WeightDecay::L2(f64::INFINITY), ..Adam::ADAM }.into(),
            "weight_decay is inf; it must be finite and at least 0, in f32 too",
        ),
        (
            Adagrad { lr_decay: -1.0, ..Adagrad::default() }.into(),
            "lr_decay is -1; it must be finite and at least 0, in f32 too",
        ),
        (
            Adagrad { initial_accumulator: -1.0, ..Adagrad::default() }.into(),
            "initial_accumulator is -1; it must be finite and at least 0, in f32 too",
        ),
        (
            Lion { beta2: -0.1, ..Lion::default() }.into(),
            "beta2 is -0.1; it must be at least 0 and less than 1, in f32 too",
        ),
        (
            Sgd { momentum: -1.0, ..Sgd::default() }.into(),
            "momentum is -1; it must be finite and at least 0, in f32 too",
        ),
        (Sgd { dampening: f64::NAN, ..Sgd::default() }.into(), "dampening is NaN; it must be finite"),
    ];
    for (config, expected) in cases {
        let config: OptimizerConfig = config;
        assert_eq!(message(config), expected);
    }
    let nesterov = Sgd { momentum: 0.9, dampening: 0.1, nesterov: true, ..Sgd::default() };
    let error = HyperParameterError::Nesterov { momentum: 0.9, dampening: 0.1 };
    assert_eq!(HostOptimizer::new(nesterov), Err(error));
    assert!(HostOptimizer::new(Sgd { momentum: 0.0, dampening: 0.0, ..nesterov }).is_err());
}

#[test]
fn slices_and_numbers_that_do_not_fit_are_named_and_change_nothing() {
    let optimizer = HostOptimizer::new(Adam::ADAMW).unwrap();
    let attempt = |update: Update, gradient: usize, mut states: Vec<Slice>, copy: usize| {
        let mut parameters = [1.0, 2.0, 3.0];
        let mut copy = vec![f16::ZERO; copy];
        let mut given: Vec<_> = states.iter_mut().map(Slice::get_mut).collect();
        let gradient = vec![1.0f32; gradient];
        let copy = FloatsMut::F16(&mut copy);
        let result = optimizer.update(
            &Workers::alone(),
            update,
            &mut parameters,
            gradient[..].into(),
            &mut given,
            Some(copy),
        );
        assert_eq!(parameters, [1.0, 2.0, 3.0]);
        assert!(states.iter().all(|state| state.values().iter().all(|&value| value == 0.0)));
        result.unwrap_err()
    };
    let state = |len| Slice::F32(vec![0.0; len]);
    let good = || vec![state(3), state(3)];
    let length = |slice, length| UpdateError::Length { slice, length, parameters: 3 };
    assert_eq!(attempt(UPDATE, 2, good(), 3), length("gradient", 2));
    assert_eq!(attempt(UPDATE, 3, good(), 4), length("copy", 4));
    assert_eq!(attempt(UPDATE, 3, vec![state(3), state(0)], 3), length("exp_avg_sq", 0));
    let error = attempt(UPDATE, 3, vec![state(3)], 3);
    assert_eq!(error.to_string(), "1 states for an optimizer that has 2; HostOptimizer::states names them");
    let halves = Slice::F16(vec![f16::ZERO; 3]);
    let error = attempt(UPDATE, 3, vec![halves, state(3)], 3);
    assert_eq!(error, UpdateError::StateType { state: "exp_avg", dtype: DType::F16 });
    assert_eq!(attempt(Update { step: 0, ..UPDATE }, 3, good(), 3), UpdateError::StepZero);
    let error = attempt(Update { lr: -1.0, ..UPDATE }, 3, good(), 3);
    assert_eq!(error.to_string(), "lr is -1; it must be finite and at least 0");
    let error = attempt(Update { gradient_factor: f64::NAN, ..UPDATE }, 3, good(), 3);
    assert_eq!(error.to_string(), "gradient_factor is NaN; it must be finite");
}

#[test]
fn no_decay_leaves_an_infinite_parameter_alone() {
    // Zero times infinity would not be a number.
    for weight_decay in [WeightDecay::None, WeightDecay::L2(0.0), WeightDecay::Decoupled(0.0)] {
        let optimizer = HostOptimizer::new(Sgd { weight_decay, ..Sgd::default() }).unwrap();
        let mut slices = Slices {
            parameters: vec![f32::INFINITY],
            gradient: Slice::F32(vec![1.0]),
            states: vec![],
            copy: None,
        };
        slices.update(&optimizer, &Workers::alone(), UPDATE);
        assert_eq!(slices.parameters, [f32::INFINITY]);
    }
}

#[test]
fn lion_leaves_a_parameter_without_direction_and_shows_nan() {
    let optimizer = HostOptimizer::new(Lion::default()).unwrap();
    let mut slices = Slices {
        parameters: vec![1.0, 1.0, 1.0],
        gradient: Slice::F32(vec![0.0, f32::NAN, -2.0]),
        states: vec![Slice::F32(vec![0.0; 3])],
        copy: None,
    };
    slices.update(&optimizer, &Workers::alone(), UPDATE);
    assert_eq!(slices.parameters[0], 1.0);
    assert!(slices.parameters[1].is_nan());
    assert_eq!(slices.parameters[2], 1.0 + 0.01);
}
