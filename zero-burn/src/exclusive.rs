//! Shards to write to.

use burn::tensor::{Device, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};

use crate::host::HostTensor;

/// The numbers of a shard, for one who may change them.
#[derive(Debug)]
pub(crate) enum Exclusive {
    /// Where they lie: nobody else has that memory.
    InPlace(FlexTensor),
    /// A copy: others read the shard, or it is a view of a replica that would stay with it.
    Copy(Vec<f32>),
}

impl Exclusive {
    /// Of an `f32` tensor.
    pub(crate) fn new(shard: Tensor<1>) -> Self {
        match shard.clone().try_into_primitive::<Flex>() {
            Ok(mut flex) => {
                drop(shard);
                let numel = flex.layout().num_elements();
                let is_all = flex.is_contiguous() && flex.bytes().len() == numel * size_of::<f32>();
                if is_all && flex.try_storage_mut::<f32>().is_some() {
                    return Self::InPlace(flex);
                }
                Self::copy(Tensor::from_primitive::<Flex>(flex))
            }
            Err(_) => Self::copy(shard),
        }
    }

    /// A copy, whoever has the memory.
    pub(crate) fn copy(shard: Tensor<1>) -> Self {
        Self::Copy(HostTensor::new(shard).as_slice().to_vec())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InPlace(flex) => flex.layout().num_elements(),
            Self::Copy(values) => values.len(),
        }
    }

    pub(crate) fn values(&mut self) -> &mut [f32] {
        match self {
            Self::InPlace(flex) => flex.storage_mut(),
            Self::Copy(values) => values,
        }
    }

    pub(crate) fn into_tensor(self, device: &Device) -> Tensor<1> {
        match self {
            Self::InPlace(flex) => Tensor::from_primitive::<Flex>(flex),
            Self::Copy(values) => {
                let shape = [values.len()];
                Tensor::from_data(TensorData::new(values, shape), device)
            }
        }
    }
}
