//! What the package `safetensors` of Python reads; `PYTHON` names the Python that has it.

mod common;

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use common::{Whole, model, save};
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, ConsolidateOptions, LocalStorage, Storage, WeightLayout, consolidate, transpose,
};
use zero_core::{Bytes, Stage};

/// Prints each array of `weights` as its name, shape and bytes.
const PRINT: &str = r#"
for name, array in weights.items():
    print(name, "x".join(map(str, array.shape)) or "scalar", array.astype("<f4").tobytes().hex() or "none")
"#;

/// Runs a program that makes `weights`; gives what that holds.
fn python(program: &str) -> BTreeMap<String, (String, String)> {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let output = Command::new(python).args(["-c", &format!("{program}{PRINT}")]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].to_owned(), (words[1].to_owned(), words[2].to_owned()))
    };
    text.lines().map(line).collect()
}

/// An array as [`PRINT`] prints it.
fn printed(shape: &[usize], values: &[f32]) -> (String, String) {
    let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
    let shape = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
    let hex: String =
        values.iter().flat_map(|value| value.to_le_bytes()).map(|byte| format!("{byte:02x}")).collect();
    (or(shape, "scalar"), or(hex, "none"))
}

fn saved(folder: &TempDir, model: &[Whole]) -> Checkpoint {
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    save(&storage, model, 1000, Stage::Two, 3);
    Checkpoint::open_latest(storage).unwrap()
}

#[test]
#[ignore = "needs Python with numpy and safetensors"]
fn the_program_in_the_documentation_reads_a_checkpoint() {
    let page = include_str!("../../docs/checkpoint-format.md");
    let program = page.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let folder = TempDir::new().unwrap();
    let model = model(1);
    drop(saved(&folder, &model));
    let here = folder.path().display().to_string();
    let weights = python(&program.replace("checkpoints/step-0000001000", &format!("{here}/step-0000001000")));
    assert_eq!(weights.len(), model.len());
    for whole in &model {
        assert_eq!(
            weights[&whole.spec.name],
            printed(&whole.spec.shape, &whole.values),
            "{}",
            whole.spec.name
        );
    }
}

#[test]
#[ignore = "needs Python with numpy and safetensors"]
fn consolidated_weights_are_what_pytorch_would_have() {
    let folder = TempDir::new().unwrap();
    let model = model(2);
    let to = folder.path().join("weights");
    let options = ConsolidateOptions { max_file: Bytes::new(400), ..ConsolidateOptions::default() };
    consolidate(&saved(&folder, &model), &to, &options, &mut |_| ()).unwrap();
    let weights = python(&format!(
        r#"
import json
from safetensors.numpy import load_file

folder = "{}"
index = json.load(open(f"{{folder}}/model.safetensors.index.json"))
weights = {{}}
for name in sorted(set(index["weight_map"].values())):
    weights |= load_file(f"{{folder}}/{{name}}")
assert set(weights) == set(index["weight_map"])
assert sum(array.nbytes for array in weights.values()) == index["metadata"]["total_size"]
"#,
        to.display()
    ));
    for whole in &model {
        let (mut shape, mut values) = (whole.spec.shape.clone(), whole.values.clone());
        if let (WeightLayout::InOut, &[ins, outs]) = (whole.layout, &whole.spec.shape[..]) {
            values = transpose(&values, ins, outs).unwrap();
            shape.reverse();
        }
        assert_eq!(weights[&whole.spec.name], printed(&shape, &values), "{}", whole.spec.name);
    }
}
