//! Products rounded together with their sums, on devices that do and that don't.

use std::any::TypeId;
use std::sync::{Mutex, PoisonError};

use cubecl::client::Client;
use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use super::buffer::argument;
use super::error::KernelError;
use super::launch::read;

/// How a device works out `a * b + c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fusion {
    /// Its `fma` rounds once.
    Fused,
    /// Its `fma` rounds the product too, but it has `f64`, in which a product of two `f32` is exact.
    Double,
    /// Neither: the product is rounded too.
    Rounded,
}

/// What devices, by their service, have been found to do. There are few.
static KNOWN: Mutex<Vec<(DeviceId, TypeId, Fusion)>> = Mutex::new(Vec::new());

impl Fusion {
    /// That of a client's device. Drivers may take an `fma` apart and none says so, hence the first call tries one.
    pub(super) fn of(client: &Client) -> Result<Self, KernelError> {
        let id = client.service_id();
        // Held meanwhile, so that a device is asked once.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((.., fusion)) = known.iter().find(|known| (known.0, known.1) == (id.device, id.service)) {
            return Ok(*fusion);
        }
        let fusion = if fuses(client)? {
            Self::Fused
        } else if client.properties().supports_type(ElemType::Float(FloatKind::F64)) {
            Self::Double
        } else {
            Self::Rounded
        };
        known.push((id.device, id.service, fusion));
        Ok(fusion)
    }
}

/// Whether the product survives that a rounding would make equal to the number it is taken from.
fn fuses(client: &Client) -> Result<bool, KernelError> {
    let factor = 1.0 + f32::EPSILON * 2048.0;
    let square = factor * factor;
    let numbers = client.create_from_slice(f32::as_bytes(&[factor, -square]));
    let result = client.empty(size_of::<f32>());
    // SAFETY: the kernel reads two numbers and writes one, and there are as many.
    unsafe {
        fuse::launch_unchecked(
            client,
            CubeCount::new_single(),
            CubeDim::new_single(),
            argument(&numbers),
            argument(&result),
        );
    }
    let result = read(client, vec![result], "trying its fma")?;
    let lost = f32::mul_add(factor, factor, -square);
    Ok(f32::from_bytes(&result[0]) == [lost])
}

#[cube(launch_unchecked)]
fn fuse(numbers: &[f32], result: &mut [f32]) {
    if ABSOLUTE_POS == 0 {
        result[0] = fma(numbers[0], numbers[0], numbers[1]);
    }
}

/// `a * b + c`.
#[cube]
pub(super) fn mul_add<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    c: Vector<f32, N>,
    #[comptime] fusion: Fusion,
) -> Vector<f32, N> {
    if comptime!(fusion == Fusion::Double) {
        let product = Vector::<f64, N>::cast_from(a) * Vector::<f64, N>::cast_from(b);
        Vector::<f32, N>::cast_from(product + Vector::<f64, N>::cast_from(c))
    } else {
        fma(a, b, c)
    }
}
