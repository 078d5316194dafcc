//! What the engine costs: tokens per second of plain Burn against stage 3, on one rank and on two with the same batch.
//!
//! The contenders take turns within each round, so that whatever else the machine does hits all of them; a ratio is
//! the median of the rounds' ratios.

use std::path::PathBuf;
use std::time::Instant;

use burn::module::Module as _;
use burn::optim::{AdamW, AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use gpt::GptConfig;
use serde_json::json;
use zero_burn::{LocalWorld, Partition, WorldSize, Zero, ZeroConfig, ZeroError, materialize};

const ROUNDS: usize = 7;
const STEPS: usize = 4;
const ROWS: usize = 16;
const LR: f64 = 1e-3;

fn main() {
    let rows_file = rows_file();
    let config = GptConfig::default();
    let mut runs: [Vec<f64>; 3] = Default::default();
    for round in 0..ROUNDS {
        let contenders: [fn(&GptConfig) -> f64; 3] =
            [plain, |config| sharded(config, 1), |config| sharded(config, 2)];
        // Another one begins each time.
        for turn in 0..contenders.len() {
            let at = (round + turn) % contenders.len();
            runs[at].push(contenders[at](&config));
        }
        eprintln!("round {} of {ROUNDS}: {:.0?} tokens/s", round + 1, runs.each_ref().map(|run| run[round]));
    }
    let ratio = |at: usize| median(runs[at].iter().zip(&runs[0]).map(|(run, plain)| run / plain).collect());
    let speed = |name: &str, at: usize| json!({"name": name, "value": median(runs[at].clone()), "unit": "tokens/s", "bar": null, "pass": null});
    let against_plain = |name: &str, at: usize, bar: f64| json!({"name": name, "value": ratio(at), "unit": "x plain Burn", "bar": bar, "pass": ratio(at) >= bar});
    let rows = json!([
        speed("plain Burn", 0),
        speed("stage 3, 1 rank", 1),
        speed("stage 3, 2 in-process ranks", 2),
        against_plain("stage 3, 1 rank, against plain", 1, 0.95),
        against_plain("stage 3, 2 in-process ranks, against plain", 2, 0.90),
    ]);
    match rows_file {
        Some(path) => std::fs::write(&path, rows.to_string())
            .unwrap_or_else(|error| panic!("cannot write the rows to {}: {error}", path.display())),
        None => println!("{rows:#}"),
    }
}

/// The value of `--rows FILE`; whatever else Cargo passes is for other harnesses.
fn rows_file() -> Option<PathBuf> {
    let mut arguments = std::env::args_os().skip_while(|argument| argument != "--rows").skip(1);
    arguments.next().map(PathBuf::from)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn optimizer() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn batch(
    config: &GptConfig,
    step: usize,
    rows: std::ops::Range<usize>,
    device: &Device,
) -> [Tensor<2, Int>; 2] {
    [0, 1].map(|shift| {
        let count = rows.len();
        let values: Vec<i32> = rows
            .clone()
            .flat_map(|row| {
                (0..config.context).map(move |at| ((step * 31 + row * 17 + (at + shift) * 7) % 256) as i32)
            })
            .collect();
        Tensor::from_data(TensorData::new(values, [count, config.context]), device)
    })
}

/// Tokens per second of the median step, the first one left out.
fn tokens_per_second(config: &GptConfig, mut seconds: Vec<f64>) -> f64 {
    seconds.remove(0);
    (ROWS * config.context) as f64 / median(seconds)
}

fn plain(config: &GptConfig) -> f64 {
    let device = Device::default().autodiff();
    let mut model = materialize(&device, 0, |device| config.init(device));
    let mut optimizer = optimizer().init();
    let mut seconds = Vec::new();
    for step in 0..=STEPS {
        let begin = Instant::now();
        let [tokens, targets] = batch(config, step, 0..ROWS, &device);
        let loss = model.loss(tokens, targets);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LR, model, gradients);
        assert!(value.is_finite());
        seconds.push(begin.elapsed().as_secs_f64());
    }
    drop(model.valid());
    tokens_per_second(config, seconds)
}

fn sharded(config: &GptConfig, ranks: usize) -> f64 {
    let world = WorldSize::new(ranks).expect("there are ranks");
    let seconds = LocalWorld::new(world)
        .run(|comm| -> Result<Vec<f64>, ZeroError> {
            let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
            let mut model = zero.shard(|device| config.init(device))?;
            let mut optimizer = zero.optimizer::<AdamW>(optimizer().build())?;
            let share = Partition::new(ROWS, world).range(comm.rank());
            let mut seconds = Vec::new();
            for step in 0..=STEPS {
                let begin = Instant::now();
                let [tokens, targets] = batch(config, step, share.clone(), zero.device());
                zero.backward_weighted(model.loss(tokens, targets), share.len() as f64)?;
                let outcome = optimizer.step(LR, &mut model)?;
                assert!(outcome.applied);
                // A step ends with a fence: its time is that of the slowest rank.
                seconds.push(begin.elapsed().as_secs_f64());
            }
            Ok(seconds)
        })
        .unwrap_or_else(|error| panic!("{error}"));
    tokens_per_second(config, seconds.into_iter().next().unwrap_or_default())
}
