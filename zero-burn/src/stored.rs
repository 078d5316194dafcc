//! Optimizer state at rest.

use std::collections::BTreeMap;

use burn::optim::{RecordState, StateSink, StateSource};
use burn::tensor::{Device, TensorData};
use zero_core::DType;

use crate::host::tensor_dtype;

/// An optimizer's state of one shard between two steps: as the optimizer left it, or with its floats rounded.
#[derive(Debug)]
pub enum Stored<S> {
    AsIs(S),
    Rounded(StateSink),
}

const PREFIX: &str = "state";

impl<S: RecordState> Stored<S> {
    /// Puts `state` away with floats of `dtype`.
    pub(crate) fn new(state: S, dtype: DType) -> Self {
        if dtype == DType::F32 {
            return Self::AsIs(state);
        }
        let mut sink = StateSink::default();
        state.state_flatten(PREFIX, &mut sink);
        for (_, tensor) in &mut sink.tensors {
            if tensor.dtype() == tensor_dtype(DType::F32) {
                *tensor = std::mem::replace(tensor, TensorData::from([0.0_f32; 0]))
                    .convert_dtype(tensor_dtype(dtype));
            }
        }
        Self::Rounded(sink)
    }

    /// The state as the optimizer takes it; `None` if what was put away cannot be read back, which
    /// [`elementwise::check`](crate::elementwise::check) has tried.
    pub(crate) fn load(self, device: &Device) -> Option<S> {
        let sink = match self {
            Self::AsIs(state) => return Some(state),
            Self::Rounded(sink) => sink,
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
            Self::Rounded(sink) => bytes(sink),
            Self::AsIs(state) => {
                let mut sink = StateSink::default();
                state.state_flatten(PREFIX, &mut sink);
                bytes(&sink)
            }
        }
    }
}
