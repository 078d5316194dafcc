//! The device that tests run on, and buffers on it.

use std::ops::Range;

use cubecl::Device;
use cubecl::client::Client;
use cubecl::device::WgpuDeviceKind;
use half::{bf16, f16};
use zero_burn::kernels::Buffer;
use zero_core::DType;
use zero_offload::{Floats, FloatsMut};

/// The device that the variable `ZERO_DEVICE` names: `wgpu`, `vulkan`, `metal`, `cuda` or `rocm`, and behind a colon which one
/// of the graphics cards there are.
///
/// Without the variable, whatever wgpu finds; over Vulkan if the tests were built with that.
pub(crate) fn device() -> Device {
    let default = if cfg!(feature = "vulkan") { "vulkan" } else { "wgpu" };
    let asked = std::env::var("ZERO_DEVICE").unwrap_or_else(|_| default.into());
    let (runtime, index) = match asked.split_once(':') {
        Some((runtime, index)) => match index.parse() {
            Ok(index) => (runtime, Some(index)),
            Err(error) => panic!("ZERO_DEVICE={asked}: {error}"),
        },
        None => (&*asked, None),
    };
    let card = index.map_or(WgpuDeviceKind::DefaultDevice, WgpuDeviceKind::DiscreteGpu);
    let device = match runtime {
        "wgpu" => Device::wgpu(card),
        "vulkan" => Device::vulkan(card),
        "metal" => Device::metal_msl(card),
        "cuda" => Device::cuda(index.unwrap_or(0)),
        "rocm" => Device::rocm(index.unwrap_or(0)),
        _ => panic!("ZERO_DEVICE={asked}: use wgpu, vulkan, metal, cuda or rocm"),
    };
    device.unwrap_or_else(|error| panic!("ZERO_DEVICE={asked}: {error}"))
}

pub(crate) fn client() -> Client {
    device().client()
}

/// How many units may work together here: alone, and where the device has memory for it that works, in teams.
pub(crate) fn teams(client: &Client) -> Vec<u32> {
    // Mesa's 22.3 crashes on any SPIR-V with shared memory.
    let crashes = client.name() == "wgpu<spirv>" && client.properties().identity.physical.is_none();
    if crashes { vec![1] } else { vec![1, 12, 64, u32::MAX] }
}

/// Numbers on the host, as they are stored.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Numbers {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Numbers {
    pub(crate) fn new(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::F32 => Self::F32(values.to_vec()),
            DType::BF16 => Self::Bf16(values.iter().copied().map(bf16::from_f32).collect()),
            DType::F16 => Self::F16(values.iter().copied().map(f16::from_f32).collect()),
            other => panic!("no numbers of {other}"),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::BF16,
            Self::F16(_) => DType::F16,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) => bytemuck::cast_slice(values),
            Self::F16(values) => bytemuck::cast_slice(values),
        }
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    pub(crate) fn slice(&self, range: Range<usize>) -> Floats<'_> {
        match self {
            Self::F32(values) => values[range].into(),
            Self::Bf16(values) => values[range].into(),
            Self::F16(values) => values[range].into(),
        }
    }

    pub(crate) fn slice_mut(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => (&mut values[range]).into(),
            Self::Bf16(values) => (&mut values[range]).into(),
            Self::F16(values) => (&mut values[range]).into(),
        }
    }

    pub(crate) fn upload(&self, client: &Client) -> Buffer {
        let len = self.bytes().len() / self.dtype().size();
        Buffer::new(client.create_from_slice(self.bytes()), self.dtype(), len).unwrap()
    }

    pub(crate) fn download(client: &Client, buffer: &Buffer) -> Self {
        let bytes = client.read_one(buffer.handle().clone()).unwrap();
        let bytes = &bytes[..buffer.len() * buffer.dtype().size()];
        match buffer.dtype() {
            DType::F32 => Self::F32(bytemuck::pod_collect_to_vec(bytes)),
            DType::BF16 => Self::Bf16(bytemuck::pod_collect_to_vec(bytes)),
            DType::F16 => Self::F16(bytemuck::pod_collect_to_vec(bytes)),
            other => panic!("no numbers of {other}"),
        }
    }
}

/// How many numbers of `dtype` lie between two of them; 0 between NaN and NaN, and between numbers that a device may take
/// for 0, or that such make a difference to.
pub(crate) fn units_between(a: f32, b: f32, dtype: DType) -> u64 {
    // f16's smallest numbers are f32's normal ones.
    let is_zero = |value: f32| value.abs() < 2.0 * f32::MIN_POSITIVE;
    if (a.is_nan() && b.is_nan()) || (is_zero(a) && is_zero(b)) {
        return 0;
    }
    if a.is_nan() != b.is_nan() {
        return u64::MAX;
    }
    let place = |value: f32| {
        let (bits, sign) = match dtype {
            DType::BF16 => (i64::from(bf16::from_f32(value.abs()).to_bits()), value.is_sign_negative()),
            DType::F16 => (i64::from(f16::from_f32(value.abs()).to_bits()), value.is_sign_negative()),
            _ => (i64::from(value.abs().to_bits()), value.is_sign_negative()),
        };
        if sign { -bits } else { bits }
    };
    place(a).abs_diff(place(b))
}

/// The same sequence on every machine: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// From -1 to 1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    pub(crate) fn many(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.signed() * scale).collect()
    }
}
