//! Optimizers on a device, against those on the host.

use cubecl::client::Client;
use half::{bf16, f16};
use zero_burn::kernels::{Buffer, KernelError, Role, UpdateBuffers, UpdateRow, update};
use zero_core::DType;
use zero_offload::{Adagrad, Adam, HostOptimizer, Lion, OptimizerConfig, Sgd, Update, WeightDecay, Workers};

use crate::device::{Numbers, Random, client, units_between};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const L2: WeightDecay = WeightDecay::L2(0.1);
const DECOUPLED: WeightDecay = WeightDecay::Decoupled(0.1);

fn update_number(step: u64) -> Update {
    Update { lr: 0.01, step, gradient_factor: 0.3 }
}

/// Every rule, with every kind of decay and every option.
fn configs() -> Vec<OptimizerConfig> {
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    vec![
        Adam::ADAM.into(),
        Adam { weight_decay: L2, ..Adam::ADAM }.into(),
        Adam { weight_decay: DECOUPLED, beta2: 0.95, ..Adam::ADAM }.into(),
        Adagrad { weight_decay: L2, lr_decay: 0.1, ..Adagrad::default() }.into(),
        Adagrad { weight_decay: DECOUPLED, initial_accumulator: 0.1, ..Adagrad::default() }.into(),
        Lion::default().into(),
        Lion { weight_decay: DECOUPLED, ..Lion::default() }.into(),
        Sgd::default().into(),
        Sgd { weight_decay: L2, ..Sgd::default() }.into(),
        Sgd { weight_decay: DECOUPLED, ..sgd }.into(),
        Sgd { dampening: 0.5, ..sgd }.into(),
        Sgd { nesterov: true, weight_decay: L2, ..sgd }.into(),
    ]
}

/// What an update works on, on the host.
#[derive(Clone)]
struct Memory {
    values: Numbers,
    gradients: Numbers,
    states: Vec<Numbers>,
    copy: Option<Numbers>,
}

impl Memory {
    fn new(len: usize, seed: u64, gradients: DType, states: &[DType], copy: Option<DType>) -> Self {
        let mut random = Random(seed);
        Self {
            values: Numbers::new(DType::F32, &random.many(len, 1.0)),
            gradients: Numbers::new(gradients, &random.many(len, 4.0)),
            states: states
                .iter()
                .enumerate()
                .map(|(at, &dtype)| {
                    let state = random.many(len, 1.0);
                    // The second moment, and Adagrad's sum, are sums of squares.
                    let is_sum = at == 1 || states.len() == 1;
                    let state = state.into_iter().map(|state| if is_sum { state.abs() } else { state });
                    Numbers::new(dtype, &state.collect::<Vec<_>>())
                })
                .collect(),
            copy: copy.map(|dtype| Numbers::new(dtype, &random.many(len, 1.0))),
        }
    }

    fn on_host(&mut self, rows: &[UpdateRow]) {
        let Numbers::F32(values) = &mut self.values else { unreachable!() };
        for row in rows {
            let needed = row.optimizer.states().len();
            let states = &mut self.states[..needed];
            let mut states: Vec<_> =
                states.iter_mut().map(|state| state.slice_mut(row.states..row.states + row.len)).collect();
            row.optimizer
                .update(
                    &Workers::alone(),
                    row.update,
                    &mut values[row.values..row.values + row.len],
                    self.gradients.slice(row.gradients..row.gradients + row.len),
                    &mut states,
                    self.copy.as_mut().map(|copy| copy.slice_mut(row.copy..row.copy + row.len)),
                )
                .unwrap();
        }
    }

    fn upload(&self, client: &Client) -> UpdateBuffers {
        UpdateBuffers {
            values: self.values.upload(client),
            gradients: self.gradients.upload(client),
            states: self.states.iter().map(|state| state.upload(client)).collect(),
            copy: self.copy.as_ref().map(|copy| copy.upload(client)),
        }
    }

    fn download(client: &Client, buffers: &UpdateBuffers) -> Self {
        let down = |buffer: &Buffer| Numbers::download(client, buffer);
        Self {
            values: down(&buffers.values),
            gradients: down(&buffers.gradients),
            states: buffers.states.iter().map(down).collect(),
            copy: buffers.copy.as_ref().map(down),
        }
    }
}

/// That all numbers are near: f32 by so many units in the last place; what is narrower, rounded from such, by one of its own.
fn assert_near(found: &Numbers, expected: &Numbers, units: u64, what: &str) {
    let dtype = expected.dtype();
    let units = if dtype == DType::F32 { units } else { 1 };
    assert_eq!(found.values().len(), expected.values().len());
    for (at, (found, expected)) in found.values().into_iter().zip(expected.values()).enumerate() {
        let apart = units_between(found, expected, dtype);
        assert!(apart <= units, "{what} {at}: {found:e} for {expected:e}, {apart} units of {dtype} apart");
    }
}

/// That all values are within two units in the last place, or within four of the step they took: a GPU's roots and quotients are
/// off by some, which shows where a step ends near 0.
fn assert_stepped(found: &Numbers, expected: &Numbers, old: &Numbers, what: &str) {
    let numbers = found.values().into_iter().zip(expected.values()).zip(old.values());
    for (at, ((found, expected), old)) in numbers.enumerate() {
        let step = (f64::from(expected) - f64::from(old)).abs();
        let off = (f64::from(found) - f64::from(expected)).abs();
        let near = units_between(found, expected, DType::F32) <= 2 || off <= step * 2f64.powi(-21);
        assert!(near, "{what} {at}: {found:e} for {expected:e} from {old:e}");
    }
}

/// Runs an update on both sides and compares all there is in the buffers, between the rows too.
fn compare(client: &Client, memory: &Memory, rows: &[UpdateRow]) {
    let buffers = memory.upload(client);
    update(client, rows, &buffers).unwrap();
    let found = Memory::download(client, &buffers);
    let mut expected = memory.clone();
    expected.on_host(rows);
    let what = |part: &str| format!("{part} of {:?}", rows.first().map(|row| row.optimizer));
    assert_stepped(&found.values, &expected.values, &memory.values, &what("values"));
    assert!(found.gradients.bytes() == memory.gradients.bytes(), "gradients changed");
    for (at, (found, expected)) in found.states.iter().zip(&expected.states).enumerate() {
        assert_near(found, expected, 2, &what(&format!("state {at}")));
    }
    if let (Some(found_copy), Some(expected_copy)) = (&found.copy, &expected.copy) {
        assert_near(found_copy, expected_copy, 2, &what("copy"));
        // Of the device's own values it is the nearest, to the bit.
        let new = found.values.values();
        for row in rows {
            let new = Numbers::new(found_copy.dtype(), &new[row.values..row.values + row.len]).values();
            let copied = &found_copy.values()[row.copy..row.copy + row.len];
            for (new, copied) in new.iter().zip(copied) {
                assert!(
                    new.to_bits() == copied.to_bits() || new.is_nan() && copied.is_nan(),
                    "{new:e}: {copied:e}"
                );
            }
        }
    }
}

/// A row that lies at the same place everywhere.
fn row(config: OptimizerConfig, step: u64, start: usize, len: usize) -> UpdateRow {
    UpdateRow {
        optimizer: HostOptimizer::new(config).unwrap(),
        update: update_number(step),
        len,
        values: start,
        gradients: start,
        states: start,
        copy: start,
    }
}

/// Rows of these lengths behind one another, with gaps between them, at places of their own in each buffer.
fn scattered(random: &mut Random, config: OptimizerConfig, lens: &[usize]) -> (Vec<UpdateRow>, usize) {
    let mut at = [0; 4];
    let rows = lens.iter().enumerate().map(|(index, &len)| {
        let starts = at.map(|at| at + random.below(4));
        at = starts.map(|start| start + len);
        let [values, gradients, states, copy] = starts;
        UpdateRow { values, gradients, states, copy, ..row(config, 1 + index as u64, 0, len) }
    });
    let rows = rows.collect();
    (rows, at.into_iter().max().unwrap_or(0) + 3)
}

#[test]
fn every_rule_gives_the_numbers_of_the_host_for_every_type_of_gradient_state_and_copy() {
    let client = client();
    for (seed, config) in configs().into_iter().enumerate() {
        let states = HostOptimizer::new(config).unwrap().states().len();
        for gradients in DTYPES {
            for (state, copy) in [
                (DType::F32, None),
                (DType::BF16, Some(DType::BF16)),
                (DType::F32, Some(DType::F16)),
                (DType::BF16, Some(DType::F32)),
            ] {
                let memory = Memory::new(301, seed as u64, gradients, &vec![state; states], copy);
                // Most of it in vectors, the ends one by one, and one row whose places differ.
                let rows = [
                    row(config, 3, 1, 202),
                    UpdateRow { gradients: 205, ..row(config, 1, 204, 37) },
                    row(config, 2, 244, 56),
                ];
                compare(&client, &memory, &rows);
            }
        }
    }
}

/// The new parameter in f64, by the definitions of the rules, from states of 0 at the first step.
fn reference(config: &OptimizerConfig, lr: f64, value: f64, gradient: f64) -> f64 {
    let decays = |decay: WeightDecay| match decay {
        WeightDecay::None => (0.0, 0.0),
        WeightDecay::L2(rate) => (rate, 0.0),
        WeightDecay::Decoupled(rate) => (0.0, lr * rate),
    };
    let regular = |decay| gradient + decays(decay).0 * value;
    let step = |decay, direction: f64| value - decays(decay).1 * value - lr * direction;
    match config {
        OptimizerConfig::Adam(adam) => {
            let gradient = regular(adam.weight_decay);
            // The bias corrections undo the gains.
            step(adam.weight_decay, gradient / (gradient.abs() + adam.epsilon))
        }
        OptimizerConfig::Adagrad(adagrad) => {
            let gradient = regular(adagrad.weight_decay);
            let sum = adagrad.initial_accumulator + gradient * gradient;
            step(adagrad.weight_decay, gradient / (sum.sqrt() + adagrad.epsilon))
        }
        OptimizerConfig::Lion(lion) => {
            let gradient = regular(lion.weight_decay);
            step(lion.weight_decay, gradient.signum())
        }
        OptimizerConfig::Sgd(sgd) => {
            let gradient = regular(sgd.weight_decay);
            let ahead = if sgd.nesterov { 1.0 + sgd.momentum } else { 1.0 };
            step(sgd.weight_decay, gradient * ahead)
        }
        other => panic!("no reference for {other:?}"),
    }
}

#[test]
fn the_first_step_of_every_rule_is_that_of_its_definition() {
    let client = client();
    let lr = 0.01;
    for config in configs() {
        let optimizer = HostOptimizer::new(config).unwrap();
        let states = optimizer.states();
        let len = 1001;
        let memory = Memory {
            states: states.iter().map(|state| Numbers::new(DType::F32, &vec![state.initial; len])).collect(),
            ..Memory::new(len, 15, DType::F32, &[], None)
        };
        let buffers = memory.upload(&client);
        let update_number = Update { lr, step: 1, gradient_factor: 0.5 };
        let all = UpdateRow { optimizer, update: update_number, ..row(config, 1, 0, len) };
        update(&client, &[all], &buffers).unwrap();
        let found = Memory::download(&client, &buffers).values.values();
        let (values, gradients) = (memory.values.values(), memory.gradients.values());
        for ((found, value), gradient) in found.into_iter().zip(values).zip(gradients) {
            let expected = reference(&config, lr, value.into(), f64::from(gradient) * 0.5);
            // The parameter is rounded once, its direction, of at most 4, and what it is made of a few times.
            let tolerance = 2f64.powi(-24) * (expected.abs() + 64.0 * lr);
            let off = (f64::from(found) - expected).abs();
            assert!(off <= tolerance, "{config:?}: {found} for {expected}, off by {off:e}");
        }
    }
}

#[test]
fn states_may_be_of_different_types() {
    let client = client();
    for types in [[DType::F32, DType::BF16], [DType::BF16, DType::F32]] {
        let memory = Memory::new(70, 1, DType::BF16, &types, Some(DType::BF16));
        compare(&client, &memory, &[row(Adam::ADAMW.into(), 7, 2, 66)]);
    }
}

#[test]
fn a_row_may_have_any_length() {
    let client = client();
    let lens = [0, 1, 3, 4, 5, 63, 64, 65, 255, 256, 257, 4097];
    for config in [Adam::ADAMW.into(), OptimizerConfig::from(Lion::default())] {
        let mut random = Random(5);
        let (rows, len) = scattered(&mut random, config, &lens);
        let states = rows[0].optimizer.states().len();
        compare(
            &client,
            &Memory::new(len, 6, DType::BF16, &vec![DType::BF16; states], Some(DType::BF16)),
            &rows,
        );
        for row_len in lens {
            let memory = Memory::new(row_len + 8, 7, DType::F32, &vec![DType::F32; states], Some(DType::F16));
            compare(&client, &memory, &[row(config, 1, 4, row_len)]);
        }
    }
}

#[test]
fn a_row_of_a_million_elements_gives_the_numbers_of_the_host() {
    let len = 1_000_003;
    let memory = Memory::new(len, 8, DType::BF16, &[DType::F32, DType::F32], Some(DType::BF16));
    compare(&client(), &memory, &[row(Adam::ADAMW.into(), 10, 0, len)]);
}

#[test]
fn many_rows_of_different_rules_and_numbers_of_states_share_buffers() {
    let client = client();
    let mut random = Random(9);
    let configs = configs();
    let mut rows = Vec::new();
    let mut at = 0;
    for index in 0..100 {
        let len = random.below(40);
        let start = at + random.below(3);
        rows.push(row(configs[index % configs.len()], 1 + index as u64, start, len));
        at = start + len;
    }
    let states = [DType::F32, DType::BF16];
    compare(&client, &Memory::new(at + 2, 10, DType::F16, &states, Some(DType::BF16)), &rows);
}

#[test]
fn neighbours_in_one_word_of_16_bits_do_not_disturb_each_other() {
    let client = client();
    // Rows of one element: every word belongs to two of them.
    let rows: Vec<_> = (0..500).map(|at| row(Adam::ADAMW.into(), 1 + at, at as usize, 1)).collect();
    let memory = Memory::new(501, 11, DType::BF16, &[DType::BF16, DType::BF16], Some(DType::F16));
    compare(&client, &memory, &rows);
}

#[test]
fn no_rows_and_empty_rows_change_nothing() {
    let client = client();
    let memory = Memory::new(16, 12, DType::F32, &[DType::F32, DType::F32], Some(DType::BF16));
    compare(&client, &memory, &[]);
    compare(&client, &memory, &[row(Adam::ADAMW.into(), 1, 16, 0), row(Adam::ADAMW.into(), 1, 5, 0)]);
}

#[test]
fn a_handle_may_begin_within_its_memory() {
    let client = client();
    let config = Adam::ADAMW.into();
    for skipped in [1, 2, 3, 64, 65] {
        let memory = Memory::new(200, 13, DType::BF16, &[DType::BF16, DType::F32], Some(DType::F16));
        let whole = memory.upload(&client);
        let part = |buffer: &Buffer| {
            let bytes = (skipped * buffer.dtype().size()) as u64;
            Buffer::new(buffer.handle().clone().offset_start(bytes), buffer.dtype(), 200 - skipped).unwrap()
        };
        let parts = UpdateBuffers {
            values: part(&whole.values),
            gradients: part(&whole.gradients),
            states: whole.states.iter().map(part).collect(),
            copy: whole.copy.as_ref().map(part),
        };
        update(&client, &[row(config, 1, 3, 111)], &parts).unwrap();
        let mut expected = memory.clone();
        expected.on_host(&[row(config, 1, 3 + skipped, 111)]);
        let found = Memory::download(&client, &whole);
        assert_near(&found.values, &expected.values, 2, "values");
        assert_near(&found.states[0], &expected.states[0], 2, "state 0");
        assert_near(&found.states[1], &expected.states[1], 2, "state 1");
        assert_near(&found.copy.unwrap(), &expected.copy.unwrap(), 2, "copy");
    }
}

/// Numbers at the ends of what there is. Those below 2^-126 are left out: a device may take them for 0.
const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    f32::MIN_POSITIVE,
    -f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    1e-30,
];

#[test]
fn special_values_come_out_as_on_the_host() {
    let client = client();
    for config in configs() {
        let states = HostOptimizer::new(config).unwrap().states().len();
        let pairs: Vec<_> = SPECIAL.iter().flat_map(|&a| SPECIAL.map(|b| (a, b))).collect();
        let (values, gradients): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        for (gradient, copy) in
            [(DType::F32, DType::F16), (DType::BF16, DType::BF16), (DType::F16, DType::BF16)]
        {
            let memory = Memory {
                values: Numbers::new(DType::F32, &values),
                gradients: Numbers::new(gradient, &gradients),
                states: vec![Numbers::new(DType::F32, &vec![0.25; values.len()]); states],
                copy: Some(Numbers::new(copy, &vec![7.0; values.len()])),
            };
            compare(&client, &memory, &[row(config, 2, 0, values.len())]);
        }
    }
}

#[test]
fn every_number_of_16_bits_is_read_and_every_rounding_is_to_the_nearest_even() {
    let client = client();
    // With a factor of -1 and a rate of 1 the value 0 becomes the gradient.
    let optimizer = HostOptimizer::new(Sgd::default()).unwrap();
    let update_number = Update { lr: 1.0, step: 1, gradient_factor: -1.0 };
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let between: Vec<f32> =
        (0..1u32 << 16).map(|at| f32::from_bits((at << 16) ^ (at.wrapping_mul(0x9e37) & 0xffff))).collect();
    let ties: Vec<f32> = (0..1u32 << 15)
        .flat_map(|at| [f32::from_bits((at << 17) | 0x8000), f32::from_bits((at << 17) | 0x1_8000)])
        .collect();
    let small_ties: Vec<f32> =
        (0..1u32 << 16).map(|at| (f64::from(at) / 4.0 * 2f64.powi(-24)) as f32).collect();
    let normal_ties: Vec<f32> = (0..1u32 << 16).map(|at| f32::from_bits(0x3880_0000 + (at << 12))).collect();
    let gradients = [
        Numbers::Bf16(all.iter().map(|&bits| bf16::from_bits(bits)).collect()),
        Numbers::F16(all.iter().map(|&bits| f16::from_bits(bits)).collect()),
        Numbers::F32(between),
        Numbers::F32(ties),
        Numbers::F32(small_ties),
        Numbers::F32(normal_ties),
    ];
    for gradients in gradients {
        let values = gradients.values();
        for copy in [DType::BF16, DType::F16] {
            let memory = Memory {
                values: Numbers::new(DType::F32, &vec![0.0; values.len()]),
                gradients: gradients.clone(),
                states: vec![],
                copy: Some(Numbers::new(copy, &vec![7.0; values.len()])),
            };
            let all = UpdateRow {
                optimizer,
                update: update_number,
                ..row(Sgd::default().into(), 1, 0, values.len())
            };
            // In vectors, and one by one.
            compare(&client, &memory, &[all]);
            compare(&client, &memory, &[UpdateRow { len: 9000, values: 1, copy: 1, ..all }]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_changes() {
    let client = client();
    let memory = Memory::new(16, 14, DType::F32, &[DType::F32, DType::F32], Some(DType::BF16));
    let buffers = memory.upload(&client);
    let good = row(Adam::ADAMW.into(), 1, 0, 8);
    let refused = |rows: &[UpdateRow], buffers: &UpdateBuffers| update(&client, rows, buffers).unwrap_err();

    let error = refused(&[good, UpdateRow { gradients: 9, ..good }], &buffers);
    let expected = KernelError::OutOfRange { row: 1, role: Role::Gradients, start: 9, len: 8, elements: 16 };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "row 1 is elements 9 to 9+8 of gradients, which has 16");
    let error = refused(&[UpdateRow { values: usize::MAX, ..good }], &buffers);
    assert!(matches!(error, KernelError::OutOfRange { role: Role::Values, .. }), "{error}");
    let error = refused(&[good, UpdateRow { values: 8, states: 8, copy: 7, ..good }], &buffers);
    let expected = KernelError::Overlap { row: 0, role: Role::Copy, other_row: 1, other_role: Role::Copy };
    assert_eq!(error, expected);
    let twice = UpdateBuffers { gradients: buffers.values.clone(), ..buffers.clone() };
    let error = refused(&[good], &twice);
    assert!(matches!(error, KernelError::Overlap { row: 0, other_row: 0, .. }), "{error}");
    let error = refused(&[UpdateRow { update: Update { step: 0, ..good.update }, ..good }], &buffers);
    assert_eq!(error.to_string(), "row 0: step is 0; the first update is step 1");

    let fewer = UpdateBuffers { states: buffers.states[..1].to_vec(), ..buffers.clone() };
    assert_eq!(refused(&[good], &fewer), KernelError::States { row: 0, needed: 2, given: 1 });
    let narrow = UpdateBuffers { values: buffers.copy.clone().unwrap(), ..buffers.clone() };
    let error = refused(&[good], &narrow);
    assert_eq!(error.to_string(), "values of bf16; it may be of f32");
    let half = Numbers::new(DType::F16, &[0.0; 16]).upload(&client);
    let halves = UpdateBuffers { states: vec![buffers.states[0].clone(), half], ..buffers.clone() };
    assert_eq!(refused(&[good], &halves).to_string(), "state 1 of f16; it may be of f32 or bf16");

    let handle = buffers.values.handle();
    let error = Buffer::new(handle.clone(), DType::F32, 17).unwrap_err();
    assert_eq!(error, KernelError::Short { len: 17, dtype: DType::F32, bytes: 64 });
    let error = Buffer::new(handle.clone(), DType::I32, 1).unwrap_err();
    assert_eq!(error, KernelError::ElementType { dtype: DType::I32 });
    let error = Buffer::new(handle.clone().offset_start(2), DType::F32, 1).unwrap_err();
    assert_eq!(error, KernelError::Misplaced { offset: 2, dtype: DType::F32 });

    let after = Memory::download(&client, &buffers);
    assert_eq!((after.values, after.states, after.copy), (memory.values, memory.states, memory.copy));
}
