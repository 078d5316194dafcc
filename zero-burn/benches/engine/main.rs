//! What the engine costs: tokens per second against plain Burn, with ranks as threads and as processes, and how much of
//! the communication compute hides; and what an update takes.
//!
//! The contenders take turns within each round, so that whatever else the machine does hits all of them; a ratio is
//! the median of the rounds' ratios. `--only threads`, `overlap`, `update` or `processes` measures one part. PyTorch is looked for
//! by the variable `TORCHRUN`, and else on the search path.

mod contender;
mod overlap;
mod processes;
mod update;

use std::error::Error;
use std::path::PathBuf;

use burn::tensor::Device;
use contender::{ROWS, plain, sharded};
use gpt::GptConfig;
use serde_json::{Value, json};
use zero_burn::{LocalWorld, WorldSize, ZeroConfig};

const ROUNDS: usize = 7;
const STEPS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let config = GptConfig::default();
    let arguments: Vec<String> = std::env::args().collect();
    if processes::child(&config, &arguments)? {
        return Ok(());
    }
    let option = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let wants = |part: &str| option("--only").is_none_or(|only| only == part);
    let mut rows = Vec::new();
    if wants("threads") {
        rows.extend(threads(&config));
    }
    if wants("overlap") {
        rows.extend(overlap::rows(&config));
    }
    if wants("update") {
        rows.extend(update::rows()?);
    }
    if wants("processes") {
        rows.extend(processes::rows(&config)?);
    }
    let rows = Value::Array(rows);
    match option("--rows").map(PathBuf::from) {
        Some(path) => std::fs::write(&path, rows.to_string())
            .map_err(|error| format!("cannot write the rows to {}: {error}", path.display()).into()),
        None => {
            println!("{rows:#}");
            Ok(())
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Stage 3 on one rank and on two with the same batch, against plain Burn, in one process.
fn threads(config: &GptConfig) -> Vec<Value> {
    let tokens = (ROWS * config.context) as f64;
    let mut runs: [Vec<f64>; 3] = Default::default();
    for round in 0..ROUNDS {
        // Another one begins each time.
        for turn in 0..runs.len() {
            let at = (round + turn) % runs.len();
            let seconds = match WorldSize::new(at) {
                None => plain(config, STEPS, 0..ROWS, &|| ()).median(),
                Some(world) => {
                    let runs = LocalWorld::new(world)
                        .run(|comm| sharded(config, &ZeroConfig::default(), Device::default(), STEPS, &comm))
                        .unwrap_or_else(|error| panic!("{error}"));
                    runs[0].median()
                }
            };
            runs[at].push(tokens / seconds);
        }
        eprintln!("round {} of {ROUNDS}: {:.0?} tokens/s", round + 1, runs.each_ref().map(|run| run[round]));
    }
    let ratio = |at: usize| median(runs[at].iter().zip(&runs[0]).map(|(run, plain)| run / plain).collect());
    let speed = |name: &str, at: usize| json!({"name": name, "value": median(runs[at].clone()), "unit": "tokens/s", "bar": null, "pass": null});
    let against_plain = |name: &str, at: usize, bar: f64| json!({"name": name, "value": ratio(at), "unit": "x plain Burn", "bar": bar, "pass": ratio(at) >= bar});
    vec![
        speed("plain Burn", 0),
        speed("stage 3, 1 rank", 1),
        speed("stage 3, 2 in-process ranks", 2),
        against_plain("stage 3, 1 rank, against plain", 1, 0.95),
        against_plain("stage 3, 2 in-process ranks, against plain", 2, 0.90),
    ]
}
