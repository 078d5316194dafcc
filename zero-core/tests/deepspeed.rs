//! Files of DeepSpeed: what is read, what becomes of it, what is refused.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use serde_json::{Value, json};
use zero_core::{
    AtMinScale, BatchPlan, Bytes, DType, DeepSpeedAdam, DeepSpeedError, DeepSpeedGiven, DeepSpeedImport,
    DeepSpeedOptimizer, DeepSpeedScheduler, DeepSpeedSource, DeepSpeedVerdict, DeepSpeedWarmup,
    DynamicLossScale, LossScaling, Precision, ReduceGradients, Stage, WorldSize, ZeroConfig,
};

const DEFAULTS: &str = include_str!("vectors/deepspeed_defaults.json");

fn given() -> DeepSpeedGiven {
    DeepSpeedGiven::new(WorldSize::new(4).unwrap())
}

/// The import of a file, with a batch size if it has none.
fn import(mut file: Value) -> Result<DeepSpeedImport, DeepSpeedError> {
    let table = file.as_object_mut().unwrap();
    if !table.contains_key("train_micro_batch_size_per_gpu") {
        table.entry("train_batch_size").or_insert(json!(8));
    }
    ZeroConfig::from_deepspeed(&file.to_string(), &given())
}

/// The paths that are refused, with why.
fn refused(file: Value) -> Vec<(String, String)> {
    match import(file).unwrap_err() {
        DeepSpeedError::Refused { report, .. } => {
            report.refused().map(|(entry, why)| (entry.key.clone(), why.to_owned())).collect()
        }
        other => panic!("not refused: {other}"),
    }
}

/// Why the only key that is refused is so.
fn refusal(file: Value) -> String {
    let mut refused = refused(file);
    assert_eq!(refused.len(), 1, "{refused:?}");
    refused.remove(0).1
}

/// The paths of all values of a tree.
fn paths(prefix: &str, value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (name, value) in entries {
                let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                paths(&path, value, found);
            }
        }
        _ => {
            found.insert(prefix.to_owned());
        }
    }
}

#[test]
fn every_key_is_known_with_its_default() {
    let world = DeepSpeedGiven::new(WorldSize::ONE);
    let import = ZeroConfig::from_deepspeed(DEFAULTS, &world).unwrap();
    let mut expected = BTreeSet::new();
    paths("", &serde_json::from_str(DEFAULTS).unwrap(), &mut expected);
    let in_file = import.report.entries().iter().filter(|entry| entry.source == DeepSpeedSource::File);
    assert_eq!(in_file.map(|entry| entry.key.clone()).collect::<BTreeSet<_>>(), expected);

    for entry in import.report.entries() {
        let nearly = matches!(entry.verdict, DeepSpeedVerdict::Approximated { .. });
        assert!(!nearly, "the default of {} is only approximated", entry.key);
    }
    // All but the optimizer and the scheduler, whose types exclude each other.
    for line in DeepSpeedImport::keys_table().lines().take_while(|line| !line.is_empty()).skip(2) {
        let key = line.split('`').nth(1).unwrap();
        let covered = match key.strip_suffix('*') {
            Some(table) => expected.iter().any(|path| path.starts_with(table)),
            None => expected.contains(key),
        };
        let of_update = key.starts_with("optimizer.") || key.starts_with("scheduler.");
        assert!(covered || of_update, "no file with defaults has {key}");
    }
}

#[test]
fn a_file_with_defaults_means_what_one_without_keys_does() {
    let world = DeepSpeedGiven::new(WorldSize::ONE);
    let full = ZeroConfig::from_deepspeed(DEFAULTS, &world).unwrap();
    let empty = ZeroConfig::from_deepspeed(r#"{"train_batch_size": 1}"#, &world).unwrap();
    assert_eq!((&full.config, full.batch), (&empty.config, empty.batch));
    assert_eq!((empty.optimizer, empty.scheduler), (None, None));
    let expected = ZeroConfig {
        stage: Stage::Zero,
        bucket_bytes: Bytes::new(2_000_000_000),
        overlap: false,
        clip_norm: Some(1.0),
        ..ZeroConfig::default()
    };
    assert_eq!(empty.config, expected);
    let clipping = empty.report.find("gradient_clipping").unwrap();
    assert_eq!((clipping.value.as_str(), clipping.source), ("1.0", DeepSpeedSource::Default));
}

#[test]
fn parameters_of_optimizers_and_schedulers_are_known_with_their_defaults() {
    let adam = json!({
        "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "adam_w_mode": true,
        "torch_adam": false, "bias_correction": true, "amsgrad": false, "maximize": false, "max_grad_norm": 0,
        "set_grad_none": true, "fp32_optimizer_states": true, "fused": null, "foreach": null, "capturable": false
    });
    let sgd = json!({"lr": 1e-3, "momentum": 0, "dampening": 0, "nesterov": false, "weight_decay": 0});
    let ranges = json!({
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": false, "last_batch_iteration": -1
    });
    let cycle = json!({
        "cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2000, "cycle_second_step_size": null,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": null, "decay_step_size": 0, "decay_lr_rate": 0,
        "cycle_momentum": true, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0
    });
    let warmup =
        json!({"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"});
    let cosine = json!({"total_num_steps": 9, "warmup_min_ratio": 0, "cos_min_ratio": 1e-4});
    let mut seen = BTreeSet::from(["optimizer.legacy_fusion".to_owned()]);
    for (optimizer, scheduler) in [
        (json!({"type": "Adam", "params": adam}), json!({"type": "OneCycle", "params": cycle})),
        (json!({"type": "SGD", "params": sgd}), json!({"type": "LRRangeTest", "params": ranges})),
        (
            json!({"type": "Adagrad", "params": {"lr_decay": 0}}),
            json!({"type": "WarmupLR", "params": warmup}),
        ),
        (json!({"type": "Lion"}), json!({"type": "WarmupCosineLR", "params": cosine})),
    ] {
        let import = import(json!({"optimizer": optimizer, "scheduler": scheduler})).unwrap();
        assert!(import.optimizer.is_some() && import.scheduler.is_some());
        seen.extend(import.report.entries().iter().map(|entry| entry.key.clone()));
        let momentum = import.report.find("scheduler.params.cycle_momentum");
        let nearly = |verdict: &DeepSpeedVerdict| matches!(verdict, DeepSpeedVerdict::Approximated { .. });
        assert!(momentum.is_none_or(|entry| nearly(&entry.verdict)));
    }
    for line in DeepSpeedImport::keys_table().lines() {
        let key = line.split('`').nth(1).unwrap_or_default();
        let of_update = key.starts_with("optimizer.") || key.starts_with("scheduler.");
        assert!(!of_update || seen.contains(key), "no file with defaults has {key}");
    }
}

/// The keys of the documentation that are for `kind`, by the table they are in.
fn keys_of(table: &str, kind: &str) -> BTreeSet<String> {
    let rows = DeepSpeedImport::keys_table();
    let found = rows.lines().filter_map(|line| {
        let (key, kinds) = (line.split('`').nth(1)?, line.split_once("honoured for ")?.1.split_once(':')?.0);
        (key.starts_with(table) && kinds.split(", ").any(|name| name == kind)).then(|| key.to_owned())
    });
    found.chain([format!("{table}type")]).collect()
}

/// The keys of a table that the report has.
fn reported(import: &DeepSpeedImport, table: &str) -> BTreeSet<String> {
    let keys = import.report.entries().iter().map(|entry| entry.key.clone());
    keys.filter(|key| key.starts_with(table) && !key.ends_with(".params")).collect()
}

/// The value and the source of a key in the report.
fn entry<'a>(import: &'a DeepSpeedImport, key: &str) -> (&'a str, DeepSpeedSource) {
    let entry = import.report.find(key).unwrap();
    (&entry.value, entry.source)
}

#[test]
fn a_report_has_every_parameter_of_an_optimizer_as_it_is_built() {
    let build =
        |kind: &str, params: Value| import(json!({"optimizer": {"type": kind, "params": params}})).unwrap();
    for kind in ["Adam", "AdamW", "Lion", "Adagrad", "SGD"] {
        let import = build(kind, json!({}));
        let expected = keys_of("optimizer.", kind);
        assert!(expected.len() > 3, "{expected:?}");
        assert_eq!(reported(&import, "optimizer."), expected, "{kind}");
        let lr = import.optimizer.unwrap().lr().to_string();
        assert_eq!(entry(&import, "optimizer.params.lr"), (lr.as_str(), DeepSpeedSource::Default));
    }
    let adagrad = build("Adagrad", json!({}));
    for (key, value) in [("lr", "0.01"), ("eps", "1e-10"), ("weight_decay", "0.0")] {
        assert_eq!(entry(&adagrad, &format!("optimizer.params.{key}")).0, value);
    }
    for (kind, params, decay) in [
        ("Adam", json!({"torch_adam": true}), "0.01"),
        ("Adam", json!({"torch_adam": true, "adam_w_mode": false}), "0.0"),
        ("AdamW", json!({"torch_adam": true, "adam_w_mode": false}), "0.01"),
        ("AdamW", json!({"torch_adam": true, "weight_decay": 0}), "0"),
        ("AdamW", json!({"torch_adam": false}), "0.0"),
    ] {
        assert_eq!(entry(&build(kind, params), "optimizer.params.weight_decay").0, decay);
    }
}

#[test]
fn a_report_has_every_parameter_of_a_scheduler_as_it_is_built() {
    let world = given();
    let read = |kind: &str, params: Value, lr: Option<f64>| {
        let file = json!({"train_batch_size": 8, "scheduler": {"type": kind, "params": params}});
        ZeroConfig::from_deepspeed(&file.to_string(), &DeepSpeedGiven { lr, ..world })
    };
    let total = || json!({"total_num_steps": 9});
    for (kind, params) in [
        ("WarmupLR", json!({})),
        ("WarmupDecayLR", total()),
        ("WarmupCosineLR", total()),
        ("OneCycle", json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 7})),
        ("LRRangeTest", json!({})),
    ] {
        let import = read(kind, params, Some(0.5)).unwrap();
        assert_eq!(reported(&import, "scheduler."), keys_of("scheduler.", kind), "{kind}");
    }
    let max_lr = "scheduler.params.warmup_max_lr";
    let given_lr = ("0.5", DeepSpeedSource::Given("lr"));
    assert_eq!(entry(&read("WarmupLR", json!({}), Some(0.5)).unwrap(), max_lr), given_lr);
    assert_eq!(entry(&read("WarmupCosineLR", total(), Some(0.5)).unwrap(), "optimizer.params.lr"), given_lr);
    let decay = read("WarmupDecayLR", total(), Some(0.5)).unwrap();
    assert_eq!(entry(&decay, max_lr), ("0.001", DeepSpeedSource::Default));
    let cycle = json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 7});
    let cycle = read("OneCycle", cycle, None).unwrap();
    assert_eq!(entry(&cycle, "scheduler.params.cycle_second_step_size").0, "7");
    // An optimizer of the file goes before what is given.
    let file = json!({"optimizer": {"type": "Adagrad"}, "scheduler": {"type": "WarmupLR"}});
    assert_eq!(entry(&import(file).unwrap(), max_lr), ("0.01", DeepSpeedSource::Default));
    // What is given is checked.
    read("WarmupLR", json!({"warmup_max_lr": null}), Some(f64::NAN)).unwrap_err();
    for (kind, key) in [("WarmupLR", max_lr), ("WarmupCosineLR", "optimizer.params.lr")] {
        let params = if kind == "WarmupLR" { json!({}) } else { total() };
        let message = read(kind, params, Some(f64::NAN)).unwrap_err().to_string();
        assert!(message.ends_with(&format!("\n  `{key}` = nan: must be at least 0")), "{message}");
    }
}

#[test]
fn the_verdict_is_on_the_value_that_is_taken() {
    let cycle = |momentum: bool| {
        let params = json!({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": momentum});
        let import = import(json!({"scheduler": {"type": "OneCycle", "params": params}})).unwrap();
        import.report.find("scheduler.params.cycle_momentum").unwrap().verdict.clone()
    };
    assert_eq!(cycle(false), DeepSpeedVerdict::Honoured { by: "`DeepSpeedScheduler`".into() });
    assert!(matches!(cycle(true), DeepSpeedVerdict::Approximated { .. }));
    let adam = import(json!({"optimizer": {"type": "AdamW", "params": {"torch_adam": false}}})).unwrap();
    assert_eq!(
        adam.report.find("optimizer.params.torch_adam").unwrap().verdict,
        DeepSpeedVerdict::Honoured { by: "`DeepSpeedOptimizer`".into() }
    );
}

#[test]
fn optimizer_states_in_bf16_are_refused_where_deepspeed_refuses_them() {
    let file = |stage: u8, masters: bool| {
        json!({
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": true, "bf16_master_weights_and_grads": masters, "bf16_optimizer_states": true}
        })
    };
    for (stage, masters) in [(0, true), (0, false), (2, false)] {
        let refused = refused(file(stage, masters));
        assert_eq!((refused.len(), refused[0].0.as_str()), (1, "bf16.bf16_optimizer_states"));
    }
    for stage in [1, 2, 3] {
        let import = import(file(stage, true)).unwrap();
        assert_eq!(import.config.precision.optimizer_state, DType::BF16);
        let masters = import.report.find("bf16.bf16_master_weights_and_grads").unwrap();
        assert!(matches!(masters.verdict, DeepSpeedVerdict::Approximated { .. }));
    }
}

#[test]
fn a_type_of_warm_up_is_read_to_the_letter() {
    let file = |word: &str| json!({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": word, "total_num_steps": 9}}});
    for (word, linear) in [("log", false), ("linear", true)] {
        let scheduler = import(file(word)).unwrap().scheduler.unwrap();
        assert!(
            matches!(scheduler, DeepSpeedScheduler::WarmupDecayLr { warmup, .. } if warmup.linear == linear)
        );
    }
    for word in ["Linear", "cosine"] {
        assert!(refusal(file(word)).contains("DeepSpeed takes all else for \"log\""));
    }
}

#[test]
fn elements_become_bytes_of_their_dtype() {
    let import = import(json!({
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 10, "stage3_prefetch_bucket_size": 20, "overlap_comm": false,
            "stage3_param_persistence_threshold": 30, "stage3_max_live_parameters": 40, "stage3_max_reuse_distance": 50
        },
        "fp16": {
            "enabled": true, "initial_scale_power": 8, "loss_scale_window": 500, "hysteresis": 3,
            "consecutive_hysteresis": true, "min_loss_scale": 2
        },
        "communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "bf16", "param_dtype": "half"},
        "gradient_clipping": 0
    }))
    .unwrap();
    let expected = ZeroConfig {
        stage: Stage::Three,
        bucket_bytes: Bytes::new(40),
        overlap: false,
        persistence_threshold: 30,
        lookahead_bytes: Bytes::new(40),
        live_bytes: Some(Bytes::new(80)),
        reuse_bytes: Bytes::new(100),
        clip_norm: None,
        precision: Precision {
            compute: DType::F16,
            reduce: Some(DType::F32),
            accumulate: DType::BF16,
            optimizer_state: DType::F32,
        },
        loss_scale: Some(LossScaling::Dynamic(DynamicLossScale {
            initial_scale: 256.0,
            factor: 2.0,
            window: NonZeroU32::new(500).unwrap(),
            hysteresis: NonZeroU32::new(3).unwrap(),
            consecutive_hysteresis: true,
            min_scale: 2.0,
            at_min: AtMinScale::Error,
        })),
        ..ZeroConfig::default()
    };
    assert_eq!(import.config, expected);
    assert_eq!(ZeroConfig::from_toml(&import.config.to_toml()).unwrap(), expected);
}

#[test]
fn what_is_not_said_follows_from_the_stage_and_the_precision() {
    for stage in Stage::ALL {
        let file = json!({"zero_optimization": {"stage": stage.number()}, "bf16": {"enabled": true}});
        let config = import(file).unwrap().config;
        assert_eq!((config.stage, config.overlap), (stage, stage == Stage::Three));
        assert_eq!((config.precision.reduce(), config.precision.accumulate), (DType::BF16, DType::BF16));
        assert_eq!((config.loss_scaling(), config.loss_scale), (LossScaling::NONE, None));
        assert_eq!(config.reduce_gradients(), ReduceGradients::of_stage(stage));
    }
}

#[test]
fn a_static_loss_scale_leaves_keys_of_a_dynamic_one_without_effect() {
    let file = json!({"fp16": {"enabled": true, "loss_scale": 128, "loss_scale_window": 0}});
    let import = import(file).unwrap();
    assert_eq!(import.config.loss_scale, Some(LossScaling::Static { scale: 128.0 }));
    let window = import.report.find("fp16.loss_scale_window").unwrap();
    assert_eq!(window.verdict.to_string(), "without effect: the loss scale is static");
}

#[test]
fn limits_that_no_configuration_can_hold_are_the_largest() {
    let most = i64::MAX;
    let file = json!({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": most, "reduce_bucket_size": most}});
    let config = import(file).unwrap().config;
    assert_eq!((config.live_bytes, config.bucket_bytes.get()), (Some(Bytes::new(most as u64)), most as u64));
}

#[test]
fn deprecated_forms_are_read() {
    for (on, stage) in [(true, Stage::One), (false, Stage::Zero)] {
        let import = import(json!({"zero_optimization": on, "allgather_size": 5e8})).unwrap();
        assert_eq!(import.config.stage, stage);
        assert!(import.report.find("zero_optimization.stage").is_some());
        assert!(import.report.find("allgather_size").is_some());
    }
    let file = json!({
        "bfloat16": {"enabled": true},
        "zero_optimization": {"stage": 3, "max_live_parameters": 7, "cpu_offload": false}
    });
    let config = import(file).unwrap().config;
    assert_eq!((config.precision.compute, config.live_bytes), (DType::BF16, Some(Bytes::new(14))));
    let why = refusal(json!({"bfloat16": {"enabled": true}, "bf16": {"enabled": true}}));
    assert_eq!(why, format!("it is the same key as `{}`; keep one of the two", "bf16.enabled"));
}

#[test]
fn an_optimizer_is_the_one_that_deepspeed_would_build() {
    let adam = DeepSpeedAdam { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 };
    let build = |optimizer| import(json!({"optimizer": optimizer})).unwrap().optimizer.unwrap();
    assert_eq!(build(json!({"type": "Adam"})), DeepSpeedOptimizer::AdamW(adam));
    let file =
        json!({"type": "adam", "params": {"adam_w_mode": false, "betas": [0.8, 0.99], "weight_decay": 0.1}});
    let expected = DeepSpeedAdam { betas: [0.8, 0.99], weight_decay: 0.1, ..adam };
    assert_eq!(build(file), DeepSpeedOptimizer::Adam(expected));
    let torch = build(json!({"type": "AdamW", "params": {"torch_adam": true, "lr": 1}}));
    assert_eq!(torch, DeepSpeedOptimizer::AdamW(DeepSpeedAdam { lr: 1.0, weight_decay: 0.01, ..adam }));
    let adagrad = DeepSpeedOptimizer::Adagrad { lr: 0.01, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0 };
    assert_eq!(build(json!({"type": "Adagrad"})), adagrad);
    let lion = DeepSpeedOptimizer::Lion { lr: 0.5, betas: [0.9, 0.999], weight_decay: 0.0 };
    assert_eq!(build(json!({"type": "Lion", "params": {"lr": 0.5}})), lion);
    assert_eq!(
        build(json!({"type": "SGD", "params": {"momentum": 0.9, "nesterov": true}})),
        DeepSpeedOptimizer::Sgd {
            lr: 1e-3,
            momentum: 0.9,
            dampening: 0.0,
            nesterov: true,
            weight_decay: 0.0
        }
    );
}

#[test]
fn auto_is_what_is_given() {
    let text = r#"{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "overlap_comm": "auto"
        },
        "optimizer": {"type": "AdamW", "params": {
            "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"
        }},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"
        }}
    }"#;
    let refused = match ZeroConfig::from_deepspeed(text, &given()).unwrap_err() {
        DeepSpeedError::Refused { report, .. } => report,
        other => panic!("{other}"),
    };
    let whys: Vec<_> = refused.refused().map(|(entry, why)| format!("{}: {why}", entry.key)).collect();
    assert_eq!(whys.len(), 11, "{whys:?}");
    assert!(whys[0].starts_with("train_batch_size: neither train_batch_size nor"), "{whys:?}");
    for expected in [
        "gradient_clipping: set `clip_norm` of DeepSpeedGiven, or write the value",
        "bf16.enabled: set `compute` of DeepSpeedGiven, or write the value",
        "optimizer.params.lr: set `lr` of DeepSpeedGiven, or write the value",
    ] {
        assert!(whys.iter().any(|why| why == expected), "{whys:?}");
    }

    let complete = DeepSpeedGiven {
        train_batch_size: Some(32),
        micro_batch_size_per_rank: Some(2),
        accumulation_steps: Some(4),
        clip_norm: Some(0.5),
        compute: Some(DType::BF16),
        lr: Some(3e-4),
        betas: Some([0.9, 0.95]),
        eps: Some(1e-6),
        weight_decay: Some(0.1),
        warmup_steps: Some(10),
        total_steps: Some(100),
        ..given()
    };
    let import = ZeroConfig::from_deepspeed(text, &complete).unwrap();
    assert_eq!(
        import.batch,
        BatchPlan { train_batch_size: 32, micro_batch_size_per_rank: 2, accumulation_steps: 4 }
    );
    assert_eq!((import.config.clip_norm, import.config.precision.compute), (Some(0.5), DType::BF16));
    let adam = DeepSpeedAdam { lr: 3e-4, betas: [0.9, 0.95], eps: 1e-6, weight_decay: 0.1 };
    assert_eq!(import.optimizer, Some(DeepSpeedOptimizer::AdamW(adam)));
    let warmup = DeepSpeedWarmup { steps: 10, linear: false };
    let decay = DeepSpeedScheduler::WarmupDecayLr { warmup, min_lr: 0.0, max_lr: 3e-4, total_steps: 100 };
    assert_eq!(import.scheduler, Some(decay));
    let find = |key| import.report.find(key).unwrap();
    assert_eq!(find("optimizer.params.lr").source, DeepSpeedSource::Given("lr"));
    // Sizes that follow the model's have a default.
    let bucket = find("zero_optimization.reduce_bucket_size");
    assert_eq!(bucket.source, DeepSpeedSource::Default);
    assert!(matches!(bucket.verdict, DeepSpeedVerdict::Approximated { .. }));
    assert_eq!(import.config.bucket_bytes, Bytes::new(2_000_000_000));

    let wide = DeepSpeedGiven { hidden_size: Some(1001), ..complete };
    let config = ZeroConfig::from_deepspeed(text, &wide).unwrap().config;
    assert_eq!(config.bucket_bytes, Bytes::new(4 * 1001 * 1001));
    assert_eq!(config.lookahead_bytes, Bytes::new(2 * 901_800));
    assert_eq!(config.persistence_threshold, 10_010);
}

#[test]
fn what_is_given_is_checked_like_what_is_written() {
    let given = DeepSpeedGiven { lr: Some(f64::NAN), clip_norm: Some(-1.0), ..given() };
    let text = r#"{"train_batch_size": 8, "gradient_clipping": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}}}"#;
    let message = ZeroConfig::from_deepspeed(text, &given).unwrap_err().to_string();
    assert!(
        message.contains("`gradient_clipping` = -1.0: must be 0 for no clipping, or a norm above"),
        "{message}"
    );
    assert!(message.contains("`optimizer.params.lr` = nan: must be at least 0"), "{message}");
}

#[test]
fn all_refused_keys_are_listed() {
    let message = import(json!({
        "zero_optimization": {
            "stage": 4, "offload_optimizer": {"device": true, "pin_memory": true}, "stge": 1,
            "zero_quantized_weights": true, "zenflow": {"topk_ratio": 0.1}
        },
        "activation_checkpointing": {"partition_activations": true},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true, "bits": 8}}},
        "fp16": true, "stage": 2, "warp_drive": {"on": true}, "optimizer": {"type": "OneBitAdam"}
    }))
    .unwrap_err()
    .to_string();
    let mut lines = message.lines();
    assert_eq!(lines.next(), Some("the DeepSpeed configuration cannot be followed:"));
    let mut lines: Vec<_> = lines.map(str::trim_start).collect();
    lines.sort_unstable();
    for (line, expected) in lines.iter().zip([
        "`activation_checkpointing.partition_activations` = true: what a block computes again",
        "`compression_training.weight_quantization.shared_parameters.enabled` = true: models",
        "`fp16` = true: write an object",
        "`optimizer.type` = \"OneBitAdam\": must be one of \"Adam\", \"AdamW\"",
        "`stage` = 2: unknown key; did you mean `zero_optimization.stage`?",
        "`warp_drive` = {..}: unknown key, and none is like it; remove it",
        "`zero_optimization.offload_optimizer.device` = true: write a string",
        "`zero_optimization.stage` = 4: must be 0, 1, 2 or 3",
        "`zero_optimization.stge` = 1: unknown key; did you mean `zero_optimization.stage`?",
        "`zero_optimization.zenflow` = {..}: there is no ZenFlow",
        "`zero_optimization.zero_quantized_weights` = true: nothing is quantised",
    ]) {
        assert!(line.starts_with(expected), "{line}");
    }
    assert_eq!(lines.len(), 11, "{message}");
}

#[test]
fn keys_that_do_not_fit_each_other_are_refused() {
    let both = json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}});
    assert_eq!(refused(both)[0].0, "bf16.enabled");
    let scale = json!({"fp16": {"enabled": true, "initial_scale_power": 3, "min_loss_scale": 9}});
    assert_eq!(refusal(scale), "the first scale is 8, which is less; lower it");
    let dtype = json!({"data_types": {"param_dtype": "bf16"}});
    assert_eq!(refusal(dtype), "layers compute in f32, not in bf16; enable what fits, or remove it");
    let momentum = json!({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}});
    assert_eq!(refusal(momentum), "AdamW has no such parameter; remove it");
    assert!(refusal(json!({"optimizer": {"params": {"lr": 1}}})).starts_with("the optimizer has no type"));
    assert!(
        refusal(json!({"scheduler": {"params": {"warmup_num_steps": 5}}}))
            .starts_with("the scheduler has no type")
    );
    let cosine = json!({"scheduler": {"type": "WarmupCosineLR"}});
    let keys: Vec<_> = refused(cosine).into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["scheduler.params.total_num_steps", "optimizer.params.lr"]);
}

#[test]
fn a_part_that_does_not_exist_has_to_be_off() {
    let open = json!({"amp": {"enabled": "yes"}, "curriculum_learning": {"enabled": true, "seed": 1}});
    let keys: Vec<_> = refused(open).into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["amp.enabled", "curriculum_learning.enabled"]);
    for off in [json!(null), json!({}), json!({"enabled": false, "block": {"enabled": null}})] {
        import(json!({"autotuning": off})).unwrap();
    }
}

#[test]
fn repeated_keys_are_named_with_their_path() {
    for (text, key) in [
        (r#"{"train_batch_size": 4, "train_batch_size": 4}"#, "train_batch_size"),
        (r#"{"train_batch_size": 4, "fp16": {"enabled": false, "enabled": false}}"#, "fp16.enabled"),
        (r#"{"train_batch_size": 4, "aio": {}, "aio": {"block_size": 1}}"#, "aio"),
    ] {
        let message = ZeroConfig::from_deepspeed(text, &given()).unwrap_err().to_string();
        assert!(message.contains(&format!("`{key}` = ")) && message.contains("given twice"), "{message}");
    }
    let pointed = refused(json!({"zero_optimization.stage": 3}));
    assert_eq!(pointed, [("zero_optimization.stage".into(), "unknown key; no name has a point".into())]);
}

#[test]
fn numbers_that_do_not_exist_are_named_with_their_key() {
    for (file, key) in [
        (json!({"gradient_clipping": -1}), "gradient_clipping"),
        (json!({"zero_optimization": {"reduce_bucket_size": 1e30}}), "zero_optimization.reduce_bucket_size"),
        (json!({"zero_optimization": {"reduce_bucket_size": 0}}), "zero_optimization.reduce_bucket_size"),
        (json!({"zero_optimization": {"stage": 2.5}}), "zero_optimization.stage"),
        (json!({"fp16": {"enabled": true, "initial_scale_power": 200}}), "fp16.initial_scale_power"),
        (json!({"aio": {"block_size": "1M"}}), "aio.block_size"),
        (json!({"train_batch_size": [8]}), "train_batch_size"),
        (json!({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}), "optimizer.params.betas"),
    ] {
        assert_eq!(refused(file)[0].0, key);
    }
    let text = "{\"train_batch_size\": 1,\n \"gradient_clipping\" : 1e999}";
    let message = ZeroConfig::from_deepspeed(text, &given()).unwrap_err().to_string();
    assert!(message.contains("the key `gradient_clipping`: number out of range at line 2"), "{message}");
}

#[test]
fn another_text_is_refused() {
    let message = |text| ZeroConfig::from_deepspeed(text, &given()).unwrap_err().to_string();
    assert_eq!(message("[1]"), "the DeepSpeed configuration is an array; it must be a JSON object");
    assert!(message("").contains("is not valid JSON: EOF"));
    assert!(message("{\"a\": 1, // why\n}").contains("at or after the key `a`"));
}

#[test]
fn a_report_is_an_aligned_table() {
    let file = json!({"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_param": null}});
    let report = import(file).unwrap().report.to_string();
    let mut lines = report.lines();
    let header = lines.next().unwrap();
    let verdict = header.find("verdict").unwrap();
    assert!(header.starts_with("key ") && report.lines().count() > 5);
    for line in lines {
        assert!(line.is_char_boundary(verdict) && line.as_bytes()[verdict - 1] == b' ', "{line}");
        assert!(!line[verdict..].starts_with(' '), "{line}");
    }
    assert!(report.contains("honoured: `stage`"), "{report}");
}
