//! The kernels that are measured.

use std::error::Error;

use cubecl::client::Client;
use zero_burn::kernels::{
    Buffer, KernelError, MoveRow, Norms, Onto, Quantized, UpdateBuffers, UpdateRow, dequantize, move_rows,
    quantize, update,
};
use zero_burn::{Adam, DType, Lion, OptimizerConfig, Sgd};
use zero_offload::{HostOptimizer, Update};

use crate::device::{Numbers, Random};

/// The tensors that the buffers are cut into.
const ROWS: usize = 64;

/// Of [`all`], the one that does what Burn's AdamW does.
pub(crate) const LIKE_BURN: usize = 0;

type Launch = Box<dyn FnMut(&Client) -> Result<(), KernelError>>;

/// A kernel with all it works on.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    /// Bytes that must be read and written for an element.
    pub(crate) bytes: usize,
    run: Launch,
}

impl Contender {
    pub(crate) fn launch(&mut self, client: &Client) -> Result<(), Box<dyn Error>> {
        Ok((self.run)(client)?)
    }
}

/// All kernels, on so many elements.
pub(crate) fn all(client: &Client, elements: usize) -> Result<Vec<Contender>, Box<dyn Error>> {
    let numbers = |dtype: DType| Numbers::new(dtype, &Random(1).many(elements, 1.0)).upload(client);
    let (singles, halves) = (numbers(DType::F32), numbers(DType::BF16));
    let (f32s, bf16s) = (DType::F32, DType::BF16);
    let mut contenders = vec![
        updates("AdamW, all f32", client, Adam::ADAMW, &singles, f32s, None)?,
        updates("AdamW, bf16 gradient and copy", client, Adam::ADAMW, &halves, f32s, Some(bf16s))?,
        updates("AdamW, bf16 gradient, states and copy", client, Adam::ADAMW, &halves, bf16s, Some(bf16s))?,
        updates("Lion, all f32", client, Lion::default(), &singles, f32s, None)?,
        updates("SGD, all f32", client, Sgd::default(), &singles, f32s, None)?,
    ];
    for (name, bytes, buffer) in [("norm of f32", 4, &singles), ("norm of bf16", 2, &halves)] {
        let (buffer, rows) = (buffer.clone(), rows(elements));
        let run: Launch = Box::new(move |client| {
            let mut norms = Norms::new(client);
            norms.add(&buffer, &rows)?;
            norms.read().map(drop)
        });
        contenders.push(Contender { name, bytes, run });
    }
    for (name, bytes, from, to, onto) in [
        ("f32 to bf16", 6, &singles, bf16s, Onto::Put),
        ("bf16 to f32", 6, &halves, f32s, Onto::Put),
        ("bf16 added to f32", 10, &halves, f32s, Onto::Add),
    ] {
        let (from, to) = (from.clone(), numbers(to));
        let rows: Vec<_> = rows(elements)
            .into_iter()
            .map(|row| MoveRow { from: row.start, to: row.start, len: row.len() })
            .collect();
        let run: Launch = Box::new(move |client| move_rows(client, &from, &to, &rows, 0.5, onto));
        contenders.push(Contender { name, bytes, run });
    }
    let quantized = Quantized::empty(client, elements, 256)?;
    let (from, to) = (singles.clone(), quantized.clone());
    let run: Launch = Box::new(move |client| quantize(client, &from, 0, &to));
    contenders.push(Contender { name: "f32 to eight bits", bytes: 5, run });
    let run: Launch = Box::new(move |client| dequantize(client, &quantized, &singles, 0));
    contenders.push(Contender { name: "eight bits to f32", bytes: 5, run });
    Ok(contenders)
}

fn rows(elements: usize) -> Vec<std::ops::Range<usize>> {
    let len = elements / ROWS;
    (0..ROWS).map(|row| row * len..(row + 1) * len).collect()
}

fn updates(
    name: &'static str,
    client: &Client,
    config: impl Into<OptimizerConfig>,
    gradients: &Buffer,
    states: DType,
    copy: Option<DType>,
) -> Result<Contender, Box<dyn Error>> {
    let elements = gradients.len();
    let optimizer = HostOptimizer::new(config)?;
    let numbers = |dtype: DType| Numbers::new(dtype, &Random(2).many(elements, 1.0)).upload(client);
    let zeros = |dtype: DType| {
        Buffer::new(client.create_from_slice(&vec![0; elements * dtype.size()]), dtype, elements)
    };
    let count = optimizer.states().len();
    let buffers = UpdateBuffers {
        values: numbers(DType::F32),
        gradients: gradients.clone(),
        states: (0..count).map(|_| zeros(states)).collect::<Result<_, _>>()?,
        copy: copy.map(zeros).transpose()?,
    };
    let update_number = Update { lr: 1e-3, step: 1, gradient_factor: 0.5 };
    let mut rows: Vec<_> = rows(elements)
        .into_iter()
        .map(|row| UpdateRow {
            optimizer,
            update: update_number,
            len: row.len(),
            values: row.start,
            gradients: row.start,
            states: row.start,
            copy: row.start,
        })
        .collect();
    let bytes =
        gradients.dtype().size() + 8 + 2 * count * states.size() + copy.map_or(0, |dtype| dtype.size());
    let run: Launch = Box::new(move |client| {
        rows.iter_mut().for_each(|row| row.update.step += 1);
        update(client, &rows, &buffers)
    });
    Ok(Contender { name, bytes, run })
}
