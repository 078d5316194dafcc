//! How much of the communication compute hides, on links that are as slow as compute.

use std::sync::Arc;
use std::time::Duration;

use gpt::GptConfig;
use serde_json::{Value, json};
use zero_burn::{Communicator, LocalWorld, Stage, WorldSize, ZeroConfig, ZeroError};
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
        sharded(config, zero, STEPS, &comm)
    });
    let runs = runs.unwrap_or_else(|error| panic!("{error}"));
    runs.into_iter().max_by(|a, b| a.median().total_cmp(&b.median())).unwrap_or_default()
}

/// Rows of the stages whose communication runs beside compute.
pub(crate) fn rows(config: &GptConfig) -> Vec<Value> {
    let mut rows = Vec::new();
    for stage in [Stage::Two, Stage::Three] {
        let zero =
            ZeroConfig { stage, bucket_bytes: zero_burn::Bytes::new(1 << 20), ..ZeroConfig::default() };
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
                "{stage}, round {} of {ROUNDS}: {compute:.3} s, with transfers of {transfers:.3} s {:.3} s; {:?}",
                round + 1,
                slow.median(),
                slow.statistics.last()
            );
        }
        let hidden = median(hidden);
        rows.push(json!({
            "name": format!("{stage}, transfers as long as compute, hidden"), "value": hidden, "unit": "share",
            "bar": 0.85, "pass": hidden >= 0.85,
        }));
        rows.push(json!({
            "name": format!("{stage}, transfers as long as compute, exposed waiting"), "value": median(exposed),
            "unit": "x compute", "bar": null, "pass": null,
        }));
    }
    rows
}
