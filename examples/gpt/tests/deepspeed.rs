//! A `ds_config.json` of DeepSpeed runs as it is.

mod common;

use std::fs;
use std::sync::Mutex;

use burn::tensor::Device;
use clap::Parser as _;
use gpt::corpus::Corpus;
use gpt::flags::Flags;
use gpt::learner::Learner as _;
use gpt::rates::Rates;
use gpt::settings::Settings;
use gpt::sharded::Sharded;
use serde_json::{Value, json};
use tempfile::TempDir;
use zero_burn::{Bytes, DeepSpeedScheduler, DeepSpeedWarmup, LocalWorld, Offload, ReduceGradients};

use common::{folder, gpt, losses, train};

/// Settings that leave batch, rates and decay to a file of DeepSpeed.
const OPEN: &str = "[model]\ncontext = 16\ndim = 16\nheads = 2\nlayers = 2\n\
                    [train]\nsteps = 6\nsample = 12\nheld_out_rows = 5\n";

/// As tutorials have it: ZeRO-2, 16 bits, a warm-up, accumulation.
fn typical(precision: &str) -> Value {
    json!({
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 100,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": { "lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1 }
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 1e-4,
                "warmup_max_lr": 2e-3,
                "warmup_num_steps": 3,
                "warmup_type": "linear"
            }
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": true,
            "allgather_bucket_size": 2e8,
            "overlap_comm": true,
            "reduce_scatter": true,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": true
        },
        precision: { "enabled": true }
    })
}

fn write(folder: &TempDir, file: &Value) {
    fs::write(folder.path().join("ds_config.json"), file.to_string()).unwrap();
    fs::write(folder.path().join("tiny.toml"), OPEN).unwrap();
}

/// The error of a run.
fn refused(folder: &TempDir, arguments: &[&str]) -> String {
    let all = ["--config", "tiny.toml", "--corpus", "text.txt", "--deepspeed-config", "ds_config.json"];
    let output = gpt(folder.path(), &[&all, arguments].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.starts_with("error: ") && output.stdout.is_empty(), "{told}");
    told
}

/// A number as a reader of the metrics gets it.
fn as_read(number: f64) -> Value {
    serde_json::from_str(&json!(number).to_string()).unwrap()
}

#[test]
fn a_typical_file_trains_as_its_numbers_given_natively() {
    for (key, precision) in [("bf16", "bf16"), ("fp16", "f16")] {
        let folder = folder();
        write(&folder, &typical(key));
        let steps = ["--steps", "9"];
        let (metrics, printed) =
            train(&folder, &[&["--deepspeed-config", "ds_config.json"], &steps[..]].concat());
        for part in
            ["honoured: `BatchPlan`", "without effect", "training at stage 2", "backwards per step: 2"]
        {
            assert!(printed.contains(part), "{part} in {printed}");
        }

        // DeepSpeed accumulates in what layers compute in.
        let native = format!("{OPEN}[zero.precision]\naccumulate = \"{precision}\"\n");
        fs::write(folder.path().join("native.toml"), native).unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (config, text) = (path("native.toml"), path("text.txt"));
        let flags = ["gpt", "--config", &config, "--corpus", &text, "--stage", "2", "--precision", precision];
        let flags = [&flags[..], &["--batch", "8", "--accumulation", "2"], &steps].concat();
        let mut settings = Settings::new(Flags::try_parse_from(flags).unwrap()).unwrap();
        let warmup = DeepSpeedWarmup { steps: 3, linear: true };
        settings.rates =
            Rates::DeepSpeed(DeepSpeedScheduler::WarmupLr { warmup, min_lr: 1e-4, max_lr: 2e-3 });
        let corpus = Corpus::read(&settings.corpus, settings.model.context).unwrap();
        let found = Mutex::new(Vec::new());
        LocalWorld::new(settings.world_size())
            .run(|comm| -> anyhow::Result<()> {
                let mut learner = Sharded::new(&settings, &comm, Device::default())?;
                for step in 0..settings.train.steps {
                    let progress = learner.step(step, &corpus)?;
                    if comm.rank().index() == 0 {
                        found.lock().unwrap().push(progress);
                    }
                }
                Ok(())
            })
            .unwrap();

        let found = found.into_inner().unwrap();
        assert_eq!((metrics.len(), found.len()), (9, 9));
        for (record, progress) in metrics.iter().zip(&found) {
            let engine = progress.engine.as_ref().unwrap();
            assert_eq!(record["precision"], precision);
            assert_eq!(record["loss"], as_read(progress.loss));
            assert_eq!(record["grad_norm"], as_read(progress.grad_norm));
            assert_eq!(record["lr"], as_read(progress.lr));
            assert_eq!(record["loss_scale"], as_read(engine.loss_scale));
            assert_eq!(record["skipped"], !engine.applied);
        }
        // f16 begins with a scale that is too large here; the warm-up does not move on meanwhile.
        let applied = metrics.iter().filter(|record| record["skipped"] == false);
        let rates: Vec<_> = applied.map(|record| record["lr"].clone()).collect();
        assert_eq!((rates.len() < 9, rates.len() >= 5), (precision == "f16", true), "{metrics:?}");
        let expected = [1e-4, 1e-4, 1e-4 + 1.9e-3 / 3.0, 1e-4 + 3.8e-3 / 3.0, 2e-3];
        for (rate, expected) in rates.iter().zip(expected) {
            assert!((rate.as_f64().unwrap() - expected).abs() < 1e-12, "{rates:?}");
        }
        assert!(losses(&metrics)[8] < losses(&metrics)[0], "{metrics:?}");
    }
}

#[test]
fn flags_and_settings_answer_auto() {
    let folder = folder();
    let mut file = typical("bf16");
    for pointer in [
        "/train_batch_size",
        "/gradient_accumulation_steps",
        "/gradient_clipping",
        "/optimizer/params/lr",
        "/optimizer/params/weight_decay",
        "/scheduler/params/warmup_max_lr",
        "/scheduler/params/warmup_num_steps",
        "/bf16/enabled",
    ] {
        *file.pointer_mut(pointer).unwrap() = json!("auto");
    }
    write(&folder, &file);
    let flags = ["--lr", "0.004", "--batch", "12", "--precision", "bf16", "--stage", "2"];
    let (metrics, printed) =
        train(&folder, &[&flags[..], &["--deepspeed-config", "ds_config.json", "--steps", "22"]].concat());
    // The file has two rows per rank and backward, and there are two ranks.
    assert!(printed.contains("12 rows per step in all, backwards per step: 3"), "{printed}");
    let row = |key: &str| -> Vec<&str> {
        let row = printed.lines().find(|line| line.split_whitespace().next() == Some(key)).unwrap();
        row.split_whitespace().take(3).collect()
    };
    // It follows from the others.
    let steps = "gradient_accumulation_steps";
    assert_eq!(row(steps), [steps, "3", "default"]);
    let expected = [
        ("train_batch_size", "12"),
        ("gradient_clipping", "1.0"),
        ("optimizer.params.lr", "0.004"),
        ("optimizer.params.weight_decay", "0.1"),
        ("scheduler.params.warmup_max_lr", "0.004"),
        ("scheduler.params.warmup_num_steps", "20"),
        ("bf16.enabled", "true"),
    ];
    for (key, value) in expected {
        assert_eq!(row(key), [key, value, "given"]);
    }
    assert_eq!(metrics[0]["precision"], "bf16");
    assert_eq!(metrics[21]["lr"], as_read(0.004));
}

#[test]
fn without_optimizer_and_scheduler_the_run_keeps_its_own() {
    let folder = folder();
    write(&folder, &json!({ "train_batch_size": 8, "zero_optimization": { "stage": 1 } }));
    let file = ["--deepspeed-config", "ds_config.json"];
    let (with_file, _) = train(&folder, &file);
    let (native, _) = train(&folder, &["--stage", "1"]);
    let key =
        |metrics: &[Value], key: &str| metrics.iter().map(|record| record[key].clone()).collect::<Vec<_>>();
    for name in ["loss", "lr"] {
        assert_eq!(key(&with_file, name), key(&native, name));
    }
    // With an optimizer alone, the rate is its own and constant.
    write(
        &folder,
        &json!({ "train_batch_size": 8, "optimizer": { "type": "AdamW", "params": { "lr": 0.003 } } }),
    );
    let (metrics, _) = train(&folder, &file);
    assert_eq!(key(&metrics, "lr"), vec![as_read(0.003); 6]);
}

#[test]
fn every_optimizer_of_a_file_trains() {
    let folder = folder();
    let mut curves: Vec<Vec<f64>> = Vec::new();
    // Bytes of state per element.
    for (name, params, bytes) in [
        ("AdamW", json!({ "lr": 1e-3, "weight_decay": 0.1 }), 8),
        ("Adam", json!({ "lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": false }), 8),
        ("Lion", json!({ "lr": 1e-3, "weight_decay": 0.1 }), 4),
        ("Adagrad", json!({ "lr": 1e-2, "weight_decay": 0.1 }), 4),
        ("SGD", json!({ "lr": 0.1, "momentum": 0.9, "nesterov": true }), 4),
        ("SGD", json!({ "lr": 0.1 }), 0),
    ] {
        let optimizer = json!({ "type": name, "params": params });
        write(&folder, &json!({ "train_batch_size": 8, "optimizer": optimizer }));
        let (metrics, printed) = train(&folder, &["--deepspeed-config", "ds_config.json", "--ranks", "1"]);
        let found = losses(&metrics);
        assert!(found[5] < found[0], "{name}: {found:?}");
        let [parameters, state] =
            ["parameter_bytes", "optimizer_bytes"].map(|key| metrics[5][key].as_u64().unwrap());
        assert_eq!(state, parameters / 4 * bytes, "{name}");
        let row: Vec<_> = printed
            .lines()
            .find(|line| line.starts_with("optimizer  "))
            .unwrap()
            .split_whitespace()
            .collect();
        assert_eq!(row[1..3], row[3..5], "{name}: {printed}");
        assert!(curves.iter().all(|curve| *curve != found), "{name} does what another does");
        curves.push(found);
    }
}

#[test]
fn a_file_that_cannot_be_followed_is_refused_with_all_its_reasons() {
    let folder = folder();
    let mut file = typical("fp16");
    file["zero_optimization"]["offload_optimizer"] = json!({ "device": "tape" });
    file["amp"] = json!({ "enabled": true });
    file["scheduler"]["type"] = json!("Cosine");
    file["zero_optimisation"] = json!({});
    write(&folder, &file);
    for arguments in [&[][..], &["--processes"]] {
        let told = refused(&folder, arguments);
        for part in [
            "ds_config.json",
            "zero_optimization.offload_optimizer.device",
            "`amp.enabled` = true: ",
            "`scheduler.type` = \"Cosine\": ",
            "did you mean `zero_optimization`?",
        ] {
            assert!(told.contains(part), "{part} in {told}");
        }
        assert_eq!(told.lines().count(), 5, "{told}");
    }
    fs::write(folder.path().join("ds_config.json"), "{ // comment\n}").unwrap();
    assert!(refused(&folder, &[]).contains("comments and trailing commas"));
    fs::remove_file(folder.path().join("ds_config.json")).unwrap();
    assert!(refused(&folder, &[]).contains("cannot read ds_config.json"));
}

/// The settings of a run by `ds_config.json` and a `[zero]` section, on two ranks.
fn followed(folder: &TempDir, zero: &str, flags: &[&str]) -> anyhow::Result<Settings> {
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(folder.path().join("tiny.toml"), format!("{OPEN}[zero]\n{zero}\n")).unwrap();
    let (config, file) = (path("tiny.toml"), path("ds_config.json"));
    let all = [&["gpt", "--config", &config, "--deepspeed-config", &file], flags].concat();
    let settings = Settings::new(Flags::try_parse_from(all).unwrap())?;
    let (settings, _) = settings.deepspeed.as_ref().unwrap().follow(&settings, settings.world_size())?;
    Ok(settings)
}

#[test]
fn what_deepspeed_does_not_know_is_kept() {
    let folder = folder();
    write(&folder, &typical("bf16"));
    let zero = "reduce_gradients = \"at-step\"\nalignment = 8\nseed = 3\ndeadline_seconds = 7.0\ndevice_transport = false\n\
                offload = { buffer_bytes = 4194304, exact_steps = 2 }";
    let kept = followed(&folder, zero, &["--delayed-update"]).unwrap().zero;
    let offload = Offload {
        buffer_bytes: Bytes::new(4 << 20),
        exact_steps: 2,
        delayed_update: true,
        ..Offload::default()
    };
    assert_eq!(kept.offload, offload);
    assert_eq!(kept.reduce_gradients, Some(ReduceGradients::AtStep));
    assert_eq!((kept.alignment.get(), kept.seed, kept.deadline_seconds), (8, 3, 7.0));
    assert!(!kept.device_transport);
}

#[test]
fn a_setting_of_stage_three_does_not_go_with_a_file_of_another() {
    let folder = folder();
    write(&folder, &typical("bf16"));
    for key in ["persistence_threshold", "lookahead_bytes", "live_bytes", "reuse_bytes"] {
        let told = followed(&folder, &format!("{key} = 5"), &[]).unwrap_err().to_string();
        let words = format!("`zero.{key} = 5` in ");
        let why = "but the file makes it not set (zero_optimization.stage is not 3, where it has an effect)";
        assert!(told.contains(&words) && told.contains(why), "{told}");
        followed(&folder, &format!("{key} = 0"), &[]).unwrap();
    }
    let mut file = typical("bf16");
    file["zero_optimization"]["stage"] = json!(3);
    write(&folder, &file);
    let told = followed(&folder, "lookahead_bytes = 5", &[]).unwrap_err().to_string();
    assert!(told.contains("but the file makes it 100000000 (docs/deepspeed.md"), "{told}");
    followed(&folder, "lookahead_bytes = 100000000", &[]).unwrap();
}

#[test]
fn a_batch_that_nobody_says_has_the_default_rows_of_a_rank() {
    let folder = folder();
    let auto = json!({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto"
    });
    write(&folder, &auto);
    let batch = |flags: &[&str]| {
        let train = followed(&folder, "", flags).unwrap().train;
        (train.batch, train.accumulation)
    };
    assert_eq!(batch(&[]), (8, 1));
    // Eight rows cannot be dealt evenly to three ranks.
    assert_eq!(batch(&["--ranks", "3"]), (6, 1));
    assert_eq!(batch(&["--batch", "12", "--accumulation", "3"]), (12, 3));
}

#[test]
fn a_number_that_f32_cannot_hold_is_refused() {
    let folder = folder();
    for (key, name, value) in [
        ("eps", "epsilon", json!(1e-60)),
        ("betas", "beta2", json!([0.9, 0.9999999999])),
        ("weight_decay", "weight_decay", json!(1e40)),
    ] {
        let mut file = typical("bf16");
        file["optimizer"]["params"][key] = value;
        write(&folder, &file);
        let told = refused(&folder, &[]);
        assert!(told.contains(name) && told.contains("in f32"), "{told}");
    }
}

#[test]
fn what_contradicts_the_file_is_named_with_it() {
    let folder = folder();
    write(&folder, &typical("bf16"));
    let told = refused(
        &folder,
        &["--stage", "3", "--precision", "f16", "--batch", "6", "--accumulation", "1", "--lr", "0.1"],
    );
    for part in [
        "--stage 3, but the file makes it 2 (zero_optimization.stage)",
        "--precision f16, but the file makes it \"bf16\" (fp16.enabled and bf16.enabled)",
        "--batch 6, but the file makes it 8 (train_batch_size)",
        "--accumulation 1, but the file makes it 2 (gradient_accumulation_steps)",
        "--lr 0.1, but the file makes it 0.002 (scheduler.params.warmup_max_lr)",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert_eq!(told.lines().count(), 6, "{told}");

    let more = "warmup = 7\nweight_decay = 0.5\n[zero]\nclip_norm = 2.0\nseed = 3\n[zero.precision]\nreduce = \"f32\"\n";
    fs::write(folder.path().join("tiny.toml"), OPEN.to_owned() + more).unwrap();
    let told = refused(&folder, &[]);
    for part in [
        "`train.warmup = 7` in tiny.toml, but the file makes it 3 (scheduler.params.warmup_num_steps)",
        "`train.weight_decay = 0.5` in tiny.toml, but the file makes it 0.1 (optimizer.params.weight_decay)",
        "`zero.clip_norm = 2.0` in tiny.toml, but the file makes it 1.0 (gradient_clipping)",
        "`zero.precision.reduce = \"f32\"` in tiny.toml, but the file makes it not set",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert_eq!(told.lines().count(), 5, "{told}");

    // A place that the file does not say, and one that it says otherwise.
    fs::write(folder.path().join("tiny.toml"), OPEN).unwrap();
    let told = refused(&folder, &["--offload", "optimizer=nvme:/a", "--offload", "gradients=host"]);
    for part in [
        "--offload optimizer=nvme:/a, but the file makes it \"device\" (docs/deepspeed.md has its key)",
        "--offload gradients=host, but the file makes it \"device\" (docs/deepspeed.md has its key)",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    let mut file = typical("bf16");
    file["zero_optimization"]["stage"] = json!(3);
    file["zero_optimization"]["offload_optimizer"] = json!({ "device": "nvme", "nvme_path": "/b" });
    write(&folder, &file);
    let told = refused(&folder, &["--offload", "optimizer=nvme:/a", "--offload", "gradients=nvme:/b"]);
    let part = "--offload optimizer=nvme:/a, but the file makes it \"/b\" (docs/deepspeed.md has its key)";
    assert!(told.contains(part) && told.lines().count() == 2, "{told}");
    write(&folder, &typical("bf16"));

    // Not set here, set there.
    fs::write(folder.path().join("tiny.toml"), format!("{OPEN}[zero]\nclip_norm = 0\n")).unwrap();
    let told = refused(&folder, &[]);
    assert!(
        told.contains("`zero.clip_norm = 0` in tiny.toml, but the file makes it 1.0 (gradient_clipping)"),
        "{told}"
    );
    fs::write(folder.path().join("tiny.toml"), OPEN).unwrap();

    // What is not there to be divided is told with what was asked for.
    let mut file = typical("bf16");
    file["train_batch_size"] = json!("auto");
    write(&folder, &file);
    let told = refused(&folder, &["--batch", "6"]);
    assert!(
        told.contains("train_batch_size is 6") && told.ends_with("\n  beside the file: --batch 6\n"),
        "{told}"
    );

    // What agrees is fine.
    write(&folder, &typical("bf16"));
    let flags =
        ["--stage", "2", "--precision", "bf16", "--batch", "8", "--accumulation", "2", "--lr", "0.002"];
    let (metrics, _) = train(&folder, &[&flags[..], &["--deepspeed-config", "ds_config.json"]].concat());
    assert_eq!(metrics.len(), 6);
}
