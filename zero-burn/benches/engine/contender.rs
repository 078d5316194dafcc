//! Who trains: plain Burn, or a sharded engine. All on the same model and the same rows.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::optim::{AdamW, AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use gpt::GptConfig;
use zero_burn::{Communicator, Partition, Statistics, Zero, ZeroConfig, ZeroError, materialize};

/// Rows of a step, over all ranks.
pub(crate) const ROWS: usize = 16;
const LR: f64 = 1e-3;

/// What a contender took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    /// Of each step.
    pub(crate) steps: Vec<Duration>,
    /// What was counted in each step; nothing for plain Burn.
    pub(crate) statistics: Vec<Statistics>,
}

impl Times {
    /// Seconds of the median step; the first ones, in which memory is allocated and orders are learned, are left out.
    pub(crate) fn median(&self) -> f64 {
        let mut seconds: Vec<_> = self.steps.iter().skip(2).map(Duration::as_secs_f64).collect();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }
}

fn optimizer() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.1)
}

fn batch(config: &GptConfig, step: usize, rows: Range<usize>, device: &Device) -> [Tensor<2, Int>; 2] {
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

/// Plain Burn on `rows`. `meet` is called before and after each step, to begin it together with others.
pub(crate) fn plain(config: &GptConfig, steps: usize, rows: Range<usize>, meet: &dyn Fn()) -> Times {
    let device = Device::default().autodiff();
    let mut model = materialize(&device, 0, |device| config.init(device));
    let mut optimizer = optimizer().init();
    let mut times = Times::default();
    for step in 0..steps + 2 {
        meet();
        let begin = Instant::now();
        let [tokens, targets] = batch(config, step, rows.clone(), &device);
        let loss = model.loss(tokens, targets);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LR, model, gradients);
        assert!(value.is_finite());
        meet();
        times.steps.push(begin.elapsed());
    }
    times
}

/// The engine on this rank's share of the rows. A `device` with autodiff keeps its own gradient checkpointing, which is
/// none by default; to one without, the engine adds autodiff, at stage 3 with checkpointing.
pub(crate) fn sharded(
    config: &GptConfig,
    zero_config: &ZeroConfig,
    device: Device,
    steps: usize,
    comm: &Arc<dyn Communicator>,
) -> Result<Times, ZeroError> {
    let zero = Zero::new(zero_config.clone(), comm, device)?;
    let mut model = zero.shard(|device| config.init(device))?;
    let mut optimizer = zero.optimizer::<AdamW>(optimizer().build())?;
    let share = Partition::new(ROWS, comm.world_size()).range(comm.rank());
    let mut times = Times::default();
    for step in 0..steps + 2 {
        let begin = Instant::now();
        let [tokens, targets] = batch(config, step, share.clone(), zero.device());
        zero.backward_weighted(model.loss(tokens, targets), share.len() as f64)?;
        let outcome = optimizer.step(LR, &mut model)?;
        assert!(outcome.applied);
        // A step ends with a fence: its time is that of the slowest rank.
        times.steps.push(begin.elapsed());
        times.statistics.push(outcome.statistics);
    }
    Ok(times)
}
