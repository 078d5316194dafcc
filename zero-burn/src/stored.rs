//! Optimizer state at rest.

use std::collections::BTreeMap;

use burn::optim::{Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};
use half::{bf16, f16};
use serde_json::{Map, Value};
use zero_checkpoint::BoxError;
use zero_core::DType;

use crate::host::{host_dtype, tensor_dtype};
use crate::kept::Kept;

/// An optimizer's state of one shard between two steps: as the optimizer left it, or flat, its floats in the type that they
/// are kept in.
#[derive(Debug)]
pub enum Stored<S> {
    AsIs(S),
    /// Its tensors and scalars.
    Flat(StateSink),
}

const PREFIX: &str = "state";

impl<S: RecordState> Stored<S> {
    /// Puts `state` away with floats of `dtype`.
    pub(crate) fn new(state: S, dtype: DType) -> Self {
        if dtype == DType::F32 {
            return Self::AsIs(state);
        }
        let mut sink = flatten(&state);
        for (_, tensor) in &mut sink.tensors {
            if tensor.dtype() == tensor_dtype(DType::F32) {
                *tensor = std::mem::replace(tensor, TensorData::from([0.0_f32; 0]))
                    .convert_dtype(tensor_dtype(dtype));
            }
        }
        Self::Flat(sink)
    }

    /// The state as the optimizer takes it; `None` if what was put away cannot be read back, which
    /// [`elementwise::check`](crate::elementwise::check) has tried.
    pub(crate) fn load(self, device: &Device) -> Option<S> {
        let sink = match self {
            Self::AsIs(state) => return Some(state),
            Self::Flat(sink) => sink,
        };
        let mut source = StateSource::new(sink.scalars.into_iter().collect::<BTreeMap<_, _>>());
        for (name, tensor) in sink.tensors {
            let float = [DType::F16, DType::BF16].map(tensor_dtype).contains(&tensor.dtype());
            let tensor = if float { tensor.convert_dtype(tensor_dtype(DType::F32)) } else { tensor };
            source.insert_tensor(name, tensor);
        }
        S::state_unflatten(PREFIX, &mut source, device)
    }

    /// Bytes of the tensors in it.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes =
            |sink: &StateSink| sink.tensors.iter().map(|(_, data)| data.as_bytes().len() as u64).sum();
        match self {
            Self::Flat(sink) => bytes(sink),
            Self::AsIs(state) => bytes(&flatten(state)),
        }
    }
}

fn flatten<S: RecordState>(state: &S) -> StateSink {
    let mut sink = StateSink::default();
    state.state_flatten(PREFIX, &mut sink);
    sink
}

/// The tensors and scalars of a state of one element, as a pattern for others.
#[derive(Debug)]
pub(crate) struct Pattern(StateSink);

impl Pattern {
    /// Of the states that `optimizer` keeps, with floats of `dtype`; empty if it keeps none.
    pub(crate) fn of<O: Optimizer>(optimizer: &O, dtype: DType, device: &Device) -> Self {
        let one = || Tensor::<1>::ones([1], device);
        let (_, state) = optimizer.step(0.0, one(), one(), None);
        match state.map(|state| Stored::new(state, dtype)) {
            Some(Stored::AsIs(state)) => Self(flatten(&state)),
            Some(Stored::Flat(sink)) => Self(sink),
            None => Self(StateSink::default()),
        }
    }

    /// Names that checkpoints can have, and types; `None` for types that they have not.
    pub(crate) fn tensors(&self) -> Option<Vec<(String, DType)>> {
        let name = |path: &str| path.trim_start_matches(PREFIX).trim_start_matches('.').replace('.', "__");
        let tensors = self.0.tensors.iter();
        tensors.map(|(path, data)| Some((name(path), host_dtype(data.dtype())?))).collect()
    }

    /// A state of `numel` elements, all zeros.
    pub(crate) fn blank<S>(
        self,
        numel: usize,
        scalars: Option<&Map<String, Value>>,
    ) -> Result<Stored<S>, String> {
        let Self(mut sink) = self;
        for (_, data) in &mut sink.tensors {
            let bytes = vec![0; numel * data.dtype().size()];
            *data = TensorData::from_bytes_vec(bytes, [numel], data.dtype());
        }
        for (path, scalar) in &mut sink.scalars {
            let saved =
                scalars.and_then(|scalars| scalars.get(path)).ok_or_else(|| format!("it has no `{path}`"))?;
            *scalar = serde_json::from_value(saved.clone()).map_err(|error| format!("`{path}`: {error}"))?;
        }
        Ok(Stored::Flat(sink))
    }
}

fn bytes_mut(data: &mut TensorData) -> Option<&mut [u8]> {
    match host_dtype(data.dtype())? {
        DType::F16 => data.as_mut_slice::<f16>().ok().map(bytemuck::cast_slice_mut),
        DType::BF16 => data.as_mut_slice::<bf16>().ok().map(bytemuck::cast_slice_mut),
        _ => data.as_mut_slice::<f32>().ok().map(bytemuck::cast_slice_mut),
    }
}

impl<S: RecordState> Kept for Stored<S> {
    fn rest(&mut self) {
        if let Self::AsIs(state) = self {
            *self = Self::Flat(flatten(state));
        }
    }

    fn scalars(&self) -> Map<String, Value> {
        let Self::Flat(sink) = self else { return Map::new() };
        let scalars = sink.scalars.iter();
        scalars
            .map(|(path, scalar)| (path.clone(), serde_json::to_value(scalar).unwrap_or_default()))
            .collect()
    }

    fn read(&self, tensor: usize, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        let Self::Flat(sink) = self else { return Err(NOT_FLAT.into()) };
        let from = sink.tensors[tensor].1.as_bytes();
        let from = from.get(offset as usize..).and_then(|from| from.get(..into.len()));
        into.copy_from_slice(from.ok_or("its tensors are not as long as the parameter")?);
        Ok(())
    }

    fn write(&mut self, tensor: usize, offset: u64, from: &[u8]) -> Result<(), BoxError> {
        let Self::Flat(sink) = self else { return Err(NOT_FLAT.into()) };
        let into = bytes_mut(&mut sink.tensors[tensor].1).ok_or("only floats are saved")?;
        into[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
}

const NOT_FLAT: &str = "a state is at rest before it is read or written";
