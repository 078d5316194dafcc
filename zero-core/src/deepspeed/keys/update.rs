//! Keys of the optimizer and of the learning rate.

use crate::config::value::Value;
use crate::deepspeed::draft::Draft;
use crate::deepspeed::key::{Key, When, boolean, choice, count, number, optional};
use crate::deepspeed::optimizer::OptimizerKind;
use crate::deepspeed::scheduler::SchedulerKind;

const OPTIMIZER: &str = "`DeepSpeedOptimizer`";
const SCHEDULER: &str = "`DeepSpeedScheduler`";
const OF_KERNELS: &str = "it chooses between kernels of PyTorch";

/// A number of at least 0.
fn amount(value: &Value) -> Result<f64, String> {
    number(value, "at least 0", |number| number >= 0.0)
}

/// A number from 0 to below 1.
fn share(value: &Value) -> Result<f64, String> {
    number(value, "at least 0 and below 1", |number| (0.0..1.0).contains(&number))
}

/// The rate of an only parameter group.
fn rate(value: &Value) -> Result<f64, String> {
    match value {
        Value::Array(_) => Err("write one number; parameter groups have settings of their own".into()),
        value => amount(value),
    }
}

/// A default of Adagrad alone.
fn of_adagrad(draft: &Draft, default: f64) -> Option<Value> {
    (draft.optimizer.kind == Some(OptimizerKind::Adagrad)).then_some(Value::Float(default))
}

fn of_u64(value: Option<u64>) -> Option<Value> {
    value.map(|number| Value::Integer(number.into()))
}

pub(super) static KEYS: &[Key] = &[
    Key::taken("optimizer.type", "null", When::Present, OPTIMIZER, |draft, value| {
        draft.optimizer.kind = optional(value, |value| choice(value, OptimizerKind::NAMES))?;
        Ok(())
    })
    .note("`Adam` is `AdamW` unless adam_w_mode is false"),
    Key::ignored("optimizer.legacy_fusion", "false", OF_KERNELS),
    Key::taken(
        "optimizer.params.lr",
        "0.001",
        When::Optimizer(OptimizerKind::ALL),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.lr = rate(value)?;
            Ok(())
        },
    )
    .given("lr", |given| given.lr.map(Value::Float))
    .or_own(|draft| of_adagrad(draft, 0.01))
    .note("0.01 by default for Adagrad"),
    Key::taken(
        "optimizer.params.betas",
        "[0.9, 0.999]",
        When::Optimizer(OptimizerKind::WITH_BETAS),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.betas = match value {
                Value::Array(betas) => match betas.as_slice() {
                    [first, second] => [share(first)?, share(second)?],
                    _ => return Err("write two numbers".into()),
                },
                _ => return Err("write an array of two numbers".into()),
            };
            Ok(())
        },
    )
    .given("betas", |given| {
        given.betas.map(|betas| Value::Array(betas.into_iter().map(Value::Float).collect()))
    }),
    Key::taken(
        "optimizer.params.eps",
        "1e-8",
        When::Optimizer(OptimizerKind::WITH_EPS),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.eps = amount(value)?;
            Ok(())
        },
    )
    .given("eps", |given| given.eps.map(Value::Float))
    .or_own(|draft| of_adagrad(draft, 1e-10))
    .note("1e-10 by default for Adagrad"),
    Key::taken(
        "optimizer.params.weight_decay",
        "0.0",
        When::Optimizer(OptimizerKind::ALL),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.weight_decay = amount(value)?;
            Ok(())
        },
    )
    .given("weight_decay", |given| given.weight_decay.map(Value::Float))
    .or_own(|draft| {
        // PyTorch's AdamW has a decay of its own.
        let optimizer = &draft.optimizer;
        (optimizer.torch_adam && optimizer.is_decoupled()).then_some(Value::Float(0.01))
    })
    .note("0.01 by default for AdamW with torch_adam"),
    Key::taken(
        "optimizer.params.adam_w_mode",
        "true",
        When::Optimizer(OptimizerKind::ADAMS),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.adam_w_mode = boolean(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "optimizer.params.torch_adam",
        "false",
        When::Optimizer(OptimizerKind::ADAMS),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.torch_adam = boolean(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "optimizer.params.lr_decay",
        "0.0",
        When::Optimizer(OptimizerKind::ADAGRAD),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.lr_decay = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "optimizer.params.momentum",
        "0.0",
        When::Optimizer(OptimizerKind::SGD),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.momentum = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "optimizer.params.dampening",
        "0.0",
        When::Optimizer(OptimizerKind::SGD),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.dampening = number(value, "a number", |_| true)?;
            Ok(())
        },
    ),
    Key::taken(
        "optimizer.params.nesterov",
        "false",
        When::Optimizer(OptimizerKind::SGD),
        OPTIMIZER,
        |draft, value| {
            draft.optimizer.nesterov = boolean(value)?;
            Ok(())
        },
    ),
    Key::off("optimizer.params.bias_correction", "true", &["true"], "Adam here always corrects; write true"),
    Key::not_true("optimizer.params.amsgrad", "DeepSpeed's Adam has no such variant; write false"),
    Key::not_true("optimizer.params.maximize", "negate the loss instead, and write false"),
    Key::off(
        "optimizer.params.max_grad_norm",
        "0.0",
        &["0.0", "null"],
        "DeepSpeed refuses it as well; write gradient_clipping instead",
    ),
    Key::ignored("optimizer.params.set_grad_none", "true", "gradients are freed when they are used up"),
    Key::ignored("optimizer.params.fp32_optimizer_states", "null", "bf16.bf16_optimizer_states decides"),
    Key::ignored("optimizer.params.fused", "null", OF_KERNELS),
    Key::ignored("optimizer.params.foreach", "null", OF_KERNELS),
    Key::ignored("optimizer.params.capturable", "false", OF_KERNELS),
    Key::taken("scheduler.type", "null", When::Present, SCHEDULER, |draft, value| {
        draft.scheduler.kind = optional(value, |value| choice(value, SchedulerKind::NAMES))?;
        Ok(())
    }),
    Key::taken(
        "scheduler.params.warmup_min_lr",
        "0.0",
        When::Scheduler(SchedulerKind::WITH_RATES),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.min_lr = rate(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.warmup_max_lr",
        "null",
        When::Scheduler(SchedulerKind::WITH_RATES),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.max_lr = optional(value, rate)?;
            Ok(())
        },
    )
    .given("lr", |given| given.lr.map(Value::Float))
    .or_own(|draft| draft.scheduler.peak_lr(draft.optimizer_lr()).map(Value::Float))
    .note("by default 0.001 for WarmupDecayLR and the optimizer's rate for WarmupLR"),
    Key::taken(
        "scheduler.params.warmup_num_steps",
        "1000",
        When::Scheduler(SchedulerKind::WARMUPS),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.warmup_steps = count(value, 1)?;
            Ok(())
        },
    )
    .given("warmup_steps", |given| of_u64(given.warmup_steps))
    .note("at least 2"),
    Key::taken(
        "scheduler.params.warmup_type",
        "\"log\"",
        When::Scheduler(SchedulerKind::WARMUPS),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.linear = match value {
                Value::Text(word) if word == "log" => false,
                Value::Text(word) if word == "linear" => true,
                _ => {
                    return Err(
                        "must be \"log\" or \"linear\", as DeepSpeed takes all else for \"log\"".into()
                    );
                }
            };
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.total_num_steps",
        "null",
        When::Scheduler(SchedulerKind::WITH_TOTAL),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.total_steps = optional(value, |value| count(value, 1))?;
            Ok(())
        },
    )
    .given("total_steps", |given| of_u64(given.total_steps)),
    Key::taken(
        "scheduler.params.warmup_min_ratio",
        "0.0",
        When::Scheduler(SchedulerKind::COSINE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.min_ratio = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cos_min_ratio",
        "0.0001",
        When::Scheduler(SchedulerKind::COSINE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.cos_min_ratio = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_min_lr",
        "null",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.cycle_min_lr = optional(value, rate)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_max_lr",
        "null",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.cycle_max_lr = optional(value, rate)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_first_step_size",
        "2000",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.first_steps = count(value, 1)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_second_step_size",
        "null",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.second_steps = optional(value, |value| count(value, 0))?;
            Ok(())
        },
    )
    .or_own(|draft| of_u64(Some(draft.scheduler.second_steps())))
    .note("as cycle_first_step_size for null"),
    Key::taken(
        "scheduler.params.cycle_first_stair_count",
        "0",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.first_stairs = count(value, 0)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_second_stair_count",
        "null",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.second_stairs = optional(value, |value| count(value, 0))?;
            Ok(())
        },
    )
    .or_own(|draft| of_u64(Some(draft.scheduler.second_stairs())))
    .note("as cycle_first_stair_count for null"),
    Key::taken(
        "scheduler.params.decay_step_size",
        "0",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.decay_steps = count(value, 0)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.decay_lr_rate",
        "0.0",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.decay_rate = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.cycle_momentum",
        "true",
        When::Scheduler(SchedulerKind::CYCLE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.cycle_momentum = boolean(value)?;
            Ok(())
        },
    )
    .note("if true, approximated: the learning rate cycles, the optimizer's momentum stays"),
    Key::ignored("scheduler.params.cycle_min_mom", "0.8", "the optimizer's momentum stays"),
    Key::ignored("scheduler.params.cycle_max_mom", "0.9", "the optimizer's momentum stays"),
    Key::ignored("scheduler.params.decay_mom_rate", "0.0", "the optimizer's momentum stays"),
    Key::taken(
        "scheduler.params.lr_range_test_min_lr",
        "0.001",
        When::Scheduler(SchedulerKind::RANGE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.range_min_lr = rate(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.lr_range_test_step_size",
        "2000",
        When::Scheduler(SchedulerKind::RANGE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.step_size = count(value, 1)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.lr_range_test_step_rate",
        "1.0",
        When::Scheduler(SchedulerKind::RANGE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.step_rate = amount(value)?;
            Ok(())
        },
    ),
    Key::taken(
        "scheduler.params.lr_range_test_staircase",
        "false",
        When::Scheduler(SchedulerKind::RANGE),
        SCHEDULER,
        |draft, value| {
            draft.scheduler.staircase = boolean(value)?;
            Ok(())
        },
    ),
    Key::off(
        "scheduler.params.last_batch_iteration",
        "-1",
        &["-1"],
        "a schedule begins at step 0; a checkpoint resumes it",
    ),
];
