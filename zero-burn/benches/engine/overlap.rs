//! How much of the communication compute hides, on links that are as slow as compute.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use gpt::GptConfig;
use serde_json::{Value, json};
use zero_burn::{Bytes, Communicator, DType, LocalWorld, Precision, Stage, WorldSize, ZeroConfig, ZeroError};
use zero_comm::{Link, Throttled};

use crate::contender::{Times, sharded};
use crate::median;

const ROUNDS: usize = 3;
const STEPS: usize = 4;

/// Two ranks whose links carry `bytes_per_second`; the slowest rank's times.
fn run(config: &GptConfig, zero: &ZeroConfig, link: Option<Link>) -> Times {
    let world = WorldSize::new(2).expect("there are ranks");
    let runs = LocalWorld::new(world).run(|comm| -> Result<Times, ZeroError> {
        let comm = match link {
            Some(link) => Arc::new(Throttled::new(comm, link)) as Arc<dyn Communicator>,
            None => comm,
        };
        sharded(config, zero, Device::default(), STEPS, &comm)
    });
    let runs = runs.unwrap_or_else(|error| panic!("{error}"));
    runs.into_iter().max_by(|a, b| a.median().total_cmp(&b.median())).unwrap_or_default()
}

/// What is measured, and the least that has to be hidden.
fn cases() -> [(&'static str, ZeroConfig, Option<f64>); 3] {
    let config = |stage| ZeroConfig {
        stage,
        // Small, so that little is left to wait for when backward ends.
        bucket_bytes: Bytes::new(256 << 10),
        // Far less than the model, so that each pass gathers.
        lookahead_bytes: if stage == Stage::Three { Bytes::new(4 << 20) } else { Bytes::ZERO },
        ..ZeroConfig::default()
    };
    let precision = Precision { compute: DType::BF16, reduce: Some(DType::F32), ..Precision::default() };
    [
        // The gather is half of the transfers, and can hide behind the forward pass alone, which is a quarter of the
        // compute: little more than three quarters can be hidden.
        ("stage 2, f32", config(Stage::Two), None),
        ("stage 2, bf16 parameters", ZeroConfig { precision, ..config(Stage::Two) }, Some(0.85)),
        ("stage 3, f32", config(Stage::Three), Some(0.85)),
    ]
}

/// Rows of the stages whose communication runs beside compute.
pub(crate) fn rows(config: &GptConfig) -> Vec<Value> {
    let mut rows = Vec::new();
    for (name, zero, bar) in cases() {
        let (mut hidden, mut exposed) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = run(config, &zero, None);
            let compute = free.median();
            let moved = free.statistics.last().map_or(0, |step| step.gathered.get() + step.reduced.get());
            // Transfers of a step take as long as its compute.
            let link = Link::new(Duration::from_micros(50), moved as f64 / compute).expect("something moves");
            let slow = run(config, &zero, Some(link));
            // Without any overlap a step would take twice as long.
            let transfers = compute;
            hidden.push((compute + transfers - slow.median()) / transfers.min(compute));
            let waits = slow.statistics.iter().skip(2).map(|step| step.exposed().as_secs_f64());
            exposed.push(median(waits.collect()) / compute);
            eprintln!(
                "{name}, round {} of {ROUNDS}: {compute:.3} s, with transfers of {transfers:.3} s {:.3} s; {:?}",
                round + 1,
                slow.median(),
                slow.statistics.last()
            );
        }
        let hidden = median(hidden);
        rows.push(json!({
            "name": format!("{name}, transfers as long as compute, hidden"), "value": hidden, "unit": "share",
            "bar": bar, "pass": bar.map(|bar| hidden >= bar),
        }));
        rows.push(json!({
            "name": format!("{name}, transfers as long as compute, exposed waiting"), "value": median(exposed),
            "unit": "x compute", "bar": null, "pass": null,
        }));
    }
    rows
}
