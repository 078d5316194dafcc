//! Gathered parameters that are still alive.

#[cfg(feature = "flex")]
use std::sync::{Arc, Weak};

use burn::tensor::Tensor;
#[cfg(feature = "flex")]
use burn::tensor::{Bytes as TensorBytes, DType};

/// A gathered parameter that may still be in use somewhere: a tape keeps it, or the same pass asks for it again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared {
    #[cfg(feature = "flex")]
    flex: Option<(Weak<TensorBytes>, DType)>,
}

impl Shared {
    pub(crate) fn new(tensor: &Tensor<1>) -> Self {
        #[cfg(feature = "flex")]
        if let Ok(flex) = tensor.clone().try_into_primitive::<burn_flex::Flex>() {
            return Self { flex: Some((Arc::downgrade(&flex.data_arc()), flex.dtype())) };
        }
        Self::default()
    }

    /// The parameter, if it is still alive.
    pub(crate) fn get(&self) -> Option<Tensor<1>> {
        #[cfg(feature = "flex")]
        {
            let (bytes, dtype) = self.flex.as_ref()?;
            let bytes = bytes.upgrade()?;
            let layout = burn_flex::Layout::contiguous([bytes.len() / dtype.size()].into());
            let flex = burn_flex::FlexTensor::from_arc(bytes, layout, *dtype);
            Some(Tensor::from_primitive::<burn_flex::Flex>(flex))
        }
        #[cfg(not(feature = "flex"))]
        None
    }
}
