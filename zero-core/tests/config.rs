//! Configurations: what is read, what is refused, and why.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use proptest::prelude::*;
use zero_core::{
    AtMinScale, Bytes, ConfigError, DType, DynamicLossScale, LayoutOptions, LookAheadOptions, LossScaling,
    Offload, Placement, Precision, ReduceGradients, Stage, Tier, ZeroConfig, nearest,
};

/// The message about a TOML text that has to be refused.
fn refusal(text: &str) -> String {
    ZeroConfig::from_toml(text).unwrap_err().to_string()
}

#[test]
fn an_empty_text_is_the_default() {
    let default = ZeroConfig {
        stage: Stage::Three,
        bucket_bytes: Bytes::new(4 * 1024 * 1024),
        reduce_gradients: None,
        overlap: true,
        device_transport: true,
        persistence_threshold: 10_000,
        lookahead_bytes: Bytes::new(64 * 1024 * 1024),
        live_bytes: None,
        reuse_bytes: Bytes::ZERO,
        alignment: NonZeroUsize::MIN,
        clip_norm: None,
        seed: 0,
        deadline_seconds: 300.0,
        precision: Precision {
            compute: DType::F32,
            reduce: None,
            accumulate: DType::F32,
            optimizer_state: DType::F32,
        },
        loss_scale: None,
        offload: Offload {
            optimizer: Placement { tier: Tier::Device, path: None, fraction: 1.0 },
            gradients: Placement { tier: Tier::Device, path: None, fraction: 1.0 },
            parameters: Placement { tier: Tier::Device, path: None, fraction: 1.0 },
            buffer_bytes: Bytes::new(256 * 1024 * 1024),
            block_bytes: Bytes::new(1024 * 1024),
            depth: 32,
            delayed_update: false,
            exact_steps: 40,
        },
    };
    assert_eq!(ZeroConfig::default(), default);
    assert_eq!(ZeroConfig::from_toml("").unwrap(), default);
    assert_eq!(ZeroConfig::from_json("{}").unwrap(), default);
}

#[test]
fn toml_and_json_say_the_same() {
    let expected = ZeroConfig {
        stage: Stage::Three,
        bucket_bytes: Bytes::new(1024),
        reduce_gradients: Some(ReduceGradients::AtStep),
        overlap: false,
        device_transport: false,
        persistence_threshold: 0,
        lookahead_bytes: Bytes::ZERO,
        live_bytes: Some(Bytes::new(5)),
        reuse_bytes: Bytes::new(6),
        alignment: NonZeroUsize::new(8).unwrap(),
        clip_norm: Some(1.0),
        seed: 7,
        deadline_seconds: 1.5,
        precision: Precision {
            compute: DType::F16,
            reduce: Some(DType::F32),
            accumulate: DType::BF16,
            optimizer_state: DType::BF16,
        },
        loss_scale: Some(LossScaling::Dynamic(DynamicLossScale {
            initial_scale: 256.0,
            factor: 4.0,
            window: NonZeroU32::new(10).unwrap(),
            hysteresis: NonZeroU32::MIN,
            consecutive_hysteresis: true,
            min_scale: 0.5,
            at_min: AtMinScale::Skip,
        })),
        offload: Offload {
            optimizer: Placement { tier: Tier::Nvme, path: Some("/nvme".into()), fraction: 0.5 },
            gradients: Placement { tier: Tier::Host, path: None, fraction: 0.25 },
            parameters: Placement { tier: Tier::Auto, path: None, fraction: 1.0 },
            buffer_bytes: Bytes::new(65536),
            block_bytes: Bytes::new(4096),
            depth: 5,
            delayed_update: true,
            exact_steps: 9,
        },
    };
    let toml = r#"
        stage = 3
        bucket_bytes = 1024
        reduce_gradients = "at-step"
        overlap = false
        device_transport = false
        persistence_threshold = 0
        lookahead_bytes = 0
        live_bytes = 5
        reuse_bytes = 6
        alignment = 8
        clip_norm = 1
        seed = 7
        deadline_seconds = 1.5

        [precision]
        compute = "f16"
        reduce = "f32"
        accumulate = "bf16"
        optimizer_state = "bf16"

        [loss_scale]
        initial_scale = 256
        factor = 4.0
        window = 10
        hysteresis = 1
        consecutive_hysteresis = true
        min_scale = 0.5
        at_min = "skip"
        mode = "dynamic"

        [offload]
        buffer_bytes = 65536
        block_bytes = 4096
        depth = 5
        delayed_update = true
        exact_steps = 9
        gradients = { tier = "host", fraction = 0.25 }
        parameters.tier = "auto"

        [offload.optimizer]
        tier = "nvme"
        path = "/nvme"
        fraction = 0.5
    "#;
    let json = r#"{
        "stage": 3, "bucket_bytes": 1024, "reduce_gradients": "at-step", "overlap": false,
        "device_transport": false,
        "persistence_threshold": 0, "lookahead_bytes": 0, "live_bytes": 5, "reuse_bytes": 6, "alignment": 8,
        "clip_norm": 1, "seed": 7, "deadline_seconds": 1.5,
        "precision": {"compute": "f16", "reduce": "f32", "accumulate": "bf16", "optimizer_state": "bf16"},
        "loss_scale": {"initial_scale": 256, "factor": 4.0, "window": 10, "hysteresis": 1,
            "consecutive_hysteresis": true, "min_scale": 0.5, "at_min": "skip", "mode": "dynamic"},
        "offload.gradients": {"tier": "host"},
        "offload": {"buffer_bytes": 65536, "block_bytes": 4096, "depth": 5, "delayed_update": true, "exact_steps": 9,
            "optimizer": {"tier": "nvme", "path": "/nvme", "fraction": 0.5}, "gradients.fraction": 0.25},
        "offload.parameters.tier": "auto"
    }"#;
    assert_eq!(ZeroConfig::from_toml(toml).unwrap(), expected);
    assert_eq!(ZeroConfig::from_json(json).unwrap(), expected);
    assert_eq!(ZeroConfig::from_toml_table(toml.parse().unwrap()).unwrap(), expected);
}

#[test]
fn the_default_is_legal_at_every_stage() {
    for stage in Stage::ALL {
        let config = ZeroConfig { stage, ..ZeroConfig::default() };
        config.validate().unwrap();
        assert_eq!(ZeroConfig::from_toml(&format!("stage = {}", stage.number())).unwrap(), config);
    }
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    assert_eq!(refusal("clip-norms = 1.0"), "unknown key `clip-norms`; did you mean `clip_norm`?");
    let error = ZeroConfig::from_json(r#"{"persistance_threshold": 5}"#).unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown key `persistance_threshold`; did you mean `persistence_threshold`?"
    );
}

#[test]
fn an_unknown_key_near_to_nothing_is_refused_with_all_that_are_known() {
    assert_eq!(
        refusal("warp_drive = true"),
        "unknown key `warp_drive`; known keys are stage, bucket_bytes, reduce_gradients, overlap, device_transport, \
         persistence_threshold, lookahead_bytes, live_bytes, reuse_bytes, alignment, clip_norm, seed, \
         deadline_seconds, precision, loss_scale, offload"
    );
}

#[test]
fn a_value_of_a_wrong_type_is_refused_with_what_belongs_there() {
    assert_eq!(refusal("stage = \"three\""), "`stage` is the string \"three\"; write an integer");
    assert_eq!(refusal("bucket_bytes = 4.0"), "`bucket_bytes` is the float 4.0; write an integer");
    assert_eq!(refusal("clip_norm = true"), "`clip_norm` is the boolean true; write a number");
    assert_eq!(refusal("seed = [1]"), "`seed` is an array; write an integer");
    assert_eq!(refusal("[alignment]\nof = 1"), "`alignment` is a table; write an integer");
    let error = ZeroConfig::from_json(r#"{"seed": null}"#).unwrap_err();
    assert_eq!(error.to_string(), "`seed` is null; write an integer");
}

#[test]
fn null_is_what_is_not_set() {
    let nothing = r#"{"clip_norm": null, "live_bytes": null, "reduce_gradients": null, "loss_scale": null,
                      "precision": {"reduce": null}}"#;
    for text in [nothing, r#"{"loss_scale": {"mode": null}, "precision": null}"#] {
        assert_eq!(ZeroConfig::from_json(text).unwrap(), ZeroConfig::default());
    }
}

#[test]
fn a_key_of_a_table_is_named_with_its_table() {
    assert_eq!(
        refusal("[precision]\ncomptue = \"bf16\""),
        "unknown key `precision.comptue`; did you mean `precision.compute`?"
    );
    assert_eq!(
        refusal("[precision]\nwarp_drive = true"),
        "unknown key `precision.warp_drive`; known keys are precision.compute, precision.reduce, \
         precision.accumulate, precision.optimizer_state"
    );
    assert_eq!(refusal("[precison]\ncompute = 1"), "unknown key `precison`; did you mean `precision`?");
    assert_eq!(refusal("precision = \"bf16\""), "`precision` is the string \"bf16\"; write a table");
    assert_eq!(refusal("loss_scale = 128.0"), "`loss_scale` is the float 128.0; write a table");
}

#[test]
fn a_key_of_a_table_is_found_by_either_spelling() {
    let precision = Precision { compute: DType::BF16, ..Precision::default() };
    let expected = ZeroConfig { precision, ..ZeroConfig::default() };
    for text in ["[precision]\ncompute = \"bf16\"", "precision.compute = \"bf16\""] {
        assert_eq!(ZeroConfig::from_toml(text).unwrap(), expected);
    }
    for text in [r#"{"precision": {"compute": "bf16"}}"#, r#"{"precision.compute": "bf16"}"#] {
        assert_eq!(ZeroConfig::from_json(text).unwrap(), expected);
    }
    for text in [
        r#"{"precision": {"compute": "bf16", "compute": "bf16"}}"#,
        r#"{"precision": {"compute": "bf16"}, "precision.compute": "bf16"}"#,
        r#"{"precision": {"compute": "bf16"}, "precision": {}}"#,
    ] {
        let error = ZeroConfig::from_json(text).unwrap_err();
        assert!(matches!(error, ConfigError::DuplicateKey { .. }), "{error}");
    }
}

#[test]
fn a_word_that_a_key_does_not_take_is_refused_with_those_it_does() {
    assert_eq!(
        refusal("precision.compute = \"f64\""),
        "`precision.compute` is the string \"f64\"; it must be \"f32\", \"bf16\" or \"f16\""
    );
    assert_eq!(
        refusal("precision.optimizer_state = \"f16\""),
        "`precision.optimizer_state` is the string \"f16\"; it must be \"f32\" or \"bf16\""
    );
    assert_eq!(
        refusal("reduce_gradients = true"),
        "`reduce_gradients` is the boolean true; it must be \"every-backward\" or \"at-step\""
    );
    assert_eq!(refusal("overlap = 1"), "`overlap` is the integer 1; write true or false");

    let precision = Precision { reduce: Some(DType::U8), ..Precision::default() };
    let error = ZeroConfig { precision, ..ZeroConfig::default() }.validate().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`precision.reduce` is the dtype u8; it must be \"f32\", \"bf16\" or \"f16\""
    );
}

#[test]
fn keys_of_a_loss_scale_need_its_mode() {
    assert_eq!(
        refusal("[loss_scale]\nwindow = 10"),
        "`loss_scale.window` is set, but it has a meaning only with loss_scale.mode = \"dynamic\"; set that, or \
         remove `loss_scale.window`"
    );
    let message = refusal("[loss_scale]\nmode = \"dynamic\"\nscale = 2.0");
    assert!(message.contains("only with loss_scale.mode = \"static\""), "{message}");
    assert_eq!(
        refusal("[loss_scale]\nmode = \"static\""),
        "`loss_scale.scale` is not set, but the mode is \"static\"; write loss_scale.scale = 128.0"
    );
    let fixed = ZeroConfig::from_toml("[loss_scale]\nscale = 128\nmode = \"static\"").unwrap();
    assert_eq!(fixed.loss_scale, Some(LossScaling::Static { scale: 128.0 }));
}

#[test]
fn a_loss_scale_that_cannot_scale_is_refused() {
    for scale in ["0.0", "-1.0", "nan", "inf", "1e39", "1e-38"] {
        for entry in ["mode = \"static\"\nscale", "mode = \"dynamic\"\ninitial_scale"] {
            let error = ZeroConfig::from_toml(&format!("[loss_scale]\n{entry} = {scale}")).unwrap_err();
            assert!(matches!(error, ConfigError::OutOfRange { .. }), "{scale}: {error}");
        }
    }
    let dynamic = |entry: &str| refusal(&format!("[loss_scale]\nmode = \"dynamic\"\n{entry}"));
    for entry in ["factor = 1.0", "factor = nan", "factor = inf", "window = 0", "hysteresis = -1"] {
        let message = dynamic(entry);
        assert!(message.contains("; it must be "), "{message}");
    }
    assert_eq!(
        dynamic("initial_scale = 2.0\nmin_scale = 4.0"),
        "loss_scale.initial_scale is 2, but loss_scale.min_scale is 4; raise the first or lower the second"
    );
}

#[test]
fn what_is_not_set_follows_from_the_rest() {
    for (stage, expected) in Stage::ALL.into_iter().zip([
        ReduceGradients::AtStep,
        ReduceGradients::AtStep,
        ReduceGradients::EveryBackward,
        ReduceGradients::EveryBackward,
    ]) {
        let config = ZeroConfig { stage, ..ZeroConfig::default() };
        assert_eq!(config.reduce_gradients(), expected);
        for chosen in [ReduceGradients::AtStep, ReduceGradients::EveryBackward] {
            let config = ZeroConfig { reduce_gradients: Some(chosen), ..config.clone() };
            assert_eq!(config.reduce_gradients(), chosen);
        }
    }
    for (compute, expected) in [
        (DType::F32, LossScaling::Static { scale: 1.0 }),
        (DType::BF16, LossScaling::Static { scale: 1.0 }),
        (DType::F16, LossScaling::Dynamic(DynamicLossScale::default())),
    ] {
        let precision = Precision { compute, ..Precision::default() };
        let config = ZeroConfig { precision, ..ZeroConfig::default() };
        assert_eq!((config.loss_scaling(), config.precision.reduce()), (expected, compute));
        let chosen = LossScaling::Static { scale: 8.0 };
        assert_eq!(ZeroConfig { loss_scale: Some(chosen), ..config }.loss_scaling(), chosen);
    }
}

#[test]
fn a_number_that_does_not_exist_is_refused_with_those_that_do() {
    assert_eq!(refusal("stage = 4"), "`stage` is 4; it must be 0, 1, 2 or 3");
    assert_eq!(refusal("stage = 259"), "`stage` is 259; it must be 0, 1, 2 or 3");
    assert_eq!(refusal("alignment = 0"), "`alignment` is 0; it must be at least 1, which asks for nothing");
    assert!(refusal("seed = -1").starts_with("`seed` is -1; it must be at least 0"));
}

#[test]
fn a_number_that_toml_cannot_hold_is_refused() {
    let error = ZeroConfig::from_json(r#"{"seed": 9223372036854775808}"#).unwrap_err();
    assert!(error.to_string().starts_with("`seed` is 9223372036854775808; it must be at most"), "{error}");
}

#[test]
fn a_repeated_key_is_refused() {
    let error = ZeroConfig::from_json(r#"{"seed": 1, "stage": 2, "seed": 1}"#).unwrap_err();
    assert!(matches!(error, ConfigError::DuplicateKey { key: "seed" }), "{error}");
    let message = refusal("stage = 2\nseed = 1\nseed = 1");
    assert!(message.starts_with("line 3 of the configuration is not valid TOML: duplicate key"), "{message}");
}

#[test]
fn a_text_of_another_format_is_refused_with_the_place() {
    assert!(refusal("stage = 2\n{").starts_with("line 2 of the configuration is not valid TOML"));
    let error = ZeroConfig::from_json("[1]").unwrap_err();
    assert!(matches!(error, ConfigError::Json(_)), "{error}");
    let error = ZeroConfig::from_json("{\"stage\": 2").unwrap_err();
    assert!(error.to_string().contains("line 1 column 11"), "{error}");
}

#[test]
fn a_clip_norm_that_cannot_clip_is_refused() {
    for norm in ["-1.0", "inf", "nan"] {
        let error = ZeroConfig::from_toml(&format!("clip_norm = {norm}")).unwrap_err();
        assert!(matches!(error, ConfigError::ClipNorm { .. }), "{norm}: {error}");
    }
    let made = ZeroConfig { clip_norm: Some(0.0), ..ZeroConfig::default() };
    assert!(matches!(made.validate(), Err(ConfigError::ClipNorm { norm: 0.0 })));
}

#[test]
fn a_clip_norm_of_zero_is_none() {
    for norm in ["0", "0.0", "-0.0"] {
        let config = ZeroConfig::from_toml(&format!("clip_norm = {norm}")).unwrap();
        assert_eq!(config.clip_norm, None);
    }
}

#[test]
fn a_deadline_that_is_no_time_is_refused() {
    for seconds in ["0.0", "-1.0", "inf", "nan", "1e-12", "1e20"] {
        let error = ZeroConfig::from_toml(&format!("deadline_seconds = {seconds}")).unwrap_err();
        assert!(matches!(error, ConfigError::Deadline { .. }), "{seconds}: {error}");
    }
}

#[test]
fn a_bucket_without_room_for_one_gradient_is_refused() {
    for bytes in [0, 3] {
        let error = ZeroConfig::from_toml(&format!("bucket_bytes = {bytes}")).unwrap_err();
        assert!(matches!(error, ConfigError::BucketTooSmall { bytes: found } if found == bytes), "{error}");
    }
    ZeroConfig::from_toml("bucket_bytes = 4").unwrap();
}

#[test]
fn a_key_without_effect_at_its_stage_is_refused() {
    let default = ZeroConfig { stage: Stage::Two, ..ZeroConfig::default() };
    let five = Bytes::new(5);
    for (key, made) in [
        ("persistence_threshold", ZeroConfig { persistence_threshold: 5, ..default.clone() }),
        ("lookahead_bytes", ZeroConfig { lookahead_bytes: five, ..default.clone() }),
        ("live_bytes", ZeroConfig { live_bytes: Some(five), ..default.clone() }),
        ("reuse_bytes", ZeroConfig { reuse_bytes: five, ..default.clone() }),
    ] {
        let message = refusal(&format!("stage = 2\n{key} = 5"));
        assert_eq!(
            message,
            format!(
                "`{key}` is set, but stage 2 keeps every parameter gathered, so that it has no effect; remove it or \
                 choose stage 3"
            )
        );
        // The order of keys does not matter.
        assert_eq!(refusal(&format!("{key} = 5\nstage = 2")), message);
        assert_eq!(made.validate().unwrap_err().to_string(), message);
        assert!(!made.to_toml().contains(key));
        ZeroConfig::from_toml(&format!("{key} = 5")).unwrap();
        ZeroConfig::from_toml(&format!("stage = 2\n{key} = 0")).unwrap();
    }
    // Written, the default asks for something as well.
    assert!(refusal("stage = 1\nlookahead_bytes = 67108864").contains("but stage 1 keeps"));
}

#[test]
fn every_key_but_those_not_set_is_written() {
    assert_eq!(
        ZeroConfig::default().to_toml(),
        "stage = 3\nbucket_bytes = 4194304\noverlap = true\ndevice_transport = true\npersistence_threshold = 10000\n\
         lookahead_bytes = 67108864\nreuse_bytes = 0\nalignment = 1\nseed = 0\ndeadline_seconds = 300.0\n\
         precision.compute = \"f32\"\nprecision.accumulate = \"f32\"\nprecision.optimizer_state = \"f32\"\n\
         offload.buffer_bytes = 268435456\noffload.block_bytes = 1048576\noffload.depth = 32\n\
         offload.delayed_update = false\noffload.exact_steps = 40\n\
         offload.optimizer.tier = \"device\"\noffload.optimizer.fraction = 1.0\n\
         offload.gradients.tier = \"device\"\noffload.gradients.fraction = 1.0\n\
         offload.parameters.tier = \"device\"\noffload.parameters.fraction = 1.0\n"
    );
}

#[test]
fn a_section_of_another_document_reads_and_writes_alike() {
    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Job {
        steps: usize,
        zero: ZeroConfig,
    }
    let zero = ZeroConfig {
        stage: Stage::One,
        clip_norm: Some(0.5),
        loss_scale: Some(LossScaling::Static { scale: 0.5 }),
        ..ZeroConfig::default()
    };
    let job = Job { steps: 3, zero };
    assert_eq!(toml::from_str::<Job>(&toml::to_string(&job).unwrap()).unwrap(), job);
    assert_eq!(serde_json::from_str::<Job>(&serde_json::to_string(&job).unwrap()).unwrap(), job);

    let error = toml::from_str::<Job>("steps = 3\n[zero]\nsed = 1").unwrap_err();
    assert_eq!(error.message(), "unknown key `sed`; did you mean `seed`?");
    let table = toml::Table::from_iter([("sed".to_owned(), toml::Value::Integer(1))]);
    assert_eq!(ZeroConfig::from_toml_table(table).unwrap_err().to_string(), error.message());
}

#[test]
fn options_of_layout_and_look_ahead_and_the_deadline_come_from_the_configuration() {
    let text = "bucket_bytes = 64\npersistence_threshold = 5\nalignment = 2\ndeadline_seconds = 0.25\n\
                lookahead_bytes = 1\nlive_bytes = 2\nreuse_bytes = 3";
    let config = ZeroConfig::from_toml(text).unwrap();
    let options = LayoutOptions {
        alignment: NonZeroUsize::new(2).unwrap(),
        bucket_bytes: Bytes::new(64),
        persistence_threshold: 5,
    };
    assert_eq!(config.layout_options(), options);
    let options = LookAheadOptions {
        lookahead_bytes: Bytes::new(1),
        live_bytes: Some(Bytes::new(2)),
        reuse_bytes: Bytes::new(3),
    };
    assert_eq!(config.lookahead_options(), options);
    let config = ZeroConfig { overlap: false, ..config };
    let options = LookAheadOptions { lookahead_bytes: Bytes::ZERO, ..options };
    assert_eq!(config.lookahead_options(), options);
    assert_eq!(config.deadline(), Duration::from_millis(250));
}

#[test]
fn seconds_that_are_no_duration_become_the_nearest_one() {
    let deadline = |deadline_seconds| ZeroConfig { deadline_seconds, ..ZeroConfig::default() }.deadline();
    assert_eq!([f64::INFINITY, 1e300].map(deadline), [Duration::MAX; 2]);
    assert_eq!([f64::NAN, -1.0, f64::NEG_INFINITY].map(deadline), [Duration::ZERO; 3]);
}

#[test]
fn the_nearest_of_equally_near_words_is_the_first() {
    assert_eq!(nearest("stage", ["stage1", "stage2"]), Some("stage1"));
    assert_eq!(nearest("STAGE", ["seed", "stage"]), Some("stage"));
    assert_eq!(nearest("stage", []), None);
}

/// Every loss scaling that a configuration can hold.
fn loss_scalings() -> impl Strategy<Value = LossScaling> {
    let count = || (1..=u32::MAX).prop_map(|count| NonZeroU32::new(count).unwrap());
    let at_min = prop::sample::select(vec![AtMinScale::Error, AtMinScale::Skip]);
    let scale = || LossScaling::MIN..=LossScaling::MAX;
    let dynamic = (scale(), scale(), 1.001..1e30, count(), count(), any::<bool>(), at_min).prop_map(
        |(one, other, factor, window, hysteresis, consecutive_hysteresis, at_min)| {
            LossScaling::Dynamic(DynamicLossScale {
                initial_scale: one.max(other),
                factor,
                window,
                hysteresis,
                consecutive_hysteresis,
                min_scale: one.min(other),
                at_min,
            })
        },
    );
    prop_oneof![scale().prop_map(|scale| LossScaling::Static { scale }), dynamic]
}

fn precisions() -> impl Strategy<Value = Precision> {
    let float = || prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]);
    let state = prop::sample::select(vec![DType::F32, DType::BF16]);
    (float(), prop::option::of(float()), float(), state).prop_map(
        |(compute, reduce, accumulate, optimizer_state)| Precision {
            compute,
            reduce,
            accumulate,
            optimizer_state,
        },
    )
}

/// What is kept where, in legal combinations.
fn offloads() -> impl Strategy<Value = Offload> {
    let placement = |path: String| {
        prop_oneof![
            Just(Placement::default()),
            (0.0..=1.0).prop_map(|fraction| Placement { tier: Tier::Host, path: None, fraction }),
            (0.0..=1.0, Just(path.clone())).prop_map(|(fraction, path)| Placement {
                tier: Tier::Nvme,
                path: Some(path.into()),
                fraction
            }),
            prop::option::of(Just(path)).prop_map(|path| Placement {
                tier: Tier::Auto,
                path: path.map(Into::into),
                fraction: 1.0
            }),
        ]
    };
    // Any path that a file can say.
    let placed = move || ".+".prop_flat_map(placement);
    let fraction =
        |placement: &Placement| if placement.tier == Tier::Nvme { placement.fraction } else { 0.0 };
    let placements = (placed(), placed(), placed())
        .prop_filter("no more masters are on a disk than states", move |(optimizer, _, parameters)| {
            fraction(parameters) <= fraction(optimizer)
        });
    let block = (12..=30_u32).prop_flat_map(|power| (Just(1 << power), 3 << power..=i64::MAX as u64));
    (placements, block, 1..=4096_usize, any::<bool>(), 0..=i64::MAX as u64).prop_map(
        |((optimizer, gradients, parameters), (block, buffers), depth, delayed_update, exact_steps)| {
            Offload {
                optimizer,
                gradients,
                parameters,
                buffer_bytes: Bytes::new(buffers),
                block_bytes: Bytes::new(block),
                depth,
                delayed_update,
                exact_steps,
            }
        },
    )
}

proptest! {
    #[test]
    fn a_valid_configuration_reads_back_as_written(
        stage in prop::sample::select(Stage::ALL.to_vec()),
        bucket_bytes in 4..=i64::MAX as u64,
        threshold in 0..=i64::MAX as usize,
        alignment in 1..=i64::MAX as usize,
        clip_norm in prop::option::of(f64::MIN_POSITIVE..f64::MAX),
        seed in 0..=i64::MAX as u64,
        deadline_seconds in 1e-6..1e18,
        (lookahead, live, reuse) in
            (0..=i64::MAX as u64, prop::option::of(0..=i64::MAX as u64), 0..=i64::MAX as u64),
        (overlap, device_transport) in any::<(bool, bool)>(),
        reduce_gradients in
            prop::option::of(prop::sample::select(vec![ReduceGradients::AtStep, ReduceGradients::EveryBackward])),
        precision in precisions(),
        loss_scale in prop::option::of(loss_scalings()),
        offload in offloads(),
    ) {
        let default = ZeroConfig::default();
        let mut config = ZeroConfig {
            stage,
            bucket_bytes: Bytes::new(bucket_bytes),
            reduce_gradients,
            overlap,
            device_transport,
            lookahead_bytes: Bytes::new(lookahead),
            live_bytes: live.map(Bytes::new),
            reuse_bytes: Bytes::new(reuse),
            precision,
            loss_scale,
            persistence_threshold: threshold,
            alignment: alignment.try_into().unwrap(),
            clip_norm,
            seed,
            deadline_seconds,
            offload,
        };
        if precision.compute == DType::F32 && config.offload.parameters.tier != Tier::Auto {
            config.offload.parameters = Placement::default();
        }
        if config.reduce_gradients() == ReduceGradients::AtStep {
            config.offload.gradients = Placement::default();
        }
        let config = if stage.shards_parameters() {
            config
        } else {
            let ZeroConfig { persistence_threshold, lookahead_bytes, live_bytes, reuse_bytes, .. } = default;
            ZeroConfig { persistence_threshold, lookahead_bytes, live_bytes, reuse_bytes, ..config }
        };
        config.validate().unwrap();
        prop_assert_eq!(&ZeroConfig::from_toml(&config.to_toml()).unwrap(), &config);
        prop_assert_eq!(&ZeroConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), &config);
    }
}
