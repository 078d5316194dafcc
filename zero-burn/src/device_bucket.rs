//! A bucket of gradients that fills on a CubeCL device.

use std::ops::Range;

use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use cubecl::future::DynFut;
use cubecl::server::ServerError;
use zero_core::{Bucket, DType, ParameterIndex};

use crate::arena::Port;
use crate::cube;
use crate::engine::Engine;
use crate::floats::Write;
use crate::kernels::{Buffer, KernelError, MoveRow, Norms, Onto, move_rows};

/// When something has been written.
pub(crate) type Written = DynFut<Result<(), ServerError>>;

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
        Ok(Self { buffer: port.room(bucket.numel(), wire)?, port })
    }

    /// Its elements.
    pub(crate) const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Its elements as a tensor.
    pub(crate) fn tensor(&self) -> CubeTensor {
        self.port.tensor_of(&self.buffer)
    }

    /// When the device has written it.
    pub(crate) fn written(&self) -> Written {
        self.port.client.sync_buffers([self.buffer.handle()])
    }

    /// Clears the place of a gradient.
    pub(crate) fn clear(&self, bucket: &Bucket, parameter: ParameterIndex) -> Result<(), KernelError> {
        let segments = bucket.segments(parameter);
        let longest = segments.iter().map(|segment| segment.source.len()).max().unwrap_or(0);
        let zeros = vec![0_u8; longest * self.buffer.dtype().size()];
        if zeros.is_empty() {
            return Ok(());
        }
        let zeros = Buffer::new(self.port.client.create_from_slice(&zeros), self.buffer.dtype(), longest)?;
        let rows =
            segments.iter().map(|segment| MoveRow { from: 0, to: segment.offset, len: segment.source.len() });
        move_rows(&self.port.client, &zeros, &self.buffer, &rows.collect::<Vec<_>>(), 1.0, Onto::Put)
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

/// The sums of squares of rows of sums that are on the device, in one pass and one read.
pub(crate) fn squares<'a>(
    port: &Port,
    sums: impl Iterator<Item = (&'a Buffer, &'a Vec<Range<usize>>)>,
) -> Result<Vec<Vec<f64>>, KernelError> {
    let mut norms = Norms::new(&port.client);
    for (sums, rows) in sums {
        norms.add(sums, rows)?;
    }
    let norms = norms.read()?.into_iter();
    Ok(norms.map(|rows| rows.iter().map(|row| row.sum_of_squares).collect()).collect())
}

/// Sums on the device as a tensor.
pub(crate) fn tensor(engine: &Engine, sums: &Buffer) -> Tensor<1> {
    let port = engine.port.as_ref().expect("sums are on a device only where there is a way to it");
    cube::tensor(port.tensor_of(sums))
}

/// Copies sums from element `start` on to the host.
///
/// # Panics
///
/// If the device is lost, as any operation of Burn.
pub(crate) fn read(engine: &Engine, sums: &Buffer, start: usize, into: &mut [u8]) {
    let sums = cube::buffer(tensor(engine, sums));
    let at = (start * sums.dtype.size()) as u64;
    cube::read(&sums, at, "reading gradients", into).unwrap_or_else(|error| panic!("{error}"));
}
