//! A bucket of gradients that fills on a CubeCL device.

use burn::tensor::Tensor;
use zero_core::{Bucket, DType, ParameterIndex};

use crate::arena::Port;
use crate::cube;
use crate::floats::Write;
use crate::kernels::{Buffer, KernelError, MoveRow, Norms, Onto, move_rows};

/// Gradients on their way to one bucket: moved there on the device, beside what it computes, and read once when the bucket is
/// full.
#[derive(Debug)]
pub(crate) struct DeviceBucket {
    port: Port,
    buffer: Buffer,
}

impl DeviceBucket {
    /// An empty one for elements of type `wire`; its content is unspecified.
    pub(crate) fn new(port: Port, bucket: &Bucket, wire: DType) -> Result<Self, KernelError> {
        let handle = port.client.empty(bucket.numel() * wire.size());
        Ok(Self { buffer: Buffer::new(handle, wire, bucket.numel())?, port })
    }

    /// Writes a gradient, times `factor`, to where it belongs.
    pub(crate) fn write(
        &self,
        bucket: &Bucket,
        parameter: ParameterIndex,
        gradient: Tensor<1>,
        how: Write,
        factor: f32,
    ) -> Result<(), KernelError> {
        let rows = bucket.segments(parameter).iter().map(|segment| MoveRow {
            from: segment.source.start,
            to: segment.offset,
            len: segment.source.len(),
        });
        let onto = match how {
            Write::Put => Onto::Put,
            Write::Add => Onto::Add,
        };
        let from = cube::elements(gradient)?;
        move_rows(&self.port.client, &from, &self.buffer, &rows.collect::<Vec<_>>(), factor, onto)
    }

    /// Copies it to the host, when all that was written is there.
    ///
    /// # Panics
    ///
    /// If the device is lost, as any operation of Burn.
    pub(crate) fn read(self, into: &mut [u8]) {
        if !into.is_empty() {
            let bytes = self.port.client.read_one_unchecked(self.buffer.handle().clone());
            into.copy_from_slice(&bytes[..into.len()]);
        }
    }
}

/// The sum of squares of gradients that are whole and on the device, in one pass and one read.
pub(crate) fn sum_of_squares(port: &Port, gradients: &[Option<Tensor<1>>]) -> Result<f64, KernelError> {
    let mut norms = Norms::new(&port.client);
    for gradient in gradients.iter().flatten() {
        let buffer = cube::elements(gradient.clone())?;
        norms.add(&buffer, std::slice::from_ref(&(0..buffer.len())))?;
    }
    Ok(norms.read()?.iter().flatten().map(|norm| norm.sum_of_squares).sum())
}
