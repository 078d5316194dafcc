//! A run that ends and is taken up again is the run that was not interrupted.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{folder, gpt, losses, train};

fn steps(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder.join("checkpoints")).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Removes the checkpoints of all steps but the first so many.
fn forget(folder: &Path, kept: usize) {
    for name in steps(folder).into_iter().skip(kept) {
        fs::remove_dir_all(folder.join("checkpoints").join(name)).unwrap();
    }
}

#[test]
fn a_resumed_run_is_the_one_that_was_not_interrupted() {
    for flags in [
        &["--ranks", "3", "--stage", "3"][..],
        &["--ranks", "2", "--stage", "2", "--precision", "f16", "--accumulation", "2"],
        &["--ranks", "2", "--stage", "3", "--precision", "bf16", "--processes"],
    ] {
        let folder = folder();
        let with = |more: &[&str]| train(&folder, &[flags, more].concat());
        let checkpoints =
            ["--steps", "6", "--checkpoint-dir", "checkpoints", "--save-every", "2", "--resume"];
        let (whole, _) = with(&checkpoints);
        forget(folder.path(), 1);
        let (resumed, printed) = with(&[&checkpoints[..], &["--keep", "2"]].concat());
        assert!(printed.contains("resuming after step 2 from checkpoints"), "{printed}");
        assert_eq!(losses(&resumed), losses(&whole), "{flags:?}");
        assert_eq!(resumed.len(), 6, "the metrics have each step once");
        assert_eq!(steps(folder.path()).len(), 2, "{:?}", steps(folder.path()));
    }
}

#[test]
fn other_ranks_stages_and_places_take_up_a_run() {
    let folder = folder();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let checkpoints = ["--steps", "6", "--checkpoint-dir", "checkpoints", "--save-every", "1", "--resume"];
    let with = |flags: &[&str]| train(&folder, &[&checkpoints[..], flags].concat());
    let whole = losses(&with(&["--ranks", "2", "--stage", "3"]).0);
    let place = format!("optimizer=nvme:{}", disk.display());
    for (ranks, stage, kept) in [("4", "1", 4), ("1", "0", 3), ("3", "2", 2), ("2", "3", 1)] {
        forget(folder.path(), kept);
        let (metrics, printed) = with(&["--ranks", ranks, "--stage", stage, "--offload", &place]);
        assert!(printed.contains(&format!("resuming after step {kept} from")), "{printed}");
        for (loss, expected) in losses(&metrics).iter().zip(&whole) {
            assert!((loss - expected).abs() < 1e-4, "{loss} and {expected} on {ranks} ranks at {stage}");
        }
    }
}

#[test]
fn a_run_that_is_killed_goes_on_from_its_newest_checkpoint() {
    let folder = folder();
    let whole = losses(&train(&folder, &["--steps", "40"]).0);
    let arguments = "--config tiny.toml --corpus text.txt --metrics metrics.jsonl --steps 40 --checkpoint-dir checkpoints \
                     --save-every 1 --keep 3 --resume";
    let arguments: Vec<_> = arguments.split(' ').collect();
    for _ in 0..3 {
        let mut run = Command::new(env!("CARGO_BIN_EXE_gpt"))
            .args(&arguments)
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (begin, before) = (Instant::now(), newest(folder.path()));
        while newest(folder.path()) == before && run.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(5));
        }
        run.kill().unwrap();
        run.wait().unwrap();
    }
    let (metrics, printed) = train(&folder, &arguments[6..]);
    assert!(printed.contains("resuming after step "), "{printed}");
    assert_eq!(losses(&metrics), whole);
    assert_eq!(steps(folder.path()).len(), 3, "what was left half done is swept: {:?}", steps(folder.path()));
}

fn newest(folder: &Path) -> Option<String> {
    let names = fs::read_dir(folder.join("checkpoints")).ok()?;
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with("step-")).max()
}

#[test]
fn what_cannot_be_resumed_says_so() {
    let folder = folder();
    let (_, printed) = train(&folder, &["--steps", "1", "--checkpoint-dir", "checkpoints", "--resume"]);
    assert!(printed.contains("no checkpoint in checkpoints: training from the beginning"), "{printed}");
    let refused = |arguments: &[&str]| {
        let all = [&["--config", "tiny.toml", "--corpus", "text.txt"], arguments].concat();
        let output = gpt(folder.path(), &all);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--resume"]).contains("--checkpoint-dir"));
    assert!(refused(&["--plain", "--checkpoint-dir", "x"]).contains("--plain"));
    let path = folder.path().join("tiny.toml");
    let tiny = fs::read_to_string(&path).unwrap();
    fs::write(&path, tiny.replace("dim = 16", "dim = 32")).unwrap();
    let told = refused(&["--checkpoint-dir", "checkpoints", "--resume"]);
    assert!(told.contains("shape [256, 16] in the checkpoint, [256, 32] in the model"), "{told}");
    fs::write(&path, &tiny).unwrap();
    let told = refused(&["--checkpoint-dir", "checkpoints"]);
    assert!(told.contains("has a checkpoint of step 1 of another run"), "{told}");
    let told = refused(&["--checkpoint-dir", "text.txt"]);
    assert!(told.contains("cannot write checkpoints to text.txt"), "{told}");
    let told = refused(&["--checkpoint-dir", "checkpoints", "--resume=7"]);
    assert!(told.contains("step 7"), "{told}");
    // The same shapes, but another model.
    fs::write(&path, tiny.replace("heads = 2", "heads = 4")).unwrap();
    let told = refused(&["--checkpoint-dir", "checkpoints", "--resume"]);
    assert!(told.contains("is of the model") && told.contains("write that into [model]"), "{told}");
    fs::write(&path, &tiny).unwrap();
    let (_, printed) =
        train(&folder, &["--checkpoint-dir", "checkpoints", "--resume=1", "--steps", "2", "--lr", "0.5"]);
    assert!(printed.contains("changed since then: train.lr was 0.001, is 0.5"), "{printed}");
    fs::remove_dir_all(folder.path().join("checkpoints/step-0000000002")).unwrap();
    // Nothing is left to train: it evaluates, and saves nothing anew.
    let (metrics, _) = train(&folder, &["--steps", "1", "--checkpoint-dir", "checkpoints", "--resume"]);
    assert_eq!(metrics.len(), 1);
}
