//! Two processes of one thread each: at stage 3, and plain Burn side by side. PyTorch, where it is found, the same.

use std::env;
use std::error::Error;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use burn::tensor::Device;
use gpt::GptConfig;
use serde_json::{Value, json};
use zero_burn::{ProcessWorld, Rank, WorldSize, ZeroConfig};
use zero_comm::{Coordinator, CoordinatorOptions, Meeting, Token};

use crate::contender::{ROWS, Times, plain, sharded};
use crate::median;

const ROUNDS: usize = 5;
const STEPS: usize = 8;
const RANKS: usize = 2;
const TOKEN: &str = "ZERO_ENGINE_BENCH_TOKEN";

#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    /// At stage 3, without gradient checkpointing, as plain Burn and PyTorch: the tape keeps weights that layers reshape.
    Sharded,
    /// At stage 3 as it is by default, with checkpointing.
    Frugal,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Sharded => "sharded",
            Self::Frugal => "frugal",
        }
    }
}

/// What a process that was started by [`rows`] does; false if this is not one.
pub(crate) fn child(config: &GptConfig, arguments: &[String]) -> Result<bool, Box<dyn Error>> {
    let [_, flag, kind, rank, coordinator] = arguments else { return Ok(false) };
    if flag != "--process" {
        return Ok(false);
    }
    let rank = Rank::new(rank.parse()?);
    let size = WorldSize::new(RANKS).ok_or("no ranks")?;
    let meeting = Meeting::Coordinator { address: coordinator.clone() };
    let world = ProcessWorld::new(rank, size, meeting).with_token(env::var(TOKEN)?.parse::<Token>()?);
    let times = world.run(|comm| -> Result<Times, Box<dyn Error + Send + Sync>> {
        let device = match kind.as_str() {
            name if name == Kind::Sharded.name() => Some(Device::default().autodiff()),
            name if name == Kind::Frugal.name() => Some(Device::default()),
            _ => None,
        };
        if let Some(device) = device {
            return Ok(sharded(config, &ZeroConfig::default(), device, STEPS, &comm)?);
        }
        let share = rank.index() * ROWS / RANKS..(rank.index() + 1) * ROWS / RANKS;
        // A failure shows in the next call, at the latest in the world's end.
        Ok(plain(config, STEPS, share, &|| drop(comm.barrier("step"))))
    })?;
    println!("{}", times.median());
    Ok(true)
}

/// The slowest process's seconds per step.
fn seconds(kind: Kind) -> Result<f64, Box<dyn Error>> {
    let token = Token::generate()?;
    let size = WorldSize::new(RANKS).ok_or("no ranks")?;
    let options =
        CoordinatorOptions { size, token: token.clone(), deadline: Duration::from_secs(120), host: None };
    let coordinator = Coordinator::new(TcpListener::bind("127.0.0.1:0")?, options)?;
    let processes = (0..RANKS).map(|rank| {
        Command::new(env::current_exe()?)
            .args(["--process", kind.name(), &rank.to_string(), &coordinator.address().to_string()])
            .env(TOKEN, token.to_hex())
            .env("RAYON_NUM_THREADS", "1")
            .stdout(Stdio::piped())
            .spawn()
    });
    let processes = processes.collect::<Result<Vec<_>, _>>()?;
    let mut slowest: f64 = 0.0;
    for process in processes {
        let output = process.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        slowest = slowest.max(text.trim().parse().map_err(|_| format!("{} wrote {text:?}", kind.name()))?);
    }
    Ok(slowest)
}

/// Tokens per second of PyTorch's `mode`, if PyTorch is there.
fn torch(config: &GptConfig, mode: &str) -> Option<f64> {
    let torchrun = env::var_os("TORCHRUN").unwrap_or_else(|| "torchrun".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/engine/torch_gpt.py");
    let sizes = [config.dim, config.layers, config.context, config.heads, ROWS / RANKS, STEPS];
    let output = Command::new(torchrun)
        .args(["--standalone", "--nproc-per-node", &RANKS.to_string()])
        .arg(script)
        .args(sizes.map(|size| size.to_string()))
        .arg(mode)
        .env("OMP_NUM_THREADS", "1")
        .stderr(Stdio::inherit())
        .output()
        .ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

pub(crate) fn rows(config: &GptConfig) -> Result<Vec<Value>, Box<dyn Error>> {
    let (mut alone, mut together, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut frugal_ratios = Vec::new();
    let (mut torch_alone, mut torch_ratios) = (Vec::new(), Vec::new());
    let tokens = (ROWS * config.context) as f64;
    for round in 0..ROUNDS {
        let plain = tokens / seconds(Kind::Plain)?;
        let sharded = tokens / seconds(Kind::Sharded)?;
        eprintln!(
            "processes, round {} of {ROUNDS}: plain {plain:.0}, stage 3 {sharded:.0} tokens/s",
            round + 1
        );
        ratios.push(sharded / plain);
        frugal_ratios.push(tokens / seconds(Kind::Frugal)? / plain);
        alone.push(plain);
        together.push(sharded);
        if let (Some(plain), Some(fsdp)) = (torch(config, "plain"), torch(config, "fsdp")) {
            eprintln!("PyTorch: plain {plain:.0}, FSDP2 {fsdp:.0} tokens/s");
            torch_alone.push(plain);
            torch_ratios.push(fsdp / plain);
        }
    }
    let ratio = median(ratios);
    let found = |values: Vec<f64>| if values.is_empty() { Value::Null } else { json!(median(values)) };
    let row = |name: &str, value: Value, unit: &str| json!({"name": name, "value": value, "unit": unit, "bar": null, "pass": null});
    Ok(vec![
        row("2 processes of 1 thread, plain Burn side by side", json!(median(alone)), "tokens/s"),
        row("2 processes of 1 thread, stage 3", json!(median(together)), "tokens/s"),
        json!({
            "name": "2 processes of 1 thread, stage 3 against plain", "value": ratio, "unit": "x plain Burn",
            "bar": 0.92, "pass": ratio >= 0.92,
        }),
        row(
            "2 processes of 1 thread, stage 3 with checkpointing against plain",
            json!(median(frugal_ratios)),
            "x plain Burn",
        ),
        row("PyTorch, 2 processes of 1 thread, plain side by side", found(torch_alone), "tokens/s"),
        row("PyTorch, 2 processes of 1 thread, FSDP2 against plain", found(torch_ratios), "x plain PyTorch"),
    ])
}
