//! The binary as a user meets it.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use common::{folder, gpt, losses, train};

#[test]
fn a_run_ends_with_losses_a_sample_a_table_and_a_curve() {
    let folder = folder();
    let (metrics, printed) = train(&folder, &[]);
    assert_eq!(metrics.len(), 4);
    for (at, record) in metrics.iter().enumerate() {
        assert_eq!(record["step"], at + 1);
        for (key, value) in record.as_object().unwrap() {
            assert!(
                value.is_number() || ["precision", "skipped"].contains(&key.as_str()),
                "{key} in {record}"
            );
        }
        assert_eq!((&record["precision"], &record["skipped"]), (&Value::from("f32"), &Value::from(false)));
    }
    for part in ["bits per byte", "held out", "sample:", "measured", "stage 3*", "optimizer", "step 4/4"] {
        assert!(printed.contains(part), "{part} in {printed}");
    }
    let curve = fs::read_to_string(folder.path().join("gpt-loss.svg")).unwrap();
    assert!(curve.contains("<svg") && curve.contains("polyline"));
}

#[test]
fn ranks_stages_and_burn_alone_give_the_same_losses() {
    let folder = folder();
    let reference = losses(&train(&folder, &["--plain"]).0);
    for ranks in ["1", "2", "3", "7"] {
        for stage in ["0", "1", "2", "3"] {
            let run = losses(&train(&folder, &["--ranks", ranks, "--stage", stage]).0);
            assert_eq!(run.len(), 4);
            for (loss, expected) in run.iter().zip(&reference) {
                assert!(
                    (loss - expected).abs() < 1e-4 * expected,
                    "{run:?} and {reference:?}, {ranks} ranks"
                );
            }
        }
    }
}

#[test]
fn a_step_of_several_backwards_is_one_of_all_their_rows() {
    let folder = folder();
    let reference = losses(&train(&folder, &["--plain"]).0);
    // Of the five rows, rank 0 has three and rank 1 two: some backwards have one more than others, or none.
    for (stage, accumulation) in [("0", "2"), ("1", "3"), ("2", "2"), ("3", "4")] {
        let (metrics, printed) = train(&folder, &["--stage", stage, "--accumulation", accumulation]);
        assert!(printed.contains(&format!("backwards per step: {accumulation}")), "{printed}");
        for (loss, expected) in losses(&metrics).iter().zip(&reference) {
            assert!((loss - expected).abs() < 1e-4 * expected, "{metrics:?} and {reference:?}");
        }
    }
}

#[test]
fn burn_alone_has_no_numbers_of_the_engine() {
    let folder = folder();
    let (metrics, _) = train(&folder, &["--plain"]);
    for record in &metrics {
        assert!(record["loss"].is_number() && record["gathered_bytes"].is_null(), "{record}");
        assert!(record["loss_scale"].is_null() && record["skipped"] == false, "{record}");
    }
    assert_eq!(metrics.len(), 4);
}

#[test]
fn state_on_a_disk_changes_no_loss_and_leaves_nothing_behind() {
    let folder = folder();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let on_disk = |what: &str| format!("{what}=nvme:{}", disk.display());
    let places = ["optimizer", "gradients", "parameters"].map(on_disk);
    let places = places.each_ref().map(String::as_str);
    for (stage, precision) in [("0", "f32"), ("2", "f32"), ("3", "f32"), ("3", "bf16")] {
        let plain = ["--stage", stage, "--precision", precision];
        let reference = losses(&train(&folder, &plain).0);
        let with = |places: &[&str]| {
            let offload = places.iter().flat_map(|place| ["--offload", place]);
            train(&folder, &plain.into_iter().chain(offload).collect::<Vec<_>>()).0
        };
        assert_eq!(losses(&with(&["optimizer=host"])), reference, "stage {stage}");
        let places = match (stage, precision) {
            ("0", _) => &places[..1],
            (_, "f32") => &places[..2],
            _ => &places,
        };
        let metrics = with(places);
        assert_eq!(losses(&metrics), reference, "stage {stage} in {precision}");
        assert!(metrics.iter().all(|record| record["offloaded_bytes"].as_u64() > Some(0)));
        assert!(metrics.iter().all(|record| record["optimizer_bytes"].as_u64() == Some(0)));
        assert_eq!(fs::read_dir(&disk).unwrap().count(), 0);
    }
    let auto = format!("optimizer=auto:{}", disk.display());
    let (_, printed) = train(&folder, &["--offload", &auto]);
    assert!(printed.contains("optimizer") && printed.contains("device"), "{printed}");
}

#[test]
fn the_seed_alone_decides() {
    let folder = folder();
    let run = |seed| losses(&train(&folder, &["--seed", seed]).0);
    assert_eq!(run("3"), run("3"));
    assert_ne!(run("3"), run("4"));
}

#[test]
fn a_clip_norm_of_zero_trains_without_clipping() {
    let folder = folder();
    let tiny = fs::read_to_string(folder.path().join("tiny.toml")).unwrap();
    let run = |norm: &str, flags: &[&str]| {
        fs::write(folder.path().join("tiny.toml"), format!("{tiny}[zero]\nclip_norm = {norm}\n")).unwrap();
        losses(&train(&folder, flags).0)
    };
    for flags in [&["--stage", "2"][..], &["--plain"]] {
        let free = run("0", flags);
        assert_eq!(free, run("1e30", flags));
        assert_ne!(free, run("1e-9", flags));
    }
}

#[test]
fn flags_win_over_the_file() {
    let folder = folder();
    assert_eq!(train(&folder, &["--steps", "2"]).0.len(), 2);
}

#[test]
fn what_cannot_work_is_one_clear_line() {
    let folder = folder();
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join("short.txt"), "short").unwrap();
    let files = [
        ("key.toml", "[train]\nstep = 3\n"),
        ("section.toml", "[zeros]\nstage = 3\n"),
        ("zero.toml", "[zero]\nstage = 5\n"),
        ("type.toml", "[model]\ndim = \"wide\"\n"),
        ("huge.toml", "[model]\ndim = 4000000000\n"),
        ("heads.toml", "[model]\ndim = 10\nheads = 3\n"),
        ("syntax.toml", "[model\n"),
        ("reduce.toml", "[zero.precision]\nreduce = \"bf16\"\n"),
        ("state.toml", "[zero.precision]\noptimizer_state = \"bf16\"\n"),
        ("scale.toml", "[zero.loss_scale]\nmode = \"static\"\nscale = 8.0\n"),
        ("decay.toml", "[train]\nweight_decay = 1e39\n"),
    ];
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let cases: [(&[&str], &str); 36] = [
        (&["--config", "missing.toml"], "missing.toml"),
        (&["--config", "key.toml"], "did you mean `steps`?"),
        (&["--config", "section.toml"], "did you mean `zero`?"),
        (&["--config", "zero.toml"], "stage"),
        (&["--config", "type.toml"], "type.toml"),
        (&["--config", "heads.toml"], "heads"),
        (&["--config", "huge.toml"], "parameters"),
        (&["--config", "syntax.toml"], "syntax.toml"),
        (&["--corpus", "missing"], "missing"),
        (&["--corpus", "empty"], "no text files"),
        (&["--corpus", "short.txt"], "too short"),
        (&["--ranks", "0"], "ranks"),
        (&["--steps", "0"], "steps"),
        (&["--steps", "18446744073709551615"], "steps"),
        (&["--ranks", "40000"], "ranks"),
        (&["--corpus", "text.txt", "--metrics", "./text.txt"], "overwrite"),
        (&["--stage", "4"], "stage"),
        (&["--ranks"], "ranks"),
        (&["--plain", "--stage", "1"], "--plain"),
        (&["--metrics", "nowhere/metrics.jsonl"], "nowhere"),
        (&["--trace", "nowhere/trace.json"], "nowhere"),
        (&["--trace", "empty"], "folder"),
        (&["--corpus", "text.txt", "--trace", "text.txt"], "overwrite"),
        (&["--trace", "same.json", "--metrics", "same.json"], "one file"),
        (&["--plain", "--trace", "trace.json"], "--plain"),
        (&["--plain", "--precision", "bf16"], "bf16"),
        (&["--plain", "--accumulation", "2"], "train.accumulation"),
        (&["--precision", "f64"], "f64"),
        (&["--accumulation", "0"], "accumulation"),
        (&["--lr", "nan"], "train.lr"),
        (&["--batch", "1000001"], "train.batch"),
        (&["--plain", "--config", "reduce.toml"], "zero.precision.reduce"),
        (&["--plain", "--config", "state.toml"], "zero.precision.optimizer_state"),
        (&["--plain", "--config", "scale.toml"], "zero.loss_scale"),
        (&["--plain", "--config", "decay.toml", "--corpus", "text.txt"], "weight_decay is 1"),
        (&["--config", "decay.toml", "--corpus", "text.txt"], "weight_decay is 1"),
    ];
    for (arguments, expected) in cases {
        let output = gpt(folder.path(), arguments);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{arguments:?}");
        assert!(told.contains(expected), "{arguments:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{arguments:?}: {told}");
        assert!(told.starts_with("error: "), "{arguments:?}: {told}");
    }
}

#[test]
fn processes_train_as_threads_do() {
    let folder = folder();
    for ranks in ["1", "2", "3"] {
        let (threads, _) = train(&folder, &["--ranks", ranks]);
        let (processes, printed) = train(&folder, &["--ranks", ranks, "--processes"]);
        // To the last bit: the sums are taken in the same order.
        for key in ["loss", "grad_norm"] {
            let of = |metrics: &[Value]| metrics.iter().map(|record| record[key].clone()).collect::<Vec<_>>();
            assert_eq!(of(&threads), of(&processes), "{key} on {ranks} ranks");
        }
        assert_eq!(printed.matches("held out\n").count(), 2, "{printed}");
    }
}

#[test]
fn another_number_of_ranks_than_the_launcher_s_is_refused() {
    let folder = folder();
    let output = Command::new(env!("CARGO_BIN_EXE_gpt"))
        .args(["--config", "tiny.toml", "--corpus", "text.txt", "--ranks", "3"])
        .current_dir(folder.path())
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("ZERO_RENDEZVOUS", "127.0.0.1:1")])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && told.contains("--ranks says 3, but the launcher started 2"),
        "{told}"
    );
}

/// The process of a rank of the job that `launcher` runs.
#[cfg(target_os = "linux")]
fn process_of_rank(launcher: u32, rank: usize) -> Option<String> {
    let has_rank = |folder: &Path| {
        let environment = fs::read(folder.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == format!("RANK={rank}").as_bytes())
    };
    let parent = |folder: &Path| {
        let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
        status.lines().any(|line| line == format!("PPid:\t{launcher}"))
    };
    fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()).find_map(|folder| {
        (parent(&folder) && has_rank(&folder))
            .then(|| folder.file_name().unwrap().to_str().unwrap().to_owned())
    })
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_ends_the_job_with_one_clear_report() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::Stdio;

    let folder = folder();
    let mut job = Command::new(env!("CARGO_BIN_EXE_gpt"))
        .args(["--config", "tiny.toml", "--corpus", "text.txt", "--ranks", "3", "--processes"])
        .args(["--steps", "1000000"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("step 1/")), "it never trained");
    let rank = process_of_rank(job.id(), 1).expect("rank 1 runs");
    assert!(Command::new("kill").args(["-KILL", &rank]).status().unwrap().success());
    let mut told = String::new();
    job.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(job.wait().unwrap().code(), Some(128 + 9), "{told}");
    assert!(told.contains("rank 1 failed first: killed by SIGKILL"), "{told}");
    assert!(told.contains("rank 0: stopped because of rank 1"), "{told}");
    assert!(!Path::new("/proc").join(&rank).exists());
}
