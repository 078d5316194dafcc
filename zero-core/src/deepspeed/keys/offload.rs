//! Keys about what is kept in host memory or on a disk.

use crate::Tier;
use crate::config::value::Value;
use crate::deepspeed::key::{Key, When, boolean, choice, count, number, optional};
use crate::deepspeed::offload::{
    CPU_OPTIMIZER, CPU_PARAMETERS, OPTIMIZER, OPTIMIZER_PATH, PARAMETERS, QUEUE_DEPTH,
};

const SHARDS_STAY: &str = "shards stay on the device";
const OWN_BUFFERS: &str =
    "`offload.buffer_bytes` bounds the engine's buffers, for each kind of state; results are the same";
const OWN_THREADS: &str = "the engine chooses the threads of an update; results are the same";
const OWN_TRANSFERS: &str = "the queue of transfers is kept full in any case; results are the same";
const OVERLAPS: &str = "reading and writing run beside the update in any case; results are the same";
const STATE: &str = "`offload.optimizer` and `offload.gradients` and `offload.parameters`";

/// Bytes of a block: so many that buffers hold enough of them.
const BLOCKS: std::ops::RangeInclusive<u64> = 4 << 10..=16 << 20;

fn device(value: &Value) -> Result<Tier, String> {
    choice(value, &[("none", Tier::Device), ("cpu", Tier::Host), ("nvme", Tier::Nvme)])
}

fn directory(value: &Value) -> Result<String, String> {
    match value {
        Value::Text(path) if !path.is_empty() => Ok(path.clone()),
        _ => Err("write the name of a directory".into()),
    }
}

pub(super) static KEYS: &[Key] = &[
    Key::taken(PARAMETERS, "\"none\"", When::StageThree, "`offload.parameters`", |draft, value| {
        draft.offload.parameters = device(value)?;
        Ok(())
    })
    .note(
        "\"cpu\" and \"nvme\" are the tier host, approximated: f32 master weights are kept there, or with the optimizer's \
         state if that is on a disk; the shards that ranks read from each other, in 16 bits or f32, stay on the device",
    ),
    Key::ignored("zero_optimization.offload_param.nvme_path", "null", "shards stay in memory"),
    Key::ignored("zero_optimization.offload_param.buffer_count", "5", SHARDS_STAY),
    Key::ignored("zero_optimization.offload_param.buffer_size", "100000000", SHARDS_STAY),
    Key::ignored("zero_optimization.offload_param.max_in_cpu", "1000000000", SHARDS_STAY),
    Key::ignored("zero_optimization.offload_param.pin_memory", "true", OWN_BUFFERS),
    Key::taken(OPTIMIZER, "\"none\"", When::Sharded, STATE, |draft, value| {
        draft.offload.optimizer = device(value)?;
        Ok(())
    })
    .note(
        "\"cpu\" is the tier host, \"nvme\" is for stage 3 alone; as in DeepSpeed, gradients and master weights go with \
         the optimizer's state, but, approximated, master weights in f32 stay on the device",
    ),
    Key::taken(
        OPTIMIZER_PATH,
        "null",
        When::OptimizerOnDisk,
        "`offload.optimizer.path` and `offload.gradients.path` and `offload.parameters.path`",
        |draft, value| {
            draft.offload.optimizer_path = optional(value, directory)?;
            Ok(())
        },
    ),
    Key::ignored("zero_optimization.offload_optimizer.buffer_count", "4", OWN_BUFFERS),
    Key::ignored("zero_optimization.offload_optimizer.pin_memory", "true", OWN_BUFFERS),
    Key::ignored("zero_optimization.offload_optimizer.pipeline_read", "false", OVERLAPS),
    Key::ignored("zero_optimization.offload_optimizer.pipeline_write", "false", OVERLAPS),
    Key::ignored(
        "zero_optimization.offload_optimizer.fast_init",
        "false",
        "state begins where it is kept in any case",
    ),
    Key::taken(
        "zero_optimization.offload_optimizer.ratio",
        "1.0",
        When::OptimizerOffloaded,
        "`offload.optimizer.fraction` and `offload.gradients.fraction` and `offload.parameters.fraction`",
        |draft, value| {
            draft.offload.ratio = number(value, "from 0 to 1", |ratio| (0.0..=1.0).contains(&ratio))?;
            Ok(())
        },
    )
    .note("of each shard, and of gradients on a disk in whole buckets, where DeepSpeed counts whole sub-groups, at stage 3"),
    Key::ignored(
        "zero_optimization.offload_optimizer.super_offload",
        "false",
        "an update begins when its gradients are known; results are the same",
    ),
    Key::ignored("zero_optimization.offload_optimizer.cpuadam_cores_perc", "0.8", OWN_THREADS),
    Key::taken(CPU_OPTIMIZER, "null", When::Present, STATE, |draft, value| {
        draft.offload.cpu_optimizer = optional(value, boolean)?.unwrap_or(false);
        Ok(())
    })
    .note("true is offload_optimizer with the device \"cpu\""),
    Key::taken(CPU_PARAMETERS, "null", When::Present, "`offload.parameters`", |draft, value| {
        draft.offload.cpu_parameters = optional(value, boolean)?.unwrap_or(false);
        Ok(())
    })
    .note("true is offload_param with the device \"cpu\""),
    Key::ignored("zero_optimization.cpu_offload_use_pin_memory", "null", OWN_BUFFERS),
    Key::taken("aio.block_size", "1048576", When::OptimizerOnDisk, "`offload.block_bytes`", |draft, value| {
        let bytes = count(value, 0)?;
        if !(bytes.is_power_of_two() && BLOCKS.contains(&bytes)) {
            return Err(format!("must be a power of two from {} to {}", BLOCKS.start(), BLOCKS.end()));
        }
        draft.offload.block_bytes = bytes;
        Ok(())
    })
    .note("a power of two from 4096 to 16777216"),
    Key::taken(QUEUE_DEPTH, "8", When::OptimizerOnDisk, "`offload.depth`", |draft, value| {
        draft.offload.queue_depth = count(value, 1)?;
        Ok(())
    })
    .note("times aio.intra_op_parallelism"),
    Key::taken("aio.intra_op_parallelism", "1", When::OptimizerOnDisk, "`offload.depth`", |draft, value| {
        draft.offload.threads = count(value, 1)?;
        Ok(())
    })
    .note("times aio.queue_depth"),
    Key::ignored("aio.single_submit", "false", OWN_TRANSFERS),
    Key::ignored("aio.overlap_events", "true", OWN_TRANSFERS),
    Key::nearly("aio.use_gds", "false", "transfers pass through host memory, with the same results"),
];
