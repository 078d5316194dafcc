//! Keys of element types and of the loss scale.

use std::num::NonZeroU32;

use crate::config::value::Value;
use crate::deepspeed::key::{Key, When, boolean, choice, count, integer, number, optional};
use crate::{DType, DeepSpeedGiven, LossScaling};

fn dtype(value: &Value) -> Result<DType, String> {
    choice(
        value,
        &[
            ("fp32", DType::F32),
            ("bf16", DType::BF16),
            ("fp16", DType::F16),
            ("float32", DType::F32),
            ("bfloat16", DType::BF16),
            ("float16", DType::F16),
            ("float", DType::F32),
            ("half", DType::F16),
            ("torch.float32", DType::F32),
            ("torch.bfloat16", DType::BF16),
            ("torch.float16", DType::F16),
        ],
    )
}

fn positive(value: &Value) -> Result<NonZeroU32, String> {
    u32::try_from(count(value, 1)?)
        .ok()
        .and_then(NonZeroU32::new)
        .ok_or_else(|| format!("must be at most {}", u32::MAX))
}

fn computes_in(given: &DeepSpeedGiven, dtype: DType) -> Option<Value> {
    given.compute.map(|compute| Value::Bool(compute == dtype))
}

const NO_AMP: &str = "there is no automatic mixed precision; set bf16.enabled or fp16.enabled instead";

pub(super) static KEYS: &[Key] = &[
    Key::taken("fp16.enabled", "false", When::Always, "`precision.compute`", |draft, value| {
        draft.fp16 = boolean(value)?;
        Ok(())
    })
    .given("compute", |given| computes_in(given, DType::F16)),
    Key::ignored("fp16.auto_cast", "false", "the program makes its inputs in the dtype of its layers"),
    Key::taken(
        "fp16.loss_scale",
        "0.0",
        When::Fp16,
        "`loss_scale.mode` and `loss_scale.scale`",
        |draft, value| {
            let scales = |scale| scale == 0.0 || (LossScaling::MIN..=LossScaling::MAX).contains(&scale);
            draft.loss_scale = number(value, "0 for a dynamic one, or from 2^-126 to 2^126", scales)?;
            Ok(())
        },
    )
    .note("dynamic for 0"),
    Key::taken(
        "fp16.initial_scale_power",
        "16",
        When::DynamicScale,
        "`loss_scale.initial_scale`",
        |draft, value| {
            let power = i32::try_from(integer(value)?).ok().filter(|power| (-126..=126).contains(power));
            draft.dynamic_scale.initial_scale = f64::from(power.ok_or("must be from -126 to 126")?).exp2();
            Ok(())
        },
    )
    .note("2 to this power"),
    Key::taken(
        "fp16.loss_scale_window",
        "1000",
        When::DynamicScale,
        "`loss_scale.window`",
        |draft, value| {
            draft.dynamic_scale.window = positive(value)?;
            Ok(())
        },
    ),
    Key::taken("fp16.hysteresis", "2", When::DynamicScale, "`loss_scale.hysteresis`", |draft, value| {
        draft.dynamic_scale.hysteresis = positive(value)?;
        Ok(())
    }),
    Key::taken(
        "fp16.consecutive_hysteresis",
        "false",
        When::DynamicScale,
        "`loss_scale.consecutive_hysteresis`",
        |draft, value| {
            draft.dynamic_scale.consecutive_hysteresis = boolean(value)?;
            Ok(())
        },
    ),
    Key::taken("fp16.min_loss_scale", "1", When::DynamicScale, "`loss_scale.min_scale`", |draft, value| {
        let scales = |scale| (1.0..=LossScaling::MAX).contains(&scale);
        draft.dynamic_scale.min_scale = number(value, "from 1 to 2^126", scales)?;
        Ok(())
    })
    .note("an overflow at it is an error"),
    Key::nearly(
        "fp16.fp16_master_weights_and_grads",
        "false",
        "master weights stay f32 and take 2 bytes more per element; gradients follow `data_types`",
    ),
    Key::taken("bf16.enabled", "false", When::Always, "`precision.compute`", |draft, value| {
        draft.bf16 = boolean(value)?;
        Ok(())
    })
    .given("compute", |given| computes_in(given, DType::BF16)),
    Key::ignored("bf16.immediate_grad_update", "false", "a gradient is taken up when backward has made it"),
    Key::nearly(
        "bf16.check_grad_overflow",
        "true",
        "a step whose gradients are not finite is skipped in every precision",
    ),
    Key::taken("bf16.bf16_master_weights_and_grads", "false", When::Always, "`precision`", |draft, value| {
        draft.bf16_masters = boolean(value)?;
        Ok(())
    })
    .note(
        "if true, approximated: master weights stay f32 and take 2 bytes more per element; gradients follow \
         `data_types`",
    ),
    Key::taken(
        "bf16.bf16_optimizer_states",
        "false",
        When::Always,
        "`precision.optimizer_state`",
        |draft, value| {
            draft.bf16_states = boolean(value)?;
            Ok(())
        },
    )
    .note("if true, refused where DeepSpeed does: at stage 0, and without bf16_master_weights_and_grads"),
    Key::taken("data_types.param_dtype", "null", When::Present, "`precision.compute`", |draft, value| {
        draft.parameters = optional(value, dtype)?;
        Ok(())
    }),
    Key::taken(
        "data_types.grad_accum_dtype",
        "null",
        When::Always,
        "`precision.accumulate`",
        |draft, value| {
            draft.accumulate = optional(value, dtype)?;
            Ok(())
        },
    )
    .note("the dtype layers compute in for null"),
    Key::off("data_types.buffer_dtype", "null", &["null"], "buffers keep their dtype; remove it"),
    Key::taken("communication_data_type", "null", When::Always, "`precision.reduce`", |draft, value| {
        draft.reduce = optional(value, dtype)?;
        Ok(())
    })
    .note("the dtype layers compute in for null; sums are taken in f32"),
    Key::not_true("torch_autocast.enabled", NO_AMP),
    Key::ignored("torch_autocast.dtype", "\"bfloat16\"", "there is no automatic mixed precision"),
    Key::ignored(
        "torch_autocast.lower_precision_safe_modules",
        "null",
        "there is no automatic mixed precision",
    ),
    Key::switches("amp.*", NO_AMP),
];
