//! Keys of the top level: batches, gradients, logs.

use crate::config::value::Value;
use crate::deepspeed::key::{Key, OrElse, When, count, number, optional};

/// Samples or backwards, if any; 0 is for the batch plan to refuse.
fn samples(value: &Value) -> Result<Option<usize>, String> {
    let read = |value: &Value| {
        let number = count(value, 0)?;
        usize::try_from(number).map_err(|_| "is more than this machine can count".to_owned())
    };
    optional(value, read)
}

fn of_usize(value: Option<usize>) -> Option<Value> {
    value.map(|number| Value::Integer(number as i128))
}

const PROGRAM_LOGS: &str = "the program writes its own logs";

pub(super) static KEYS: &[Key] = &[
    Key::taken("train_batch_size", "null", When::Present, "`BatchPlan`", |draft, value| {
        draft.train_batch_size = samples(value)?;
        Ok(())
    })
    .given_or(OrElse::Division, "train_batch_size", |given| of_usize(given.train_batch_size)),
    Key::taken("train_micro_batch_size_per_gpu", "null", When::Present, "`BatchPlan`", |draft, value| {
        draft.micro_batch_size = samples(value)?;
        Ok(())
    })
    .given_or(OrElse::Division, "micro_batch_size_per_rank", |given| {
        of_usize(given.micro_batch_size_per_rank)
    }),
    Key::taken("gradient_accumulation_steps", "null", When::Present, "`BatchPlan`", |draft, value| {
        draft.accumulation_steps = samples(value)?;
        Ok(())
    })
    .given_or(OrElse::Division, "accumulation_steps", |given| of_usize(given.accumulation_steps)),
    Key::ignored("managed_gradient_accumulation", "true", "the program says when a step is due"),
    Key::taken("gradient_clipping", "1.0", When::Always, "`clip_norm`", |draft, value| {
        draft.clip_norm = number(value, "0 for no clipping, or a norm above", |norm| norm >= 0.0)?;
        Ok(())
    })
    .given("clip_norm", |given| given.clip_norm.map(Value::Float))
    .note("not set for 0; before DeepSpeed 0.19.3 the default was 0"),
    Key::nearly(
        "prescale_gradients",
        "false",
        "the mean is the same; sums are taken in f32, and need no division before",
    ),
    Key::nearly(
        "gradient_predivide_factor",
        "1.0",
        "the mean is the same; sums are taken in f32, and need no division before",
    ),
    Key::off(
        "gradient_allreduce_op",
        "\"mean\"",
        &["\"mean\""],
        "gradients are averaged; write \"mean\", and multiply the loss by the number of ranks for sums",
    ),
    Key::nearly("sparse_gradients", "false", "gradients of embeddings are dense, with the same values"),
    Key::ignored(
        "zero_allow_untested_optimizer",
        "false",
        "optimizers are tried, and none is refused for not being on a list",
    ),
    Key::ignored(
        "zero_force_ds_cpu_optimizer",
        "true",
        "the optimizer is the same wherever its state is kept",
    ),
    Key::ignored("disable_allgather", "false", "DeepSpeed does not read it either"),
    Key::ignored("wall_clock_breakdown", "false", PROGRAM_LOGS),
    Key::ignored("memory_breakdown", "false", PROGRAM_LOGS),
    Key::ignored("steps_per_print", "null", PROGRAM_LOGS),
    Key::ignored("dump_state", "false", PROGRAM_LOGS),
    Key::ignored("log_level", "null", PROGRAM_LOGS),
    Key::ignored("timers.throughput.enabled", "true", PROGRAM_LOGS),
    Key::ignored("timers.throughput.synchronized", "true", PROGRAM_LOGS),
    Key::ignored("vocabulary_size", "null", "DeepSpeed uses it for a warning alone"),
    Key::ignored("graph_harvesting", "false", "the backend decides what it captures; results are the same"),
    Key::ignored("dataloader_drop_last", "false", "the program loads its data"),
    Key::ignored("use_data_before_expert_parallelism", "false", "there is no expert parallelism"),
    Key::off(
        "sequence_parallel_size",
        "1",
        &["1", "null"],
        "there is no sequence parallelism; remove it, or write 1",
    ),
    Key::ignored("data_parallel_size", "null", "the number of ranks is given"),
    Key::ignored("seq_parallel_communication_data_type", "\"fp32\"", "there is no sequence parallelism"),
];
