//! Training with ZeRO.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use burn::module::Module;
use burn::optim::AdamW;
use burn::tensor::Device;
use zero_burn::{Communicator, CommunicatorExt, Partition, ReduceOp, Zero, ZeroOptimizer};

use crate::corpus::Corpus;
use crate::learner::{Learner, Progress, evaluate, optimizer};
use crate::model::Gpt;
use crate::rows::Rows;
use crate::settings::Settings;

/// One rank of a sharded run.
#[derive(Debug)]
pub struct Sharded {
    settings: Settings,
    zero: Zero,
    model: Gpt,
    optimizer: ZeroOptimizer<AdamW>,
}

impl Sharded {
    /// Builds this rank's part.
    ///
    /// # Errors
    ///
    /// When the configuration cannot work or another rank fails.
    pub fn new(settings: &Settings, comm: &Arc<dyn Communicator>, device: Device) -> Result<Self> {
        let zero = Zero::new(settings.zero.clone(), comm, device)?;
        let model = zero.shard(|device| settings.model.init(device))?;
        let optimizer = zero.optimizer(optimizer(settings).build())?;
        Ok(Self { settings: settings.clone(), zero, model, optimizer })
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
}

impl Learner for Sharded {
    fn step(&mut self, step: usize, corpus: &Corpus) -> Result<Progress> {
        let Settings { train, zero, .. } = &self.settings;
        let rows = corpus.training_rows(zero.seed, step, self.share(train.batch));
        if rows.is_empty() {
            self.zero.skip_backward()?;
        } else {
            let (tokens, targets) = rows.tensors(self.zero.device());
            self.zero.backward_weighted(self.model.loss(tokens, targets), rows.len() as f64)?;
        }
        let outcome = self.optimizer.step(self.settings.lr(step), &mut self.model)?;
        let memory = Some(self.zero.memory_of_largest_rank()?);
        self.zero.reset_gathered_peak()?;
        Ok(Progress { loss: outcome.loss, grad_norm: outcome.grad_norm, memory })
    }

    fn evaluate(&mut self, rows: &Rows) -> Result<f64> {
        let mine = rows.slice(self.share(rows.len()));
        let mut sums = [evaluate(&self.model(), &mine, self.zero.device()), mine.len() as f64];
        self.zero.check()?;
        self.zero.communicator().all_reduce(&mut sums, ReduceOp::Sum, "held-out loss")?;
        Ok(sums[0] / sums[1])
    }

    fn model(&self) -> Gpt {
        self.model.valid()
    }
}
