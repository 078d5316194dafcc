//! DeepSpeed's estimates, against recorded figures.

use std::num::NonZeroU32;

use serde::Deserialize;
use zero_core::{Bytes, DeepSpeedEstimate, DeepSpeedJob, DeepSpeedOffload, deepspeed_zero2, deepspeed_zero3};

/// What one call of an estimator of DeepSpeed is given and returns, in bytes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    stage: u8,
    params: u64,
    largest_layer: Option<u64>,
    gpus_per_node: NonZeroU32,
    nodes: NonZeroU32,
    offload_optimizer: bool,
    offload_param: Option<bool>,
    sharded_init: Option<bool>,
    host_bytes: Bytes,
    device_bytes: Bytes,
    largest_layer_bytes: Option<Bytes>,
}

fn estimate(vector: &Vector) -> Option<DeepSpeedEstimate> {
    let job =
        DeepSpeedJob { params: vector.params, gpus_per_node: vector.gpus_per_node, nodes: vector.nodes };
    if vector.stage == 2 {
        return Some(deepspeed_zero2(job, vector.offload_optimizer));
    }
    let offload = match (vector.offload_optimizer, vector.offload_param?) {
        (false, _) => DeepSpeedOffload::None,
        (true, false) => DeepSpeedOffload::Optimizer,
        (true, true) => DeepSpeedOffload::OptimizerAndParameters,
    };
    Some(deepspeed_zero3(job, vector.largest_layer?, offload, vector.sharded_init?))
}

#[test]
fn estimates_equal_deepspeeds_to_the_byte() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("vectors/deepspeed_memory.json")).unwrap();
    assert_eq!(vectors.len(), 160);
    for vector in vectors {
        let expected = DeepSpeedEstimate {
            host: vector.host_bytes,
            device: vector.device_bytes,
            largest_layer: vector.largest_layer_bytes,
        };
        assert_eq!(estimate(&vector), Some(expected), "{vector:?}");
    }
}

#[test]
fn the_largest_job_saturates() {
    let job = DeepSpeedJob { params: u64::MAX, gpus_per_node: NonZeroU32::MAX, nodes: NonZeroU32::MAX };
    assert_eq!(deepspeed_zero2(job, true).host, Bytes::new(u64::MAX));
    for offload in
        [DeepSpeedOffload::None, DeepSpeedOffload::Optimizer, DeepSpeedOffload::OptimizerAndParameters]
    {
        assert_eq!(deepspeed_zero3(job, u64::MAX, offload, false).host, Bytes::new(u64::MAX));
    }
}
