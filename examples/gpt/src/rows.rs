//! Rows of tokens, each with the tokens that follow.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Rows of `context + 1` bytes: all but the last are tokens, all but the first what follows them.
#[derive(Clone, Debug)]
pub struct Rows {
    bytes: Vec<u8>,
    context: usize,
}

impl Rows {
    /// Rows that lie in `bytes` one after another.
    pub(crate) fn new(bytes: Vec<u8>, context: usize) -> Self {
        Self { bytes, context }
    }
    /// The number of rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / (self.context + 1)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The rows in `range`.
    pub fn slice(&self, range: Range<usize>) -> Self {
        let width = self.context + 1;
        Self { bytes: self.bytes[range.start * width..range.end * width].to_vec(), context: self.context }
    }

    /// Tokens and targets, both `[rows, context]`.
    pub fn tensors(&self, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let side = |from: usize| {
            let values: Vec<i32> = self
                .bytes
                .chunks(self.context + 1)
                .flat_map(|row| row[from..from + self.context].iter().map(|&byte| i32::from(byte)))
                .collect();
            Tensor::from_data(TensorData::new(values, [self.len(), self.context]), device)
        };
        (side(0), side(1))
    }
}
