//! Gradients between backward and step: summed over micro-batches, reduced to their owners in plan order.

use burn::tensor::Tensor;
use zero_comm::{CommError, CommunicatorExt, ReduceOp};
use zero_core::{Bucket, Bytes, ParameterIndex, Rank};
use zero_offload::HostBuffer;

use crate::engine::Engine;
use crate::host::{HostTensor, distinct_bytes};
use crate::owned::OwnedGradients;

/// What has arrived and been reduced since the last step, on one rank.
#[derive(Debug)]
pub(crate) struct GradientStore {
    /// Whole sums by parameter: stages 0 and 1, and a world of one.
    sums: Vec<Option<Tensor<1>>>,
    /// Buckets in plan order: stages 2 and 3.
    buckets: Vec<Filling>,
    /// The first bucket not yet reduced in this backward.
    next: usize,
    /// Gradients of each parameter that arrived in this backward.
    arrived: Vec<usize>,
    /// Whether the parameter's part of its bucket holds values.
    filled: Vec<bool>,
    /// Gradients of each parameter that arrived since the last step.
    contributions: Vec<usize>,
    /// The weights of the losses since the last step, summed.
    weight: f64,
    /// The losses since the last step, each times its weight, summed.
    weighted_loss: f64,
    /// The first failure of a reduction in this backward.
    failure: Option<CommError>,
}

/// One bucket: what fills during backward, and this rank's part of what was reduced.
#[derive(Debug, Default)]
struct Filling {
    buffer: Option<HostBuffer>,
    part: Option<HostBuffer>,
}

/// What every rank contributes to the step's agreement, summed over ranks.
#[derive(Clone, Debug)]
pub(crate) struct Contributions {
    pub(crate) weight: f64,
    pub(crate) weighted_loss: f64,
    /// By parameter: how many gradients arrived on any rank.
    pub(crate) counts: Vec<f64>,
}

impl GradientStore {
    pub(crate) fn new(parameters: usize, buckets: usize) -> Self {
        Self {
            sums: (0..parameters).map(|_| None).collect(),
            buckets: (0..buckets).map(|_| Filling::default()).collect(),
            next: 0,
            arrived: vec![0; parameters],
            filled: vec![false; parameters],
            contributions: vec![0; parameters],
            weight: 0.0,
            weighted_loss: 0.0,
            failure: None,
        }
    }

    pub(crate) fn begin_backward(&mut self) {
        self.next = 0;
        self.arrived.fill(0);
    }

    /// Takes in one gradient, and reduces every bucket that is complete and whose turn it is.
    pub(crate) fn receive(&mut self, engine: &Engine, parameter: ParameterIndex, gradient: Tensor<1>) {
        self.arrived[parameter.index()] += 1;
        if !engine.reduces_in_backward() {
            let sum = &mut self.sums[parameter.index()];
            *sum = Some(match sum.take() {
                Some(sum) => sum + gradient,
                None => gradient,
            });
            return;
        }
        let Some(index) = engine.layout.bucket_of(parameter) else { return };
        self.fill(engine, index, parameter, HostTensor::new(gradient).as_slice());
        while self.next < self.buckets.len() && self.is_complete(engine, self.next) {
            self.reduce(engine, self.next);
            self.next += 1;
        }
    }

    /// Copies a gradient into its bucket, or adds it to what already lies there.
    fn fill(&mut self, engine: &Engine, index: usize, parameter: ParameterIndex, gradient: &[f32]) {
        let bucket = &engine.layout.buckets()[index];
        let buffer = self.buckets[index]
            .buffer
            .get_or_insert_with(|| engine.scratch.take(bucket.numel() * size_of::<f32>()));
        copy_segments(
            bucket,
            parameter,
            gradient,
            buffer,
            std::mem::replace(&mut self.filled[parameter.index()], true),
        );
    }

    /// Whether no more gradients are to be expected for the bucket in this backward.
    fn is_complete(&self, engine: &Engine, index: usize) -> bool {
        let parameters = engine.layout.buckets()[index].parameters();
        parameters
            .iter()
            .all(|&parameter| self.arrived[parameter.index()] > 0 && engine.uses.pending(parameter) == 0)
    }

    /// Sends the bucket to its owners; what no gradient filled counts as zero. After a failure it only cleans up.
    fn reduce(&mut self, engine: &Engine, index: usize) {
        let bucket = &engine.layout.buckets()[index];
        let buffer = self.buckets[index].buffer.take();
        let mut buffer = buffer.unwrap_or_else(|| engine.scratch.take(bucket.numel() * size_of::<f32>()));
        for &parameter in bucket.parameters() {
            if !std::mem::take(&mut self.filled[parameter.index()]) {
                clear_segments(bucket, parameter, &mut buffer);
            }
        }
        if self.failure.is_some() {
            return;
        }
        match reduce_to_owner(engine, index, &buffer) {
            Err(error) => self.failure = Some(error),
            Ok(part) => {
                let sum = &mut self.buckets[index].part;
                match sum {
                    None => *sum = Some(part),
                    Some(sum) => {
                        for (sum, part) in sum.as_mut_slice::<f32>().iter_mut().zip(part.as_slice::<f32>()) {
                            *sum += part;
                        }
                    }
                }
            }
        }
    }

    /// Ends a backward: reduces what is left, in plan order, and agrees with the other ranks that none failed.
    ///
    /// Gives the lowest rank whose backward failed, where one did.
    pub(crate) fn end_backward(&mut self, engine: &Engine, failed: bool) -> Result<Option<Rank>, CommError> {
        if engine.reduces_in_backward() {
            while self.next < self.buckets.len() {
                self.reduce(engine, self.next);
                self.next += 1;
            }
        }
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        if engine.world() == 1 {
            return Ok(failed.then_some(Rank::ROOT));
        }
        // Slot 0: larger for a lower failed rank. Then one flag per bucket that received a gradient after its turn.
        let mut flags = vec![0.0_f64; 1 + self.buckets.len()];
        if failed {
            flags[0] = (engine.world() - engine.comm.rank().index()) as f64;
        }
        for (flag, bucket) in flags[1..].iter_mut().zip(&self.buckets) {
            *flag = f64::from(u8::from(bucket.buffer.is_some()));
        }
        engine.comm.all_reduce(&mut flags, ReduceOp::Max, "end of backward")?;
        for index in 0..self.buckets.len() {
            if flags[1 + index] > 0.0 {
                self.reduce(engine, index);
            }
        }
        match self.failure.take() {
            Some(error) => Err(error),
            None => Ok((flags[0] > 0.0).then(|| Rank::new(engine.world() - flags[0] as usize))),
        }
    }

    /// Counts what the backward that just ended brought.
    pub(crate) fn commit(&mut self, weight: f64, loss: f64) {
        for (total, arrived) in self.contributions.iter_mut().zip(&self.arrived) {
            *total += arrived;
        }
        self.weight += weight;
        if weight > 0.0 {
            self.weighted_loss += weight * loss;
        }
    }

    /// Forgets all gradients since the last step.
    pub(crate) fn discard(&mut self) {
        *self = Self::new(self.sums.len(), self.buckets.len());
    }

    /// What all ranks brought since the last step.
    pub(crate) fn contributions(&self, engine: &Engine, lr: f64) -> Result<Contributions, CommError> {
        let mut values = vec![self.weight, self.weighted_loss];
        values.extend(self.contributions.iter().map(|&count| count as f64));
        if engine.world() > 1 {
            // Ranks whose labels differ are told so: all have to step by the same rate.
            let label = format!("what each rank brings to the step, with learning rate {lr}");
            engine.comm.all_reduce(&mut values, ReduceOp::Sum, &label)?;
        }
        Ok(Contributions { weight: values[0], weighted_loss: values[1], counts: values.split_off(2) })
    }

    /// Bytes held now.
    pub(crate) fn bytes(&self) -> Bytes {
        let sums = distinct_bytes(self.sums.iter().flatten());
        let buffers = self.buckets.iter().flat_map(|bucket| [&bucket.buffer, &bucket.part]).flatten();
        Bytes::new(sums + buffers.map(|buffer| buffer.len() as u64).sum::<u64>())
    }

    /// Reduces what is not reduced yet and moves all gradients out.
    pub(crate) fn take(&mut self, engine: &Engine) -> Result<OwnedGradients, CommError> {
        if engine.world() == 1 {
            return Ok(OwnedGradients::Whole(self.sums.iter_mut().map(Option::take).collect()));
        }
        if engine.reduces_in_backward() {
            let rank = engine.comm.rank().index();
            let parts = self.buckets.iter_mut().zip(engine.layout.buckets()).map(|(filling, bucket)| {
                // Without any backward there is nothing: the owner's part is zero.
                filling.part.take().unwrap_or_else(|| {
                    let mut part = engine.scratch.take(bucket.counts()[rank] * size_of::<f32>());
                    part.fill(0);
                    part
                })
            });
            return Ok(OwnedGradients::Parts(parts.collect()));
        }
        let buckets = 0..engine.layout.buckets().len();
        if engine.config.stage.shards_optimizer() {
            let parts = buckets.map(|index| reduce_to_owner(engine, index, &self.take_sums(engine, index)));
            return Ok(OwnedGradients::Parts(parts.collect::<Result<_, _>>()?));
        }
        let whole = buckets.map(|index| {
            let mut buffer = self.take_sums(engine, index);
            let label = &engine.bucket_labels[index];
            engine.comm.all_reduce(buffer.as_mut_slice::<f32>(), ReduceOp::Sum, label)?;
            Ok(buffer)
        });
        Ok(OwnedGradients::Replicated(whole.collect::<Result<_, CommError>>()?))
    }

    /// Moves this rank's sums into a bucket; where there is none, it holds zeros.
    fn take_sums(&mut self, engine: &Engine, index: usize) -> HostBuffer {
        let bucket = &engine.layout.buckets()[index];
        let mut buffer = engine.scratch.take(bucket.numel() * size_of::<f32>());
        for &parameter in bucket.parameters() {
            match self.sums[parameter.index()].take() {
                Some(sum) => {
                    copy_segments(bucket, parameter, HostTensor::new(sum).as_slice(), &mut buffer, false);
                }
                None => clear_segments(bucket, parameter, &mut buffer),
            }
        }
        buffer
    }
}

fn reduce_to_owner(engine: &Engine, index: usize, buffer: &HostBuffer) -> Result<HostBuffer, CommError> {
    let counts = engine.layout.buckets()[index].counts();
    let mut part = engine.scratch.take(counts[engine.comm.rank().index()] * size_of::<f32>());
    engine.comm.reduce_scatter_uneven(
        buffer.as_slice::<f32>(),
        part.as_mut_slice::<f32>(),
        counts,
        ReduceOp::Sum,
        &engine.bucket_labels[index],
    )?;
    Ok(part)
}

fn copy_segments(
    bucket: &Bucket,
    parameter: ParameterIndex,
    values: &[f32],
    buffer: &mut HostBuffer,
    add: bool,
) {
    let buffer = buffer.as_mut_slice::<f32>();
    for segment in bucket.segments(parameter) {
        let from = &values[segment.source.clone()];
        let to = &mut buffer[segment.offset..][..from.len()];
        if add {
            for (to, from) in to.iter_mut().zip(from) {
                *to += from;
            }
        } else {
            to.copy_from_slice(from);
        }
    }
}

fn clear_segments(bucket: &Bucket, parameter: ParameterIndex, buffer: &mut HostBuffer) {
    let buffer = buffer.as_mut_slice::<f32>();
    for segment in bucket.segments(parameter) {
        buffer[segment.offset..][..segment.source.len()].fill(0.0);
    }
}
