//! Slices to work on: numbers of any kind, and what an optimizer is called with.

#![allow(dead_code, reason = "each test program uses a part")]

use half::{bf16, f16};
use zero_core::DType;
use zero_offload::{
    Adagrad, Adam, Floats, FloatsMut, HostOptimizer, Lion, OptimizerConfig, Sgd, Update, WeightDecay, Workers,
};

/// One of each kind of optimizer.
pub(crate) fn configs() -> Vec<OptimizerConfig> {
    let l2 = WeightDecay::L2(0.1);
    let decoupled = WeightDecay::Decoupled(0.1);
    vec![
        Adam::ADAM.into(),
        Adam { weight_decay: l2, ..Adam::ADAM }.into(),
        Adam { weight_decay: decoupled, beta2: 0.95, ..Adam::ADAM }.into(),
        Adagrad { weight_decay: l2, lr_decay: 0.1, ..Adagrad::default() }.into(),
        Lion { weight_decay: decoupled, ..Lion::default() }.into(),
        Sgd { weight_decay: decoupled, ..Sgd::default() }.into(),
        Sgd { momentum: 0.9, dampening: 0.2, weight_decay: l2, ..Sgd::default() }.into(),
        Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }.into(),
    ]
}

pub(crate) const UPDATE: Update = Update { lr: 0.01, step: 3, gradient_factor: 0.25 };

/// Numbers that are the same in every run.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Between -1 and 1.
    pub(crate) fn ordinary(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Now and then of a kind that is handled badly.
    pub(crate) fn any(&mut self) -> f32 {
        const SPECIAL: [f32; 12] = [
            0.0,
            -0.0,
            1e-45,
            -1e-40,
            f32::MIN_POSITIVE,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            65_520.0,
            6e-8,
        ];
        match self.bits() % 8 {
            0 => SPECIAL[(self.bits() % SPECIAL.len() as u64) as usize],
            1 => f32::from_bits(self.bits() as u32),
            _ => self.ordinary(),
        }
    }
}

/// Numbers of a type.
#[derive(Clone, Debug)]
pub(crate) enum Slice {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Slice {
    pub(crate) fn new(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::F32 => Self::F32(values.to_vec()),
            DType::BF16 => Self::Bf16(values.iter().copied().map(bf16::from_f32).collect()),
            DType::F16 => Self::F16(values.iter().copied().map(f16::from_f32).collect()),
            other => panic!("no slice of {other}"),
        }
    }

    pub(crate) fn get(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => values[..].into(),
            Self::Bf16(values) => values[..].into(),
            Self::F16(values) => values[..].into(),
        }
    }

    pub(crate) fn get_mut(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(values) => (&mut values[..]).into(),
            Self::Bf16(values) => (&mut values[..]).into(),
            Self::F16(values) => (&mut values[..]).into(),
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        match self {
            Self::F32(values) => values.truncate(len),
            Self::Bf16(values) => values.truncate(len),
            Self::F16(values) => values.truncate(len),
        }
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }
}

/// What an optimizer is called with.
#[derive(Clone, Debug)]
pub(crate) struct Slices {
    pub(crate) parameters: Vec<f32>,
    pub(crate) gradient: Slice,
    pub(crate) states: Vec<Slice>,
    pub(crate) copy: Option<Slice>,
}

impl Slices {
    /// Filled with what `value` gives.
    pub(crate) fn new(
        optimizer: &HostOptimizer,
        len: usize,
        [gradient, state]: [DType; 2],
        copy: Option<DType>,
        mut value: impl FnMut() -> f32,
    ) -> Self {
        let mut values = || (0..len).map(|_| value()).collect::<Vec<_>>();
        Self {
            parameters: values(),
            gradient: Slice::new(gradient, &values()),
            states: optimizer.states().iter().map(|_| Slice::new(state, &values())).collect(),
            copy: copy.map(|dtype| Slice::new(dtype, &vec![0.5; len])),
        }
    }

    pub(crate) fn truncated(&self, len: usize) -> Self {
        let mut slices = self.clone();
        slices.parameters.truncate(len);
        slices.gradient.truncate(len);
        slices.states.iter_mut().chain(&mut slices.copy).for_each(|slice| slice.truncate(len));
        slices
    }

    pub(crate) fn update(&mut self, optimizer: &HostOptimizer, workers: &Workers, update: Update) {
        let mut states: Vec<_> = self.states.iter_mut().map(Slice::get_mut).collect();
        let copy = self.copy.as_mut().map(Slice::get_mut);
        optimizer
            .update(workers, update, &mut self.parameters, self.gradient.get(), &mut states, copy)
            .unwrap();
    }

    /// Every number that an update may have changed, as bits; NaN is NaN, whatever its payload.
    pub(crate) fn bits(&self) -> Vec<Vec<u32>> {
        let bits = |values: Vec<f32>| {
            values.into_iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
        };
        std::iter::once(self.parameters.clone())
            .chain(self.states.iter().chain(&self.copy).map(Slice::values))
            .map(bits)
            .collect()
    }
}
