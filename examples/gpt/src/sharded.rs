//! Training with ZeRO.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Device;
use zero_burn::{
    Bytes, Communicator, CommunicatorExt, Fused, Partition, ReduceOp, Statistics, Zero, ZeroOptimizer,
};

use crate::corpus::Corpus;
use crate::learner::{EngineProgress, Learner, Progress, evaluate};
use crate::model::Gpt;
use crate::rows::Rows;
use crate::saving::Saving;
use crate::settings::Settings;
use crate::update;

/// One rank of a sharded run.
#[derive(Debug)]
pub struct Sharded {
    settings: Settings,
    zero: Zero,
    model: Gpt,
    optimizer: ZeroOptimizer<Fused>,
    saving: Option<Saving>,
}

impl Sharded {
    /// Builds this rank's part.
    ///
    /// # Errors
    ///
    /// When the configuration cannot work or another rank fails.
    pub fn new(settings: &Settings, comm: &Arc<dyn Communicator>, device: Device) -> Result<Self> {
        let zero = Zero::new(settings.zero.clone(), comm, device)?;
        let model = zero.shard(|device| settings.build(device))?;
        let optimizer = zero.optimizer(update::fused(&settings.optimizer)?)?;
        zero.set_tracing(settings.trace.is_some())?;
        Ok(Self { settings: settings.clone(), zero, model, optimizer, saving: None })
    }

    /// Makes ready to save, and goes on from a checkpoint if the settings say so: gives the steps taken, and what to tell.
    ///
    /// # Errors
    ///
    /// When a checkpoint cannot be read or does not fit the model, or another rank fails.
    pub fn resume(&mut self, corpus: &Corpus) -> Result<(usize, Vec<String>)> {
        let Some(checkpoints) = &self.settings.checkpoints else { return Ok((0, Vec::new())) };
        let saving = Saving::new(&self.settings, checkpoints, &self.zero, corpus)?;
        self.saving.insert(saving).resume(&mut self.optimizer)
    }

    /// The engine.
    pub fn zero(&self) -> &Zero {
        &self.zero
    }

    /// This rank's share of `rows` rows.
    fn share(&self, rows: usize) -> Range<usize> {
        let comm = self.zero.communicator();
        Partition::new(rows, comm.world_size()).range(comm.rank())
    }

    /// One backward of this step.
    fn backward(&self, rows: &Rows) -> Result<()> {
        if rows.is_empty() {
            self.zero.skip_backward()?;
            return Ok(());
        }
        let (tokens, targets) = rows.tensors(self.zero.device());
        let loss = self.zero.trace_compute("forward", || self.model.loss(tokens, targets))?;
        self.zero.backward_weighted(loss, rows.len() as f64)?;
        Ok(())
    }

    /// The largest of all ranks' numbers, one by one.
    fn largest(&self, statistics: Statistics) -> Result<Statistics> {
        let Statistics {
            gathered, gather_time, gather_exposed, reduced, reduce_time, reduce_exposed, ..
        } = statistics;
        let bytes = |bytes: Bytes| bytes.get() as f64;
        let mut numbers = [
            bytes(gathered),
            gather_time.as_secs_f64(),
            gather_exposed.as_secs_f64(),
            bytes(reduced),
            reduce_time.as_secs_f64(),
            reduce_exposed.as_secs_f64(),
            statistics.update_time.as_secs_f64(),
            statistics.lookahead_hits as f64,
            statistics.lookahead_misses as f64,
            statistics.lookahead_wasted as f64,
            bytes(statistics.offloaded),
            statistics.offload_time.as_secs_f64(),
        ];
        self.zero.communicator().all_reduce(&mut numbers, ReduceOp::Max, "statistics")?;
        let (bytes, time) = (|number: f64| Bytes::new(number as u64), Duration::from_secs_f64);
        Ok(Statistics {
            gathered: bytes(numbers[0]),
            gather_time: time(numbers[1]),
            gather_exposed: time(numbers[2]),
            reduced: bytes(numbers[3]),
            reduce_time: time(numbers[4]),
            reduce_exposed: time(numbers[5]),
            update_time: time(numbers[6]),
            lookahead_hits: numbers[7] as u64,
            lookahead_misses: numbers[8] as u64,
            lookahead_wasted: numbers[9] as u64,
            offloaded: bytes(numbers[10]),
            offload_time: time(numbers[11]),
        })
    }
}

impl Learner for Sharded {
    fn step(&mut self, step: usize, corpus: &Corpus) -> Result<Progress> {
        let Settings { train, zero, .. } = &self.settings;
        let rows = corpus.training_rows(zero.seed, step, self.share(train.batch));
        let backwards = train.accumulation;
        for part in 0..backwards {
            self.backward(&rows.slice(rows.len() * part / backwards..rows.len() * (part + 1) / backwards))?;
        }
        let lr = self.settings.lr(self.optimizer.steps());
        let outcome = self.optimizer.step(lr, &mut self.model)?;
        let engine = EngineProgress {
            memory: self.zero.memory_of_largest_rank()?,
            statistics: self.largest(outcome.statistics)?,
            loss_scale: outcome.loss_scale,
            applied: outcome.applied,
            not_finite: outcome.not_finite,
        };
        self.zero.reset_gathered_peak()?;
        Ok(Progress { loss: outcome.loss, grad_norm: outcome.grad_norm, lr, engine: Some(engine) })
    }

    fn after_step(&mut self, steps: usize) -> Result<()> {
        let Self { saving, optimizer, .. } = self;
        saving.as_mut().map_or(Ok(()), |saving| saving.after_step(steps, optimizer))
    }

    fn finish(&mut self, steps: usize) -> Result<()> {
        let Self { saving, optimizer, .. } = self;
        saving.as_mut().map_or(Ok(()), |saving| saving.finish(steps, optimizer))
    }

    fn evaluate(&mut self, rows: &Rows) -> Result<f64> {
        self.optimizer.flush()?;
        let mine = rows.slice(self.share(rows.len()));
        let sum =
            self.zero.trace_compute("evaluate", || evaluate(&self.model(), &mine, self.zero.device()))?;
        let mut sums = [sum, mine.len() as f64];
        self.zero.check()?;
        self.zero.communicator().all_reduce(&mut sums, ReduceOp::Sum, "held-out loss")?;
        Ok(sums[0] / sums[1])
    }

    fn model(&self) -> Gpt {
        self.model.valid()
    }
}
