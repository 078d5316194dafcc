//! Files of DeepSpeed: what is kept in host memory or on a disk.

use serde_json::{Value, json};
use zero_core::{
    Bytes, DeepSpeedError, DeepSpeedGiven, DeepSpeedImport, DeepSpeedSource, DeepSpeedVerdict, Offload,
    Placement, Tier, WorldSize, ZeroConfig,
};

/// The import of `zero_optimization` at a stage, with layers in bf16 and `rest` beside it.
fn import_with(stage: u8, zero: Value, rest: Value) -> Result<DeepSpeedImport, DeepSpeedError> {
    let mut file = json!({"train_batch_size": 4, "bf16": {"enabled": true}, "zero_optimization": zero});
    file["zero_optimization"]["stage"] = stage.into();
    for (key, value) in rest.as_object().unwrap() {
        file[key] = value.clone();
    }
    ZeroConfig::from_deepspeed(&file.to_string(), &DeepSpeedGiven::new(WorldSize::new(4).unwrap()))
}

fn import(stage: u8, zero: Value) -> DeepSpeedImport {
    import_with(stage, zero, json!({})).unwrap()
}

/// The last name of the only key that is refused, and why.
fn refusal(result: Result<DeepSpeedImport, DeepSpeedError>) -> (String, String) {
    let Err(DeepSpeedError::Refused { report, .. }) = result else { panic!("not refused: {result:?}") };
    let refused: Vec<_> = report.refused().collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    (refused[0].0.key.clone(), refused[0].1.to_owned())
}

fn verdict(import: &DeepSpeedImport, key: &str) -> String {
    import.report.find(key).unwrap().verdict.to_string()
}

fn placed(tier: Tier, path: Option<&str>, fraction: f64) -> Placement {
    Placement { tier, path: path.map(Into::into), fraction }
}

const DEVICE: &str = "zero_optimization.offload_optimizer.device";
const PARAM_DEVICE: &str = "zero_optimization.offload_param.device";

#[test]
fn state_gradients_and_masters_go_where_the_optimizer_is_offloaded_to() {
    let on_host = placed(Tier::Host, None, 0.3);
    let expected = Offload {
        optimizer: on_host.clone(),
        gradients: on_host.clone(),
        parameters: on_host,
        ..Offload::default()
    };
    for stage in [1, 2, 3] {
        let found =
            import(stage, json!({"offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": false}}));
        assert_eq!(found.config.offload, expected);
        assert_eq!(
            verdict(&found, DEVICE),
            "honoured: `offload.optimizer` and `offload.gradients` and `offload.parameters`"
        );
        assert!(found.report.find("aio.queue_depth").is_none(), "nothing is on a disk");
        assert_eq!(ZeroConfig::from_toml(&found.config.to_toml()).unwrap(), found.config);
    }

    let on_disk = placed(Tier::Nvme, Some("/local_nvme"), 1.0);
    let found = import(3, json!({"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}));
    let expected = Offload {
        optimizer: on_disk.clone(),
        gradients: on_disk.clone(),
        parameters: on_disk,
        block_bytes: Bytes::new(1 << 20),
        depth: 8,
        ..Offload::default()
    };
    assert_eq!(found.config.offload, expected);
    assert_eq!(
        verdict(&found, DEVICE),
        "honoured: `offload.optimizer` and `offload.gradients` and `offload.parameters`"
    );
    let depth = found.report.find("aio.queue_depth").unwrap();
    assert_eq!((depth.value.as_str(), depth.source), ("8", DeepSpeedSource::Default));
}

#[test]
fn masters_in_f32_stay_and_the_report_says_so() {
    for (key, zero) in [
        (DEVICE, json!({"offload_optimizer": {"device": "cpu"}})),
        ("zero_optimization.cpu_offload", json!({"cpu_offload": true})),
    ] {
        let found = import_with(2, zero, json!({"bf16": {"enabled": false}})).unwrap();
        let Offload { optimizer, gradients, parameters, .. } = found.config.offload.clone();
        assert_eq!((optimizer.tier, gradients.tier, parameters.tier), (Tier::Host, Tier::Host, Tier::Device));
        assert!(
            verdict(&found, key).starts_with("approximated: optimizer state and gradients are kept there")
        );
    }
}

#[test]
fn offloaded_parameters_are_masters() {
    let expected = Offload { parameters: placed(Tier::Host, None, 1.0), ..Offload::default() };
    let found = import(3, json!({"offload_param": {"device": "cpu", "max_in_cpu": 0}}));
    assert_eq!(found.config.offload, expected);
    assert!(
        verdict(&found, PARAM_DEVICE)
            .starts_with("approximated: f32 master weights are kept there; shards in 16")
    );

    for path in [json!(null), json!("/p")] {
        let found = import(3, json!({"offload_param": {"device": "nvme", "nvme_path": path}}));
        assert_eq!(found.config.offload, expected);
        assert_eq!(
            verdict(&found, PARAM_DEVICE),
            "approximated: parameters stay in the host's memory, masters in f32 and shards in 16 bits, where ranks read \
             them from each other; offload_optimizer with the device \"nvme\" takes the masters to a disk"
        );
        let path = "zero_optimization.offload_param.nvme_path";
        assert_eq!(verdict(&found, path), "without effect: shards stay in memory");
        assert!(found.report.find("aio.queue_depth").is_none(), "nothing is on a disk");
    }
}

#[test]
fn parameters_in_f32_stay_and_the_report_says_so() {
    for (key, zero) in [
        (PARAM_DEVICE, json!({"offload_param": {"device": "cpu"}})),
        (PARAM_DEVICE, json!({"offload_param": {"device": "nvme"}})),
        ("zero_optimization.cpu_offload_param", json!({"cpu_offload_param": true})),
    ] {
        let found = import_with(3, zero, json!({"bf16": {"enabled": false}})).unwrap();
        assert_eq!(found.config.offload, Offload::default());
        assert_eq!(
            verdict(&found, key),
            "approximated: shards stay in the memory of the device, where ranks read them from each other"
        );
    }
}

#[test]
fn masters_go_with_the_optimizer_or_to_the_host_if_parameters_are_offloaded() {
    let parameters = |optimizer: &str, param: &str| {
        let found = import(
            3,
            json!({
                "offload_optimizer": {"device": optimizer, "nvme_path": "/o", "ratio": 0.5},
                "offload_param": {"device": param, "nvme_path": "/p"}
            }),
        );
        (found.config.offload.parameters.clone(), verdict(&found, PARAM_DEVICE))
    };
    for (optimizer, param, expected, verdict_begins) in [
        ("cpu", "cpu", placed(Tier::Host, None, 0.5), "approximated: f32 master weights lie with"),
        ("cpu", "nvme", placed(Tier::Host, None, 1.0), "approximated: parameters stay in the host's memory"),
        ("nvme", "cpu", placed(Tier::Nvme, Some("/o"), 0.5), "approximated: f32 master weights lie with"),
        ("nvme", "nvme", placed(Tier::Nvme, Some("/o"), 0.5), "approximated: f32 master weights lie with"),
        ("nvme", "none", placed(Tier::Nvme, Some("/o"), 0.5), "honoured: `offload.parameters`"),
    ] {
        let (found, verdict) = parameters(optimizer, param);
        assert_eq!(found, expected, "{optimizer} {param}");
        assert!(verdict.starts_with(verdict_begins), "{verdict}");
    }
}

#[test]
fn what_deepspeed_refuses_is_refused() {
    let disk = |path: Value| json!({"offload_optimizer": {"device": "nvme", "nvme_path": path}});
    for stage in [1, 2] {
        let (key, why) = refusal(import_with(stage, disk("/a".into()), json!({})));
        assert_eq!((key.as_str(), why.contains("at stage 3 alone")), (DEVICE, true), "{why}");
    }
    for path in [json!(null), json!(""), json!(5)] {
        let (key, why) = refusal(import_with(3, disk(path), json!({})));
        assert_eq!(key, "zero_optimization.offload_optimizer.nvme_path");
        assert!(why.contains("directory"), "{why}");
    }
    let (key, why) = refusal(import_with(3, json!({"offload_optimizer": {"device": "tpu"}}), json!({})));
    assert_eq!((key.as_str(), why.as_str()), (DEVICE, "must be one of \"none\", \"cpu\", \"nvme\""));
    let ratio = json!({"offload_optimizer": {"device": "cpu", "ratio": 1.5}});
    assert_eq!(refusal(import_with(3, ratio, json!({}))).1, "must be from 0 to 1");
    let size = json!({"offload_optimizer": {"device": "cpu", "buffer_size": 5}});
    assert!(refusal(import_with(3, size, json!({}))).1.starts_with("unknown key; did you mean"));
}

#[test]
fn deprecated_keys_offload_to_the_host() {
    let found = import(3, json!({"cpu_offload": true, "cpu_offload_use_pin_memory": true}));
    assert_eq!(found.config, import(3, json!({"offload_optimizer": {"device": "cpu"}})).config);
    let found = import(3, json!({"cpu_offload_param": true}));
    assert_eq!(found.config, import(3, json!({"offload_param": {"device": "cpu"}})).config);
    for (key, zero) in [
        (
            "zero_optimization.cpu_offload",
            json!({"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}),
        ),
        (
            "zero_optimization.cpu_offload_param",
            json!({"cpu_offload_param": true, "offload_param": {"device": "cpu"}}),
        ),
    ] {
        let (refused, why) = refusal(import_with(3, zero, json!({})));
        assert!(refused == key && why.ends_with("remove this one"), "{refused}: {why}");
    }
}

#[test]
fn a_stage_without_offload_has_none() {
    let zero = json!({
        "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}, "cpu_offload": true,
        "cpu_offload_param": true
    });
    let found = import(0, zero);
    assert_eq!(found.config.offload, Offload::default());
    for key in [DEVICE, PARAM_DEVICE, "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"]
    {
        let verdict = &found.report.find(key).unwrap().verdict;
        assert!(matches!(verdict, DeepSpeedVerdict::WithoutEffect { .. }), "{key}: {verdict}");
    }
    let found = import(2, json!({"offload_param": {"device": "cpu"}}));
    assert_eq!(verdict(&found, PARAM_DEVICE), "without effect: the stage is not 3");
    assert_eq!(found.config.offload, Offload::default());
}

#[test]
fn transfers_are_as_the_file_says() {
    let with = |aio: Value| {
        let zero = json!({"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}});
        import_with(3, zero, json!({"aio": aio}))
    };
    let aio = json!({"block_size": 131072, "queue_depth": 16, "thread_count": 4, "single_submit": true});
    let found = with(aio).unwrap();
    let Offload { block_bytes, depth, buffer_bytes, .. } = found.config.offload;
    assert_eq!((block_bytes, depth), (Bytes::new(131_072), 64));
    assert_eq!(buffer_bytes, Offload::default().buffer_bytes);
    let gds = with(json!({"use_gds": true})).unwrap();
    assert!(matches!(gds.report.find("aio.use_gds").unwrap().verdict, DeepSpeedVerdict::Approximated { .. }));

    for bytes in [0, 4095, 1_000_000, 1 << 25] {
        let (key, why) = refusal(with(json!({"block_size": bytes})));
        assert_eq!(
            (key.as_str(), why.as_str()),
            ("aio.block_size", "must be a power of two from 4096 to 16777216"),
        );
    }
    for aio in [
        json!({"queue_depth": 4097}),
        json!({"queue_depth": 2048, "intra_op_parallelism": 3}),
        json!({"queue_depth": i64::MAX, "intra_op_parallelism": i64::MAX}),
    ] {
        let (key, why) = refusal(with(aio));
        assert_eq!(key, "aio.queue_depth");
        assert!(why.ends_with("must be at most 4096; lower one of the two"), "{why}");
    }
    assert_eq!(refusal(with(json!({"queue_depth": 0}))).0, "aio.queue_depth");
    assert_eq!(refusal(with(json!({"intra_op_parallelism": 0}))).0, "aio.intra_op_parallelism");

    // Without a disk there is nothing to transfer.
    let found = import_with(3, json!({}), json!({"aio": {"block_size": 5, "queue_depth": 9999}})).unwrap();
    assert_eq!(found.config.offload, Offload::default());
    assert_eq!(verdict(&found, "aio.block_size"), "without effect: the optimizer's state is not on a disk");
}
