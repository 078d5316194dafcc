//! What DeepSpeed estimates, for comparison with [`MemorySetup::plan`](crate::MemorySetup::plan).
//!
//! Source: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` at the end of
//! `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`, version 0.19.6. Both assume mixed precision and
//! Adam, and count model states only. Results are rounded down to whole bytes as there; DeepSpeed divides in
//! floating point, so it can be a byte off from these exact figures where a division by the number of nodes
//! leaves a rest.

use std::num::NonZeroU32;

use crate::Bytes;

/// A job as DeepSpeed's estimators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeepSpeedJob {
    /// Parameters of the model, in elements.
    pub params: u64,
    /// Devices of one node.
    pub gpus_per_node: NonZeroU32,
    /// Nodes.
    pub nodes: NonZeroU32,
}

/// What DeepSpeed's stage 3 keeps in host memory. It ignores parameter offload without optimizer offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeepSpeedOffload {
    /// Nothing.
    None,
    /// Optimizer state.
    Optimizer,
    /// Optimizer state and parameters.
    OptimizerAndParameters,
}

/// The bytes DeepSpeed says a job needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeepSpeedEstimate {
    /// Host memory of one node.
    pub host: Bytes,
    /// Memory of one device.
    pub device: Bytes,
    /// At stage 3, the part of `device` that the largest layer takes when gathered.
    pub largest_layer: Option<Bytes>,
}

/// DeepSpeed's estimate for stage 2, with its default buffer factor of 1.5.
///
/// With offload the host figure follows DeepSpeed in taking all devices for those of one node, which
/// overestimates jobs of several nodes.
pub fn deepspeed_zero2(job: DeepSpeedJob, offload_optimizer: bool) -> DeepSpeedEstimate {
    let replica = 2 * job.params();
    let (host, device) = if offload_optimizer {
        (job.params().saturating_mul((4 * job.devices()).max(16)), replica)
    } else {
        (job.params() * 4 * job.per_node(), replica + 18 * job.params() / job.devices())
    };
    DeepSpeedEstimate { host: bytes(with_buffers(host)), device: bytes(device), largest_layer: None }
}

/// DeepSpeed's estimate for stage 3, with its default buffer factor of 1.5.
///
/// `largest_layer` is the number of elements of the layer with the most parameters; `sharded_init` says
/// whether the model is made shard by shard (`zero.Init`) or whole on every rank.
pub fn deepspeed_zero3(
    job: DeepSpeedJob,
    largest_layer: u64,
    offload: DeepSpeedOffload,
    sharded_init: bool,
) -> DeepSpeedEstimate {
    let layer = 4 * u128::from(largest_layer);
    let offloaded = |per_element: u128| {
        let per_element = if sharded_init { per_element } else { per_element.max(4 * job.devices()) };
        with_buffers(job.params().saturating_mul(per_element)) / u128::from(job.nodes.get())
    };
    let (host, device) = match offload {
        DeepSpeedOffload::OptimizerAndParameters => (offloaded(18), layer),
        DeepSpeedOffload::Optimizer => (offloaded(16), layer + 2 * job.params() / job.devices()),
        DeepSpeedOffload::None => {
            let whole = if sharded_init { u128::from(largest_layer) } else { job.params() };
            (with_buffers(whole * 4 * job.per_node()), layer + 18 * job.params() / job.devices())
        }
    };
    DeepSpeedEstimate { host: bytes(host), device: bytes(device), largest_layer: Some(bytes(layer)) }
}

// Wider than their sources, so that only the product of parameters and devices could overflow.
impl DeepSpeedJob {
    fn params(self) -> u128 {
        self.params.into()
    }

    fn per_node(self) -> u128 {
        self.gpus_per_node.get().into()
    }

    fn devices(self) -> u128 {
        self.per_node() * u128::from(self.nodes.get())
    }
}

/// DeepSpeed's `additional_buffer_factor`, 1.5 unless a caller changes it.
fn with_buffers(bytes: u128) -> u128 {
    bytes.saturating_mul(3) / 2
}

fn bytes(count: u128) -> Bytes {
    Bytes::new(u64::try_from(count).unwrap_or(u64::MAX))
}
