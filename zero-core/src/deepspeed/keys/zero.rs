//! Keys of `zero_optimization`.

use crate::Stage;
use crate::deepspeed::key::{Key, OrElse, When, boolean, count, integer, optional};

const OF_COMPUTE: &str = "elements of the dtype layers compute in";
const NO_QUANTIZATION: &str = "nothing is quantised on its way between ranks; write false";
const NO_CHECKPOINTS: &str = "DeepSpeed's checkpoints are neither read nor written";
const RESULTS_SAME: &str = "it chooses how DeepSpeed moves the same values";

pub(super) static KEYS: &[Key] = &[
    Key::taken("zero_optimization.stage", "0", When::Always, "`stage`", |draft, value| {
        draft.stage = u8::try_from(integer(value)?)
            .ok()
            .and_then(|number| Stage::try_from(number).ok())
            .ok_or("must be 0, 1, 2 or 3")?;
        Ok(())
    }),
    Key::taken(
        "zero_optimization.reduce_bucket_size",
        "500000000",
        When::Always,
        "`bucket_bytes`",
        |draft, value| {
            draft.bucket_elements = count(value, 1)?;
            Ok(())
        },
    )
    .given_or(OrElse::Default, "hidden_size", |given| given.of_hidden_size(1.0, 2))
    .note("4 bytes per element, as gradients are reduced in f32"),
    Key::taken("zero_optimization.overlap_comm", "null", When::Always, "`overlap`", |draft, value| {
        draft.overlap = optional(value, boolean)?;
        Ok(())
    })
    .note("true at stage 3 and false at others for null"),
    Key::ignored(
        "zero_optimization.contiguous_gradients",
        "true",
        "gradients reduced together are contiguous",
    ),
    Key::ignored("zero_optimization.reduce_scatter", "true", RESULTS_SAME),
    Key::ignored("zero_optimization.use_multi_rank_bucket_allreduce", "true", RESULTS_SAME),
    Key::ignored("zero_optimization.allgather_partitions", "true", "DeepSpeed does not read it either"),
    Key::ignored(
        "zero_optimization.allgather_bucket_size",
        "500000000",
        "DeepSpeed does not read it either with PyTorch of today",
    ),
    Key::taken(
        "zero_optimization.stage3_prefetch_bucket_size",
        "50000000",
        When::StageThree,
        "`lookahead_bytes`",
        |draft, value| {
            draft.prefetch_elements = count(value, 0)?;
            Ok(())
        },
    )
    .given_or(OrElse::Default, "hidden_size", |given| given.of_hidden_size(0.9, 2))
    .note(OF_COMPUTE),
    Key::taken(
        "zero_optimization.stage3_param_persistence_threshold",
        "100000",
        When::StageThree,
        "`persistence_threshold`",
        |draft, value| {
            draft.persistence_threshold = count(value, 0)?;
            Ok(())
        },
    )
    .given_or(OrElse::Default, "hidden_size", |given| given.of_hidden_size(10.0, 1)),
    Key::nearly(
        "zero_optimization.stage3_model_persistence_threshold",
        "9223372036854775807",
        "every parameter up to stage3_param_persistence_threshold stays gathered, however many there are",
    ),
    Key::taken(
        "zero_optimization.stage3_max_live_parameters",
        "1000000000",
        When::StageThree,
        "`live_bytes`",
        |draft, value| {
            draft.live_elements = count(value, 0)?;
            Ok(())
        },
    )
    .note(OF_COMPUTE),
    Key::taken(
        "zero_optimization.stage3_max_reuse_distance",
        "1000000000",
        When::StageThree,
        "`reuse_bytes`",
        |draft, value| {
            draft.reuse_elements = count(value, 0)?;
            Ok(())
        },
    )
    .note(OF_COMPUTE),
    Key::ignored("zero_optimization.stage3_gather_16bit_weights_on_model_save", "false", NO_CHECKPOINTS),
    Key::ignored(
        "zero_optimization.stage3_module_granularity_threshold",
        "0",
        "modules need no marks to be gathered as a whole",
    ),
    Key::ignored("zero_optimization.stage3_use_all_reduce_for_fetch_params", "false", RESULTS_SAME),
    Key::ignored("zero_optimization.stage3_allgather_sequential", "false", RESULTS_SAME),
    Key::ignored("zero_optimization.sub_group_size", "1000000000", "each shard is updated by itself"),
    Key::ignored("zero_optimization.load_from_fp32_weights", "true", NO_CHECKPOINTS),
    Key::ignored("zero_optimization.elastic_checkpoint", "false", NO_CHECKPOINTS),
    Key::nearly(
        "zero_optimization.ignore_unused_parameters",
        "true",
        "a parameter without gradient is no error; it stays as it is",
    ),
    Key::not_true("zero_optimization.legacy_stage1", "DeepSpeed has dropped it as well; write false"),
    Key::ignored("zero_optimization.round_robin_gradients", "false", RESULTS_SAME),
    Key::off(
        "zero_optimization.zenflow",
        "null",
        &["null"],
        "there is no ZenFlow; remove the table with its topk_ratio, \
         select_strategy, select_interval, update_interval, overlap_step, offload, auto_ratio, \
         full_warm_up_rounds, pt_reserved_cores_perc and steps_per_epoch",
    ),
    Key::off(
        "zero_optimization.zero_hpz_partition_size",
        "1",
        &["1", "0"],
        "there are no secondary shards within a node; write 1",
    ),
    Key::not_true("zero_optimization.zero_quantized_weights", NO_QUANTIZATION),
    Key::not_true(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "frozen parameters keep their dtype; write false",
    ),
    Key::not_true("zero_optimization.zero_quantized_gradients", NO_QUANTIZATION),
    Key::ignored("zero_optimization.zeropp_loco_param", "null", "no gradients are quantised"),
    Key::off(
        "zero_optimization.mics_shard_size",
        "-1",
        &["-1"],
        "shards are spread over all ranks; write -1",
    ),
    Key::ignored(
        "zero_optimization.mics_hierarchical_params_gather",
        "false",
        "shards are spread over all ranks",
    ),
    Key::ignored("zero_optimization.memory_efficient_linear", "true", "it is about PyTorch's linear layer"),
    Key::ignored("zero_optimization.pipeline_loading_checkpoint", "false", NO_CHECKPOINTS),
    Key::ignored("zero_optimization.override_module_apply", "true", "it is about PyTorch's modules"),
    Key::ignored("zero_optimization.log_trace_cache_warnings", "false", "the program writes its own logs"),
    Key::ignored("zero_optimization.enable_sanity_checks", "false", "checks are made in any case"),
    Key::ignored("zero_optimization.save_muon_momentum_buffer_in_memory", "false", "there is no Muon"),
    Key::ignored(
        "zero_optimization.leaf_module.classes",
        "null",
        "modules need no marks to be gathered as a whole",
    ),
    Key::ignored(
        "zero_optimization.leaf_module.names",
        "null",
        "modules need no marks to be gathered as a whole",
    ),
    Key::ignored(
        "zero_optimization.leaf_module.name_suffixes",
        "null",
        "modules need no marks to be gathered as a whole",
    ),
];
