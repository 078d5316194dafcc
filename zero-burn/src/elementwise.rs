//! Finds out whether an optimizer may run on shards.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::optim::Optimizer;
use burn::tensor::{Device, Tensor, TensorData};

use zero_core::DType;

use crate::ZeroError;
use crate::stored::Stored;

const ROWS: usize = 4;
const COLUMNS: usize = 6;
/// Where the flattened matrix is cut: inside a row, as a shard's end usually is.
const CUT: usize = 10;
const LR: f64 = 0.1;
/// Of the largest value: far above rounding, far below what another algorithm would give.
const TOLERANCE: f32 = 1e-4;

/// Runs three steps on a small matrix and on its pieces, as columns and laid flat: an element-wise optimizer cannot tell
/// the difference. `state` is the type that its state is kept in, which must not lose it.
pub(crate) fn check<O: Optimizer>(optimizer: &O, device: &Device, state: DType) -> Result<(), ZeroError> {
    let pieces = [0..CUT, CUT..ROWS * COLUMNS];
    // Columns first: an optimizer for matrices takes those, but may panic on what is flat.
    let verdict = catch_unwind(AssertUnwindSafe(|| {
        let (whole, _) = run(optimizer, device, [ROWS, COLUMNS], 0..ROWS * COLUMNS);
        if !whole.iter().all(|value| value.is_finite()) {
            return Err("its steps are not finite; look at its settings");
        }
        let columns = pieces.clone().map(|piece| run(optimizer, device, [piece.len(), 1], piece).0).concat();
        if !agree(&whole, &columns) {
            return Err("it updates a matrix and the pieces of that matrix differently");
        }
        let flat = pieces.map(|piece| run(optimizer, device, [piece.len()], piece));
        if !agree(&whole, &flat.each_ref().map(|(values, _)| values.clone()).concat()) {
            return Err("it updates a matrix and the same values laid flat differently");
        }
        let [(_, kept), _] = flat;
        match kept.is_some_and(|kept| Stored::new(kept, state).load(device).is_none()) {
            true => Err("its state cannot be read back from what it writes into records"),
            false => Ok(()),
        }
    }));
    let reason = match verdict {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(reason)) => reason,
        Err(_) => "it panics on a piece of a parameter",
    };
    Err(ZeroError::NotElementwise { optimizer: std::any::type_name::<O>(), reason: reason.to_owned() })
}

fn run<O: Optimizer, const D: usize>(
    optimizer: &O,
    device: &Device,
    shape: [usize; D],
    range: std::ops::Range<usize>,
) -> (Vec<f32>, Option<O::State<D>>) {
    let tensor = |values: Vec<f32>| Tensor::<D>::from_data(TensorData::new(values, shape), device);
    let mut value = tensor(range.clone().map(|at| (at as f32 * 0.7).sin()).collect());
    let mut state = None;
    for step in 0..3 {
        let gradient =
            range.clone().map(|at| (at as f32 * 1.3 + step as f32).cos() * (1.0 + at as f32)).collect();
        (value, state) = optimizer.step(LR, value, tensor(gradient), state);
    }
    (value.into_data().iter::<f32>().collect(), state)
}

fn agree(left: &[f32], right: &[f32]) -> bool {
    let largest = left.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    left.len() == right.len()
        && left.iter().zip(right).all(|(left, right)| (left - right).abs() <= TOLERANCE * largest)
}
