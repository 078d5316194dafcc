//! The program `zero-ckpt`, as a shell would run it.

mod common;

use std::fs;
use std::process::{Command, Output};
use std::sync::Arc;

use common::{model, save};
use tempfile::TempDir;
use zero_checkpoint::{LocalStorage, Storage};
use zero_core::Stage;

struct Run {
    folder: TempDir,
}

impl Run {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path().join("run")));
        for step in 1..=3 {
            save(&storage, &model(step), step, Stage::Three, 2);
        }
        Self { folder }
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output: Output = Command::new(env!("CARGO_BIN_EXE_zero-ckpt"))
            .args(arguments)
            .current_dir(self.folder.path())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }
}

#[test]
fn inspect_tells_what_is_there_in_words_and_as_json() {
    let run = Run::new();
    let (code, text) = run.run(&["inspect", "run"]);
    assert_eq!(code, Some(0), "{text}");
    for part in [
        "run/step-0000000003\n",
        "step 3, stage 3, ranks: shard 2, format 1",
        "8 parameters, 240 elements",
        "model awkward 1",
        r#"group decay: {"lr":0.30000000000000004,"weight_decay":0.1}"#,
        "embedding.weight [19, 6] f32, also head.weight, group decay, 7 updates, first_moment f32, second_moment bf16",
        "frozen.weight [5, 7] f32, frozen\n",
        r#"data: {"epoch":3,"sample":4711}"#,
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let (code, text) = run.run(&["inspect", "run", "--step", "2", "--json"]);
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &manifest["step"]), (Some(0), &2.into()));
}

#[test]
fn verify_fails_with_the_place_of_the_damage() {
    let run = Run::new();
    let (code, text) = run.run(&["verify", "run/step-0000000002"]);
    assert!(code == Some(0) && text.contains("is what was saved: "), "{text}");
    let path = run.folder.path().join("run/step-0000000002/rank-00001-of-00002.safetensors");
    let mut content = fs::read(&path).unwrap();
    content[100] ^= 1;
    fs::write(path, content).unwrap();
    let (code, text) = run.run(&["verify", "run/step-0000000002"]);
    assert!(code == Some(1) && text.contains("rank-00001-of-00002.safetensors: the"), "{text}");
    let (code, text) = run.run(&["verify", "elsewhere"]);
    assert!(
        code == Some(2) && text.contains("error: there is no complete checkpoint in elsewhere"),
        "{text}"
    );
}

#[test]
fn consolidate_writes_weights_by_a_table_of_names() {
    let run = Run::new();
    fs::write(run.folder.path().join("names.json"), r#"{"wte.weight": "embedding.weight"}"#).unwrap();
    let (code, text) = run.run(&[
        "consolidate",
        "run",
        "weights",
        "--dtype",
        "bf16",
        "--names",
        "names.json",
        "--max-file",
        "200B",
    ]);
    assert_eq!(code, Some(0), "{text}");
    let index = fs::read_to_string(run.folder.path().join("weights/model.safetensors.index.json")).unwrap();
    assert!(index.contains("\"wte.weight\": \"model-00001-of-"), "{index}");
    let (code, text) = run.run(&["consolidate", "run", "weights"]);
    assert!(code == Some(2) && text.contains("weights is there already"), "{text}");
}

#[test]
fn diff_fails_where_checkpoints_differ() {
    let run = Run::new();
    let (first, second) = ("run/step-0000000001", "run/step-0000000002");
    let (code, text) = run.run(&["diff", first, first]);
    assert_eq!((code, text.as_str()), (Some(0), ""));
    let (code, text) = run.run(&["diff", first, second]);
    assert!(code == Some(1) && text.contains("step: 1 | 2"), "{text}");
    let (_, text) = run.run(&["diff", first, second, "--json"]);
    let changes: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert!(
        changes.iter().any(|change| change["kind"] == "elements" && change["different"] == 114),
        "{text}"
    );
}

#[test]
fn prune_keeps_the_newest() {
    let run = Run::new();
    let (code, text) = run.run(&["prune", "run", "--keep", "1", "--dry-run"]);
    assert_eq!((code, text.as_str()), (Some(0), "step 1 would be removed\nstep 2 would be removed\n"));
    let (code, text) = run.run(&["prune", "run", "--keep", "1", "--every", "2"]);
    assert_eq!((code, text.as_str()), (Some(0), "step 1 removed\n"));
    let (code, text) = run.run(&["prune", "rum", "--keep", "1"]);
    assert!(code == Some(2) && text.contains("there is no folder rum"), "{text}");
    let (_, text) = run.run(&["inspect", "run", "--step", "1"]);
    assert!(text.contains("no complete checkpoint of step 1 in run, but of 2, 3"), "{text}");
}

#[test]
fn whoever_reads_may_stop_and_a_full_disk_is_an_error() {
    let run = Run::new();
    for arguments in [&["inspect", "run"][..], &["verify", "run"], &["diff", "run/step-0000000001", "run"]] {
        let start = |output: std::process::Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_zero-ckpt"));
            let command = command.args(arguments).current_dir(run.folder.path()).stdout(output);
            let output = command.stderr(std::process::Stdio::piped()).spawn().unwrap().wait_with_output();
            let output = output.unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap())
        };
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(start(writer.into()), (Some(141), String::new()), "{arguments:?}");
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (code, told) = start(full.into());
        assert!(code == Some(2) && told.starts_with("error: No space left"), "{arguments:?}: {told}");
    }
}
