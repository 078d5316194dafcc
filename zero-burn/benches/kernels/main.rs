//! What kernels on a device reach of its bandwidth, and the fused AdamW against Burn's own.
//!
//! The limit is a copy on the same device in the same round: the same bytes read and written as a kernel has to would take so
//! long. The contenders take turns within each round; a time is the median of the rounds, a ratio the median of the rounds'
//! ratios. The device is the one that the variable `ZERO_DEVICE` names.

mod burn_adamw;
mod contender;
mod copy;
#[path = "../../tests/kernels/device.rs"]
#[allow(dead_code)]
mod device;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use cubecl::client::Client;
use serde_json::{Value, json};

/// Launches that are timed together, so that waiting for the device counts little.
const LAUNCHES: u32 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| arguments.iter().skip_while(|argument| *argument != name).nth(1);
    let device = device::device();
    let client = device.client();
    let identity = &client.properties().identity;
    // No card: a driver that computes on the processor.
    let is_software = identity.physical.is_none();
    let (elements, rounds) = if is_software { (4 << 20, 7) } else { (64 << 20, 21) };
    eprintln!("{} by {}, {elements} elements", identity.name, client.name());

    let mut contenders = contender::all(&client, elements)?;
    let mut copies = copy::Copies::new(&client, elements);
    let mut burn = burn_adamw::BurnAdamW::new(&device, elements);
    let mut seconds = vec![Vec::new(); contenders.len()];
    let mut limits = Vec::new();
    let mut burns = Vec::new();
    for round in 0..=rounds {
        let limit = copies.seconds_per_byte(&client)?;
        let times = contenders.iter_mut().map(|contender| timed(&client, || contender.launch(&client)));
        let times = times.collect::<Result<Vec<_>, _>>()?;
        let other = burn.seconds(&client)?;
        // The first compiles, and makes the states.
        if round > 0 {
            limits.push(limit);
            burns.push(other);
            seconds.iter_mut().zip(times).for_each(|(seconds, time)| seconds.push(time));
        }
    }

    let mut rows = vec![
        json!({"name": "copy", "value": 1e-9 / median(limits.clone()), "unit": "GB/s", "bar": null, "pass": null}),
    ];
    for (contender, seconds) in contenders.iter().zip(&seconds) {
        let bytes = (contender.bytes * elements) as f64;
        let reached = bytes * 1e-9 / median(seconds.clone());
        let of_limit =
            median(seconds.iter().zip(&limits).map(|(seconds, limit)| bytes * limit / seconds).collect());
        // Software is bound by arithmetic.
        let bar = (!is_software).then_some(0.85);
        let name = contender.name;
        rows.push(json!({"name": name, "value": reached, "unit": "GB/s", "bar": null, "pass": null}));
        rows.push(json!({
            "name": format!("{name}, against copy"), "value": of_limit, "unit": "x", "bar": bar,
            "pass": bar.map(|bar| of_limit >= bar),
        }));
    }
    let fused = &seconds[contender::LIKE_BURN];
    let ratio = median(burns.iter().zip(fused).map(|(burn, fused)| burn / fused).collect());
    let bar = is_software.then_some(3.0);
    rows.push(json!({"name": "Burn's AdamW", "value": median(burns) * 1e3, "unit": "ms", "bar": null, "pass": null}));
    rows.push(
        json!({"name": "fused AdamW", "value": median(fused.clone()) * 1e3, "unit": "ms", "bar": null, "pass": null}),
    );
    rows.push(json!({
        "name": "fused AdamW against Burn's", "value": ratio, "unit": "x", "bar": bar,
        "pass": bar.map(|bar| ratio >= bar),
    }));
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

/// Seconds of one of several launches.
fn timed(
    client: &Client,
    mut launch: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    sync(client)?;
    let start = Instant::now();
    for _ in 0..LAUNCHES {
        launch()?;
    }
    sync(client)?;
    Ok(start.elapsed().as_secs_f64() / f64::from(LAUNCHES))
}

fn sync(client: &Client) -> Result<(), Box<dyn Error>> {
    cubecl::future::block_on(client.sync()).map_err(|error| error.to_string().into())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
