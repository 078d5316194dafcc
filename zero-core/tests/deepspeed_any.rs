//! Files of DeepSpeed: whatever is read, nothing panics.

use proptest::prelude::*;
use serde_json::{Value, json};
use zero_core::{BatchPlan, DeepSpeedError, DeepSpeedGiven, DeepSpeedImport, WorldSize, ZeroConfig};

fn world() -> WorldSize {
    WorldSize::new(4).unwrap()
}

fn any_json() -> impl Strategy<Value = Value> {
    let names = || {
        let known: Vec<String> = DeepSpeedImport::keys_table()
            .lines()
            .filter_map(|line| line.split('`').nth(1))
            .flat_map(|path| path.split('.').map(str::to_owned))
            .collect();
        prop_oneof![4 => prop::sample::select(known), 1 => "\\PC{0,8}"]
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0_i64..10).prop_map(Value::from),
        Just(Value::from("auto")),
        prop::sample::select(vec!["Adam", "SGD", "OneCycle", "WarmupCosineLR", "fp16"]).prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names(), inner), 0..8)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// A file with a batch size and known keys that have their defaults, or now and then anything.
fn any_file() -> impl Strategy<Value = Value> {
    let known: Vec<(String, Value)> = DeepSpeedImport::keys_table()
        .lines()
        .filter_map(|line| {
            let mut words = line.split('`');
            let (path, default) = (words.nth(1)?, words.nth(1)?);
            Some((path.to_owned(), serde_json::from_str(default).ok()?))
        })
        .collect();
    let number = prop_oneof![(0_i64..3).prop_map(Value::from), any::<u64>().prop_map(Value::from)];
    let change = prop_oneof![16 => Just(None), 2 => number.prop_map(Some), 1 => any_json().prop_map(Some), 2 => Just(Some(true.into()))];
    prop::collection::vec((prop::sample::select(known), change), 0..8).prop_map(|entries| {
        let mut root = json!({"train_batch_size": 8});
        for ((path, default), change) in entries {
            let mut place = &mut root;
            for name in path.split('.') {
                if !place.is_object() {
                    *place = json!({});
                }
                place = &mut place[name];
            }
            *place = change.unwrap_or(default);
        }
        root
    })
}

/// A file about what is kept where, most of them legal.
fn any_offload() -> impl Strategy<Value = Value> {
    let device = || prop::sample::select(vec!["none", "cpu", "nvme", "auto"]);
    let path = || prop::sample::select(vec![json!(null), json!("/a"), json!("/b")]);
    let old = || prop::sample::select(vec![json!(null), json!(false), json!(true)]);
    let number =
        || prop::sample::select(vec![json!(0), json!(0.5), json!(1), json!(8), json!(4096), json!(1 << 30)]);
    let devices = (device(), path(), device(), path());
    let numbers = (number(), number(), number(), number());
    (0..4_u8, any::<bool>(), devices, old(), old(), numbers).prop_map(
        |(
            stage,
            bf16,
            (optimizer, path, param, param_path),
            old,
            old_param,
            (ratio, block, depth, threads),
        )| {
            json!({
                "train_batch_size": 8, "bf16": {"enabled": bf16},
                "zero_optimization": {
                    "stage": stage, "cpu_offload": old, "cpu_offload_param": old_param,
                    "offload_optimizer": {"device": optimizer, "nvme_path": path, "ratio": ratio},
                    "offload_param": {"device": param, "nvme_path": param_path}
                },
                "aio": {"block_size": block, "queue_depth": depth, "intra_op_parallelism": threads}
            })
        },
    )
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,64}|[{}\\[\\]:,\"0-9a-z.e\\n -]{0,64}") {
        let result = ZeroConfig::from_deepspeed(&text, &DeepSpeedGiven::new(world()));
        prop_assert!(result.is_err(), "a file without a batch size is none");
    }

    #[test]
    fn any_tree_is_read_or_refused_by_key(file in prop_oneof![any_json(), any_file(), any_offload()]) {
        match ZeroConfig::from_deepspeed(&file.to_string(), &DeepSpeedGiven::new(world())) {
            Ok(import) => {
                import.config.validate().unwrap();
                                let BatchPlan { train_batch_size, micro_batch_size_per_rank, accumulation_steps } = import.batch;
                let plan = BatchPlan::new(
                    Some(train_batch_size), Some(micro_batch_size_per_rank), Some(accumulation_steps), world(),
                );
                prop_assert_eq!(plan, Ok(import.batch));
                prop_assert!(import.report.refused().next().is_none());
            }
            Err(DeepSpeedError::Refused { report, .. }) => prop_assert!(report.refused().next().is_some()),
            Err(DeepSpeedError::Config(error)) => prop_assert!(false, "not in DeepSpeed's words: {error}"),
            Err(_) => {}
        }
    }
}
