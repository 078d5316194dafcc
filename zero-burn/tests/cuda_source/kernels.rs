//! The engine's kernels, for every combination of types that they take.

use cubecl::client::Client;
use zero_burn::DType;
use zero_burn::kernels::{
    Buffer, MoveRow, Norms, Onto, Quantized, UpdateBuffers, UpdateRow, dequantize, move_rows, quantize,
    update,
};
use zero_offload::{Adagrad, Adam, HostOptimizer, Lion, OptimizerConfig, Sgd, Update, WeightDecay};

use crate::compile;

const ROOM: usize = 1000;
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The answer to the trial of its `fma` of a device that rounds once: 1 + 2^-12, squared, less that square rounded.
fn fuses(len: usize) -> Vec<u8> {
    if len == 4 { 2f32.powi(-24).to_le_bytes().to_vec() } else { vec![0; len] }
}

/// That of a device that rounds twice.
fn rounds(len: usize) -> Vec<u8> {
    vec![0; len]
}

fn buffer(client: &Client, dtype: DType) -> Buffer {
    Buffer::new(client.empty(ROOM * dtype.size()), dtype, ROOM).unwrap()
}

/// Two rows, of which the first begins between vectors.
fn update_all(client: &Client, config: OptimizerConfig, gradients: DType, state: DType, copy: Option<DType>) {
    let optimizer = HostOptimizer::new(config).unwrap();
    let buffers = UpdateBuffers {
        values: buffer(client, DType::F32),
        gradients: buffer(client, gradients),
        states: optimizer.states().iter().map(|_| buffer(client, state)).collect(),
        copy: copy.map(|dtype| buffer(client, dtype)),
    };
    let row = |start, len| UpdateRow {
        optimizer,
        update: Update { lr: 1e-3, step: 2, gradient_factor: 0.5 },
        len,
        values: start,
        gradients: start,
        states: start,
        copy: start,
    };
    update(client, &[row(3, 301), row(400, 512)], &buffers).unwrap();
}

fn configs() -> [OptimizerConfig; 6] {
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    [
        Adam::ADAMW.into(),
        Adagrad { weight_decay: WeightDecay::L2(0.1), ..Adagrad::default() }.into(),
        Lion::default().into(),
        Sgd::default().into(),
        sgd.into(),
        Sgd { nesterov: true, ..sgd }.into(),
    ]
}

#[test]
fn updates_compile_in_all_types() {
    let names = compile(1, fuses, &["80"], |client| {
        for config in configs() {
            for gradients in DTYPES {
                for state in [DType::F32, DType::BF16] {
                    for copy in [None, Some(DType::F32), Some(DType::BF16), Some(DType::F16)] {
                        update_all(client, config, gradients, state, copy);
                    }
                }
            }
        }
    });
    assert_eq!(names.len(), 3, "the trial, and updates by vectors and by elements: {names:?}");
}

#[test]
fn updates_compile_without_an_fma_that_rounds_once() {
    let names = compile(2, rounds, &super::CAPABILITIES, |client| {
        for config in configs() {
            update_all(client, config, DType::BF16, DType::F32, Some(DType::BF16));
        }
    });
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn moves_compile_between_all_types() {
    let names = compile(3, fuses, &super::CAPABILITIES, |client| {
        for (from, to) in DTYPES.iter().flat_map(|&from| DTYPES.map(|to| (from, to))) {
            for onto in [Onto::Put, Onto::Add] {
                let rows = [MoveRow { from: 3, to: 3, len: 301 }, MoveRow { from: 400, to: 403, len: 200 }];
                move_rows(client, &buffer(client, from), &buffer(client, to), &rows, 0.5, onto).unwrap();
            }
        }
    });
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn norms_compile_for_all_types() {
    let names = compile(4, rounds, &super::CAPABILITIES, |client| {
        for dtype in DTYPES {
            let mut norms = Norms::new(client);
            norms.add(&buffer(client, dtype), &[3..301, 400..ROOM]).unwrap();
            assert_eq!(norms.read().unwrap()[0].len(), 2);
        }
    });
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn blocks_compile_from_and_to_all_types() {
    let names = compile(5, rounds, &super::CAPABILITIES, |client| {
        for dtype in DTYPES {
            let blocks = Quantized::empty(client, 777, 256).unwrap();
            for start in [0, 3] {
                quantize(client, &buffer(client, dtype), start, &blocks).unwrap();
                dequantize(client, &blocks, &buffer(client, dtype), start).unwrap();
            }
        }
    });
    assert_eq!(names.len(), 3, "{names:?}");
}
