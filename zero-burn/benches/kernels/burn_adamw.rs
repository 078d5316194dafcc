//! Burn's own AdamW.

use std::error::Error;

use burn::optim::{AdamW, AdamWConfig, Optimizer};
use burn::tensor::{Device, Tensor};
use cubecl::client::Client;

use crate::timed;

/// One tensor that Burn's AdamW updates.
pub(crate) struct BurnAdamW {
    optimizer: AdamW,
    values: Option<Tensor<1>>,
    gradient: Tensor<1>,
    state: Option<<AdamW as Optimizer>::State<1>>,
}

impl BurnAdamW {
    pub(crate) fn new(device: &cubecl::Device, elements: usize) -> Self {
        let device = Device::new(device.clone());
        let uniform = burn::tensor::Distribution::Uniform(-1.0, 1.0);
        Self {
            optimizer: AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).build(),
            values: Some(Tensor::random([elements], uniform, &device)),
            gradient: Tensor::random([elements], uniform, &device),
            state: None,
        }
    }

    /// Seconds of an update.
    pub(crate) fn seconds(&mut self, client: &Client) -> Result<f64, Box<dyn Error>> {
        timed(client, || {
            let values = self.values.take().ok_or("the values are always put back")?;
            let (values, state) = self.optimizer.step(1e-3, values, self.gradient.clone(), self.state.take());
            self.values = Some(values);
            self.state = state;
            Ok(())
        })
    }
}
