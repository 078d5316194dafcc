//! Configurations: what is read, what is refused, and why.

use std::num::NonZeroUsize;
use std::time::Duration;

use proptest::prelude::*;
use zero_core::{Bytes, ConfigError, LayoutOptions, Stage, ZeroConfig, nearest};

/// The message about a TOML text that has to be refused.
fn refusal(text: &str) -> String {
    ZeroConfig::from_toml(text).unwrap_err().to_string()
}

#[test]
fn an_empty_text_is_the_default() {
    let default = ZeroConfig {
        stage: Stage::Three,
        bucket_bytes: Bytes::new(4 * 1024 * 1024),
        persistence_threshold: 10_000,
        alignment: NonZeroUsize::MIN,
        clip_norm: None,
        seed: 0,
        deadline_seconds: 300.0,
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
        persistence_threshold: 0,
        alignment: NonZeroUsize::new(8).unwrap(),
        clip_norm: Some(1.0),
        seed: 7,
        deadline_seconds: 1.5,
    };
    let toml = "stage = 3\nbucket_bytes = 1024\npersistence_threshold = 0\nalignment = 8\nclip_norm = 1\n\
                seed = 7\ndeadline_seconds = 1.5";
    let json = r#"{"stage": 3, "bucket_bytes": 1024, "persistence_threshold": 0, "alignment": 8,
                   "clip_norm": 1, "seed": 7, "deadline_seconds": 1.5}"#;
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
        "unknown key `warp_drive`; known keys are stage, bucket_bytes, persistence_threshold, alignment, \
         clip_norm, seed, deadline_seconds"
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
fn a_clip_norm_of_null_is_one_that_is_not_set() {
    assert_eq!(ZeroConfig::from_json(r#"{"clip_norm": null}"#).unwrap(), ZeroConfig::default());
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
    for norm in ["0.0", "-1.0", "inf", "nan", "0"] {
        let error = ZeroConfig::from_toml(&format!("clip_norm = {norm}")).unwrap_err();
        assert!(matches!(error, ConfigError::ClipNorm { .. }), "{norm}: {error}");
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
fn a_threshold_without_effect_is_refused() {
    let message = refusal("stage = 2\npersistence_threshold = 10000");
    assert!(message.contains("10000, but stage 2 keeps every parameter gathered"), "{message}");
    // The order of keys does not matter.
    assert_eq!(refusal("persistence_threshold = 10000\nstage = 2"), message);
    ZeroConfig::from_toml("stage = 2\npersistence_threshold = 0").unwrap();
    let made = ZeroConfig { stage: Stage::Zero, persistence_threshold: 5, ..ZeroConfig::default() };
    assert!(matches!(made.validate(), Err(ConfigError::IdleThreshold { threshold: 5, stage: Stage::Zero })));
}

#[test]
fn every_key_but_those_not_set_is_written() {
    assert_eq!(
        ZeroConfig::default().to_toml(),
        "stage = 3\nbucket_bytes = 4194304\npersistence_threshold = 10000\nalignment = 1\nseed = 0\n\
         deadline_seconds = 300.0\n"
    );
}

#[test]
fn a_section_of_another_document_reads_and_writes_alike() {
    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Job {
        steps: usize,
        zero: ZeroConfig,
    }
    let zero = ZeroConfig { stage: Stage::One, clip_norm: Some(0.5), ..ZeroConfig::default() };
    let job = Job { steps: 3, zero };
    assert_eq!(toml::from_str::<Job>(&toml::to_string(&job).unwrap()).unwrap(), job);
    assert_eq!(serde_json::from_str::<Job>(&serde_json::to_string(&job).unwrap()).unwrap(), job);

    let error = toml::from_str::<Job>("steps = 3\n[zero]\nsed = 1").unwrap_err();
    assert_eq!(error.message(), "unknown key `sed`; did you mean `seed`?");
    let table = toml::Table::from_iter([("sed".to_owned(), toml::Value::Integer(1))]);
    assert_eq!(ZeroConfig::from_toml_table(table).unwrap_err().to_string(), error.message());
}

#[test]
fn layout_options_and_the_deadline_come_from_the_configuration() {
    let text = "bucket_bytes = 64\npersistence_threshold = 5\nalignment = 2\ndeadline_seconds = 0.25";
    let config = ZeroConfig::from_toml(text).unwrap();
    let options = LayoutOptions {
        alignment: NonZeroUsize::new(2).unwrap(),
        bucket_bytes: Bytes::new(64),
        persistence_threshold: 5,
    };
    assert_eq!(config.layout_options(), options);
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
    ) {
        let default = ZeroConfig::default();
        let config = ZeroConfig {
            stage,
            bucket_bytes: Bytes::new(bucket_bytes),
            persistence_threshold:
                if stage.shards_parameters() { threshold } else { default.persistence_threshold },
            alignment: alignment.try_into().unwrap(),
            clip_norm,
            seed,
            deadline_seconds,
        };
        config.validate().unwrap();
        prop_assert_eq!(&ZeroConfig::from_toml(&config.to_toml()).unwrap(), &config);
        prop_assert_eq!(&ZeroConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), &config);
    }
}
