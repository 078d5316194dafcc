//! Training in 16 bits.

mod common;

use std::fs;

use serde_json::Value;

use common::{configure, folder, gpt, losses, train};

/// How far losses in 16 bits may be from those in f32, as a part of them. bf16, the coarser of the two, rounds to one
/// part in 256, and the mean over rows evens that out.
const BOUND: f64 = 2e-3;

#[test]
fn losses_in_16_bits_are_close_to_those_in_f32() {
    let folder = folder();
    // f16 scales its losses by 1024, so that no step is skipped while a scale is looked for.
    configure(&folder, "[zero.loss_scale]\nmode = \"static\"\nscale = 1024.0\n");
    for stage in ["0", "2", "3"] {
        let reference = losses(&train(&folder, &["--stage", stage, "--precision", "f32"]).0);
        for precision in ["bf16", "f16"] {
            let (metrics, printed) = train(&folder, &["--stage", stage, "--precision", precision]);
            assert!(printed.contains(&format!("ranks in {precision}")), "{printed}");
            assert!(
                metrics.iter().all(|record| record["precision"] == precision && record["skipped"] == false)
            );
            let found = losses(&metrics);
            assert_eq!(found.len(), reference.len());
            for (loss, expected) in found.iter().zip(&reference) {
                let difference = (loss - expected).abs() / expected;
                assert!(difference < BOUND, "{precision} at stage {stage}: {found:?} and {reference:?}");
            }
            assert_ne!(found, reference, "{precision} at stage {stage} computes in f32");
        }
    }
}

#[test]
fn parameters_and_gradients_of_16_bits_travel_as_such() {
    let folder = folder();
    configure(&folder, "[zero]\npersistence_threshold = 0\noverlap = false\n");
    let bytes = |precision: &str, key: &str| {
        let (metrics, _) = train(&folder, &["--precision", precision]);
        metrics.iter().map(|record| record[key].as_u64().unwrap()).sum::<u64>()
    };
    for key in ["gathered_bytes", "reduced_bytes"] {
        let whole = bytes("f32", key);
        assert!(whole > 0);
        assert_eq!(2 * bytes("bf16", key), whole, "{key}");
    }
}

#[test]
fn a_step_that_overflows_is_skipped_and_told() {
    let folder = folder();
    configure(&folder, "[zero.loss_scale]\nmode = \"static\"\nscale = 1e30\n");
    let arguments = ["--precision", "f16", "--config", "tiny.toml", "--corpus", "text.txt"];
    let output = gpt(folder.path(), &[&arguments[..], &["--metrics", "metrics.jsonl"]].concat());
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    let skips: Vec<_> = printed.lines().filter(|line| line.contains("skipped")).collect();
    assert_eq!(skips.len(), 4, "{printed}");
    for skip in skips {
        // The last gradient is the first of backward.
        assert!(skip.contains("the gradient of `head.weight` on rank "), "{skip}");
        assert!(skip.ends_with("with a loss scale of 1000000000000000000000000000000"), "{skip}");
    }
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let metrics = fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let metrics: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(metrics.len(), 4);
    for record in &metrics {
        assert_eq!((&record["skipped"], &record["loss_scale"]), (&Value::from(true), &Value::from(1e30)));
        // A skipped step is none for the learning rate.
        assert_eq!(record["lr"], metrics[0]["lr"]);
    }
}
