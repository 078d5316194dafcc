//! The suite that trains: a few steps of the GPT example must succeed and report themselves.

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value};
use xshell::Shell;

use crate::tee;

const STEPS: usize = 3;

/// What each line of the metrics says in numbers.
const KEYS: [&str; 18] = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "loss_scale",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "gathered_peak_bytes",
    "gathered_bytes",
    "gather_seconds",
    "gather_exposed_seconds",
    "reduced_bytes",
    "reduce_seconds",
    "reduce_exposed_seconds",
    "lookahead_hits",
    "lookahead_misses",
];

pub(crate) fn run(sh: &Shell) -> anyhow::Result<()> {
    let folder = sh.create_temp_dir()?;
    let metrics = folder.path().join("metrics.jsonl");
    let steps = STEPS.to_string();
    let command = sh
        .cmd("cargo")
        .args(["run", "--release", "-p", "gpt", "--", "--steps", &steps, "--metrics"])
        .arg(&metrics);
    println!("    {command}");

    let outcome = tee::stream(command.into())?;
    ensure!(outcome.status.success(), "the job ended with {}", outcome.status);
    let metrics = sh.read_file(&metrics).context("the job wrote no metrics")?;
    check(&metrics, STEPS)
}

/// Checks that the metrics are one JSON object per step, in order, with a number for every key.
fn check(metrics: &str, steps: usize) -> anyhow::Result<()> {
    let lines: Vec<&str> = metrics.lines().collect();
    ensure!(lines.len() == steps, "{} lines of metrics for {steps} steps", lines.len());
    let mut last = None;
    for (index, line) in lines.iter().enumerate() {
        let number = index + 1;
        let object: Map<String, Value> =
            serde_json::from_str(line).with_context(|| format!("line {number} of the metrics"))?;
        for key in KEYS {
            match object.get(key) {
                Some(Value::Number(_)) => {}
                Some(other) => bail!("line {number} of the metrics: '{key}' is {other}, not a number"),
                None => bail!("line {number} of the metrics has no '{key}'"),
            }
        }
        let step = object["step"].as_u64();
        ensure!(step.is_some() && step > last, "line {number} of the metrics: steps do not count up");
        last = step;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{KEYS, check};

    fn line(step: usize) -> String {
        let fields = KEYS.map(|key| match key {
            "step" => format!("\"step\":{step}"),
            _ => format!("\"{key}\":0.5"),
        });
        format!("{{{}}}\n", fields.join(","))
    }

    fn error(metrics: &str) -> String {
        format!("{:#}", check(metrics, 2).unwrap_err())
    }

    #[test]
    fn one_complete_line_per_step_is_right() {
        check(&(line(1) + &line(2)), 2).unwrap();
        check(&(line(0) + &line(5)), 2).unwrap();
    }

    #[test]
    fn a_step_too_few_or_too_many_is_wrong() {
        assert_eq!(error(&line(1)), "1 lines of metrics for 2 steps");
        assert_eq!(error(&(line(1) + &line(2) + &line(3))), "3 lines of metrics for 2 steps");
        assert_eq!(error(""), "0 lines of metrics for 2 steps");
    }

    #[test]
    fn steps_count_up() {
        assert_eq!(error(&(line(2) + &line(2))), "line 2 of the metrics: steps do not count up");
    }

    #[test]
    fn every_key_is_there_and_a_number() {
        let second = line(2).replace("\"lr\":0.5", "\"lr\":null");
        assert_eq!(error(&(line(1) + &second)), "line 2 of the metrics: 'lr' is null, not a number");
        let second = line(2).replace("\"loss\"", "\"lost\"");
        assert_eq!(error(&(line(1) + &second)), "line 2 of the metrics has no 'loss'");
        assert!(error(&(line(1) + "no json")).starts_with("line 2 of the metrics: expected"));
    }
}
