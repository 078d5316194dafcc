//! The suite that trains: a few steps of the GPT example must succeed and report themselves.

use anyhow::{Context, ensure};
use serde::Deserialize;
use xshell::Shell;

use crate::tee;

const STEPS: usize = 3;

pub(crate) fn run(sh: &Shell) -> anyhow::Result<()> {
    train(sh, &[], &[])
}

/// With more arguments for cargo, and for the example.
pub(crate) fn train(sh: &Shell, cargo: &[&str], example: &[&str]) -> anyhow::Result<()> {
    let folder = sh.create_temp_dir()?;
    let metrics = folder.path().join("metrics.jsonl");
    let steps = STEPS.to_string();
    let command = sh
        .cmd("cargo")
        .args(["run", "--release", "-p", "gpt"])
        .args(cargo)
        .args(["--", "--steps", &steps])
        .args(example)
        .arg("--metrics")
        .arg(&metrics);
    println!("    {command}");

    let outcome = tee::stream(command.into())?;
    ensure!(outcome.status.success(), "the job ended with {}", outcome.status);
    let metrics = sh.read_file(&metrics).context("the job wrote no metrics")?;
    check(&metrics, STEPS)
}

/// Checks that the metrics are one JSON object per step, in order, with a loss.
fn check(metrics: &str, steps: usize) -> anyhow::Result<()> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
        /// A number that is not finite is null.
        loss: f64,
    }
    let lines: Vec<&str> = metrics.lines().collect();
    ensure!(lines.len() == steps, "{} lines of metrics for {steps} steps", lines.len());
    let mut last = None;
    for (index, line) in lines.iter().enumerate() {
        let number = index + 1;
        let Line { step, loss } =
            serde_json::from_str(line).with_context(|| format!("line {number} of the metrics"))?;
        ensure!(loss.is_finite(), "line {number} of the metrics: the loss is {loss}");
        ensure!(Some(step) > last, "line {number} of the metrics: steps do not count up");
        last = Some(step);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    fn line(step: usize) -> String {
        format!("{{\"step\":{step},\"loss\":0.5,\"lr\":null}}\n")
    }

    fn error(metrics: &str) -> String {
        format!("{:#}", check(metrics, 2).unwrap_err())
    }

    #[test]
    fn one_line_per_step_is_right() {
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
    fn every_line_has_a_loss() {
        for (from, to, expected) in [
            ("0.5", "null", "line 2 of the metrics: invalid type: null, expected f64"),
            ("\"loss\"", "\"lost\"", "line 2 of the metrics: missing field `loss`"),
        ] {
            let message = error(&(line(1) + &line(2).replace(from, to)));
            assert!(message.starts_with(expected), "{message}");
        }
        assert!(error(&(line(1) + "no json")).starts_with("line 2 of the metrics: expected"));
    }
}
