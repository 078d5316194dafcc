//! What tests of the binary share.

// Each test binary compiles its own copy of this module and uses a part of it.
#![allow(dead_code)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// A model and a training of moments.
const TINY: &str = "[model]\ncontext = 16\ndim = 16\nheads = 2\nlayers = 2\n\
                    [train]\nbatch = 5\nsteps = 4\nwarmup = 1\nsample = 12\nheld_out_rows = 5\n";

pub(crate) fn gpt(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpt"))
        .args(arguments)
        .current_dir(folder)
        .output()
        .expect("the binary was built")
}

pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("tiny.toml"), TINY).unwrap();
    let text: String =
        (0..400).map(|line| format!("line {line} of a text about {}\n", line * line)).collect();
    fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

/// Adds to the settings of the test's folder.
pub(crate) fn configure(folder: &TempDir, more: &str) {
    let path = folder.path().join("tiny.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, text + more).unwrap();
}

/// Runs with metrics, and gives them with what was printed.
pub(crate) fn train(folder: &TempDir, arguments: &[&str]) -> (Vec<Value>, String) {
    let mut all = vec!["--config", "tiny.toml", "--corpus", "text.txt", "--metrics", "metrics.jsonl"];
    all.extend(arguments);
    let output = gpt(folder.path(), &all);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{all:?}: {printed}{}", String::from_utf8_lossy(&output.stderr));
    let metrics = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    (metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), printed)
}

pub(crate) fn losses(metrics: &[Value]) -> Vec<f64> {
    metrics.iter().map(|record| record["loss"].as_f64().unwrap()).collect()
}
