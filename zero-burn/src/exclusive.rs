//! Shards to write to.

use burn::tensor::{Device, Tensor, TensorData};
#[cfg(feature = "flex")]
use burn_flex::{Flex, FlexTensor};

use crate::host::HostTensor;

/// The numbers of a shard, for one who may change them.
#[derive(Debug)]
pub(crate) enum Exclusive {
    /// Where they lie: nobody else has that memory.
    #[cfg(feature = "flex")]
    InPlace(FlexTensor),
    /// A copy: others read the shard, or it is a view of a replica that would stay with it.
    Copy(Vec<f32>),
}

impl Exclusive {
    /// Of an `f32` tensor.
    pub(crate) fn new(shard: Tensor<1>) -> Self {
        Self::in_place(shard).unwrap_or_else(|shard| Self::copy(*shard))
    }

    #[cfg(not(feature = "flex"))]
    fn in_place(shard: Tensor<1>) -> Result<Self, Box<Tensor<1>>> {
        Err(Box::new(shard))
    }

    #[cfg(feature = "flex")]
    fn in_place(shard: Tensor<1>) -> Result<Self, Box<Tensor<1>>> {
        let Ok(mut flex) = shard.clone().try_into_primitive::<Flex>() else { return Err(Box::new(shard)) };
        drop(shard);
        let numel = flex.layout().num_elements();
        let is_all = flex.is_contiguous() && flex.bytes().len() == numel * size_of::<f32>();
        if is_all && flex.try_storage_mut::<f32>().is_some() {
            return Ok(Self::InPlace(flex));
        }
        Err(Box::new(Tensor::from_primitive::<Flex>(flex)))
    }

    /// As [`new`](Self::new), for one who writes all of it: a copy holds zeros.
    pub(crate) fn to_overwrite(shard: Tensor<1>) -> Self {
        let numel = shard.shape().num_elements();
        Self::in_place(shard).unwrap_or_else(|_| Self::Copy(vec![0.0; numel]))
    }

    /// A copy, whoever has the memory.
    pub(crate) fn copy(shard: Tensor<1>) -> Self {
        Self::Copy(HostTensor::new(shard).as_slice().to_vec())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            #[cfg(feature = "flex")]
            Self::InPlace(flex) => flex.layout().num_elements(),
            Self::Copy(values) => values.len(),
        }
    }

    pub(crate) fn values(&mut self) -> &mut [f32] {
        match self {
            #[cfg(feature = "flex")]
            Self::InPlace(flex) => flex.storage_mut(),
            Self::Copy(values) => values,
        }
    }

    pub(crate) fn into_tensor(self, device: &Device) -> Tensor<1> {
        match self {
            #[cfg(feature = "flex")]
            Self::InPlace(flex) => Tensor::from_primitive::<Flex>(flex),
            Self::Copy(values) => {
                let shape = [values.len()];
                Tensor::from_data(TensorData::new(values, shape), device)
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn numbers() -> Tensor<1> {
        Tensor::from_floats([1.0, 2.0, 3.0, 4.0], &Device::flex())
    }

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    #[test]
    fn memory_that_nobody_else_has_is_written_in_place() {
        let mut alone = Exclusive::new(numbers());
        assert!(matches!(alone, Exclusive::InPlace(_)));
        alone.values()[1] = 9.0;
        assert_eq!(values(alone.into_tensor(&Device::flex())), [1.0, 9.0, 3.0, 4.0]);
    }

    #[test]
    fn what_others_hold_stays_as_it_is() {
        let whole = numbers();
        for shard in [whole.clone(), whole.clone().narrow(0, 1, 2)] {
            let mut copy = Exclusive::new(shard);
            assert!(matches!(copy, Exclusive::Copy(_)));
            copy.values().fill(7.0);
            assert_eq!(copy.len(), values(copy.into_tensor(&Device::flex())).len());
        }
        assert_eq!(values(whole), [1.0, 2.0, 3.0, 4.0]);
        // A view alone would keep all of the memory.
        assert!(matches!(Exclusive::new(numbers().narrow(0, 1, 2)), Exclusive::Copy(_)));
    }
}
