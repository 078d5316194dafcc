//! Gradients between backward and step: summed over micro-batches, reduced to their owners in plan order.

use std::collections::VecDeque;

use burn::tensor::{FloatDType, Tensor};
#[cfg(feature = "cube")]
use zero_comm::OpKind;
use zero_comm::{CommError, CommunicatorExt, ReduceOp};
use zero_core::{Bytes, ParameterIndex, Rank};

#[cfg(feature = "cube")]
use crate::device_bucket::DeviceBucket;
use crate::engine::Engine;
use crate::floats::{Write, burn_dtype};
use crate::host::{HostTensor, distinct_bytes};
#[cfg(feature = "cube")]
use crate::kernels::KernelError;
use crate::owned::OwnedGradients;
use crate::rates;
use crate::scratch::ScratchBuffer;
use crate::segments;
#[cfg(feature = "cube")]
use crate::sums;
use crate::sums::{Content, Sums};

/// How many buckets of the largest size may be on their way at once, or more that are smaller: one travels, and others
/// wait for it where gathers have the links for a while.
const ON_THEIR_WAY: usize = 4;

/// What has arrived and been reduced since the last step, on one rank.
#[derive(Debug)]
pub(crate) struct GradientStore {
    /// Whole sums by parameter, where gradients are reduced at the step, and in a world of one.
    sums: Vec<Option<Tensor<1>>>,
    /// Buckets in plan order, where gradients are reduced by every backward.
    buckets: Vec<Filling>,
    /// Buckets on their way, the oldest first.
    on_their_way: VecDeque<usize>,
    /// The first bucket not yet reduced in this backward.
    next: usize,
    /// Gradients of each parameter that arrived in this backward.
    arrived: Vec<usize>,
    /// Whether the parameter's part of its bucket holds values.
    filled: Vec<bool>,
    /// Gradients of each parameter that arrived since the last step.
    contributions: Vec<usize>,
    /// The first parameter whose gradient was not finite, of those that were looked at.
    not_finite: Option<ParameterIndex>,
    /// Backwards since the last step.
    backwards: usize,
    /// The weights of the losses since the last step, summed.
    weight: f64,
    /// The losses since the last step, each times its weight, summed.
    weighted_loss: f64,
    /// What gradients of this backward are multiplied by.
    factor: f32,
    /// The first failure of a reduction in this backward.
    failure: Option<CommError>,
}

/// One bucket: what fills during backward, and the sums that this rank gets.
#[derive(Debug, Default)]
struct Filling {
    buffer: Option<ScratchBuffer>,
    /// In place of `buffer`, where gradients are on a CubeCL device.
    #[cfg(feature = "cube")]
    on_device: Option<DeviceBucket>,
    sums: Sums,
}

impl Filling {
    /// Whether gradients have come since it was reduced.
    fn has_gradients(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.buffer.is_some() || self.on_device.is_some();
        #[cfg(not(feature = "cube"))]
        self.buffer.is_some()
    }
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
            on_their_way: VecDeque::new(),
            next: 0,
            arrived: vec![0; parameters],
            filled: vec![false; parameters],
            contributions: vec![0; parameters],
            not_finite: None,
            backwards: 0,
            weight: 0.0,
            weighted_loss: 0.0,
            factor: 1.0,
            failure: None,
        }
    }

    pub(crate) fn begin_backward(&mut self, weight: f64) {
        self.factor = weight as f32;
        self.next = 0;
        self.arrived.fill(0);
    }

    /// Takes in one gradient, and reduces every bucket that is complete and whose turn it is.
    pub(crate) fn receive(&mut self, engine: &Engine, parameter: ParameterIndex, gradient: Tensor<1>) {
        self.arrived[parameter.index()] += 1;
        if !engine.reduces_in_backward() {
            let gradient = match self.factor {
                1.0 => gradient,
                factor => gradient.cast(FloatDType::F32).mul_scalar(factor),
            };
            let gradient = gradient.cast(burn_dtype(engine.config.precision.accumulate));
            let sum = &mut self.sums[parameter.index()];
            *sum = Some(match sum.take() {
                Some(sum) => sum + gradient,
                None => gradient,
            });
            return;
        }
        let Some(index) = engine.layout.bucket_of(parameter) else { return };
        self.fill(engine, index, parameter, gradient, self.factor);
        while self.next < self.buckets.len() && self.is_complete(engine, self.next) {
            self.reduce(engine, self.next);
            self.next += 1;
        }
    }

    /// Copies a gradient, times `factor`, into its bucket, or adds it to what already lies there.
    fn fill(
        &mut self,
        engine: &Engine,
        index: usize,
        parameter: ParameterIndex,
        gradient: Tensor<1>,
        factor: f32,
    ) {
        let bucket = &engine.layout.buckets()[index];
        let wire = engine.config.precision.reduce();
        let is_filled = std::mem::replace(&mut self.filled[parameter.index()], true);
        let how = if is_filled { Write::Add } else { Write::Put };
        #[cfg(feature = "cube")]
        if let Some(port) = &engine.port {
            let on_device = &mut self.buckets[index].on_device;
            let write = || {
                let on_device = match on_device {
                    Some(on_device) => on_device,
                    None => on_device.insert(DeviceBucket::new(port.clone(), bucket, wire)?),
                };
                on_device.write(bucket, parameter, gradient, how, factor)
            };
            if let Err(error) = write() {
                engine.phase.note(error.into());
            }
            return;
        }
        let buffer = &mut self.buckets[index].buffer;
        let buffer = buffer.get_or_insert_with(|| engine.scratch.take(bucket.numel() * wire.size()));
        let gradient = HostTensor::new(gradient);
        if !segments::write(bucket, parameter, &gradient, (wire, buffer), (how, factor)) {
            self.not_finite.get_or_insert(parameter);
        }
    }

    /// What is in a bucket; what no gradient filled is zero.
    fn content(&mut self, engine: &Engine, index: usize) -> Result<Content, CommError> {
        let bucket = &engine.layout.buckets()[index];
        let wire = engine.config.precision.reduce();
        #[cfg(feature = "cube")]
        if sums::collectives(engine).is_some() {
            return self.content_on_device(engine, index);
        }
        #[cfg(feature = "cube")]
        self.fetch(engine, index);
        let buffer = self.buckets[index].buffer.take();
        let mut buffer = buffer.unwrap_or_else(|| engine.scratch.take(bucket.numel() * wire.size()));
        for &parameter in bucket.parameters() {
            if !std::mem::take(&mut self.filled[parameter.index()]) {
                segments::clear(bucket, parameter, (wire, &mut buffer));
            }
        }
        Ok(Content::OnHost(buffer))
    }

    #[cfg(feature = "cube")]
    fn content_on_device(&mut self, engine: &Engine, index: usize) -> Result<Content, CommError> {
        let bucket = &engine.layout.buckets()[index];
        let failed = |error: KernelError| {
            let label = &engine.bucket_labels[index];
            engine.comm.give_up(OpKind::ReduceScatter, label, &error.to_string())
        };
        let on_device = match (self.buckets[index].on_device.take(), &engine.port) {
            (Some(on_device), _) => on_device,
            (None, Some(port)) => {
                let wire = engine.config.precision.reduce();
                DeviceBucket::new(port.clone(), bucket, wire).map_err(failed)?
            }
            (None, None) => unreachable!("who reaches other devices has a way to its own"),
        };
        let mut filled = Vec::new();
        for &parameter in bucket.parameters() {
            if std::mem::take(&mut self.filled[parameter.index()]) {
                filled.push((parameter, segments::places(bucket, parameter)));
            } else {
                on_device.clear(bucket, parameter).map_err(failed)?;
            }
        }
        Ok(Content::OnDevice(on_device, filled))
    }

    /// Copies what has come on the device to host memory, and looks whether it is finite.
    #[cfg(feature = "cube")]
    fn fetch(&mut self, engine: &Engine, index: usize) {
        let Some(on_device) = self.buckets[index].on_device.take() else { return };
        let bucket = &engine.layout.buckets()[index];
        let wire = engine.config.precision.reduce();
        let mut buffer = engine.scratch.take(bucket.numel() * wire.size());
        on_device.read(&mut buffer);
        let filled = bucket.parameters().iter().filter(|parameter| self.filled[parameter.index()]);
        if let Some(found) =
            filled.copied().find(|&found| !segments::are_finite(bucket, found, (wire, &buffer)))
        {
            self.not_finite.get_or_insert(found);
        }
        self.buckets[index].buffer = Some(buffer);
    }

    /// Whether no more gradients are to be expected for the bucket in this backward.
    fn is_complete(&self, engine: &Engine, index: usize) -> bool {
        let parameters = engine.layout.buckets()[index].parameters();
        parameters
            .iter()
            .all(|&parameter| self.arrived[parameter.index()] > 0 && engine.uses.pending(parameter) == 0)
    }

    /// Sends the bucket to its owners. After a failure it only cleans up.
    fn reduce(&mut self, engine: &Engine, index: usize) {
        let content = self.content(engine, index);
        self.settle(engine, index);
        let (numel, room) = (engine.layout.buckets()[index].numel(), engine.largest_bucket * ON_THEIR_WAY);
        while self.elements_on_their_way(engine) + numel > room && !self.on_their_way.is_empty() {
            self.settle_oldest(engine);
        }
        if self.failure.is_some() {
            return;
        }
        let sums = std::mem::take(&mut self.buckets[index].sums);
        self.put(index, content.and_then(|content| sums.reduce(engine, index, content)));
        if self.buckets[index].sums.are_coming() {
            self.on_their_way.push_back(index);
        }
    }

    /// Waits for the sums of a bucket that is on its way.
    fn settle(&mut self, engine: &Engine, index: usize) {
        let sums = std::mem::take(&mut self.buckets[index].sums);
        if sums.are_coming() {
            self.on_their_way.retain(|other| *other != index);
        }
        self.put(index, sums.arrive(engine, index));
    }

    fn put(&mut self, index: usize, arrived: Result<(Sums, Option<ParameterIndex>), CommError>) {
        match arrived {
            Ok((sums, not_finite)) => {
                self.buckets[index].sums = sums;
                self.not_finite = self.not_finite.or(not_finite);
            }
            Err(error) => drop(self.failure.get_or_insert(error)),
        }
    }

    fn elements_on_their_way(&self, engine: &Engine) -> usize {
        self.on_their_way.iter().map(|index| engine.layout.buckets()[*index].numel()).sum()
    }

    fn settle_all(&mut self, engine: &Engine) {
        for index in 0..self.buckets.len() {
            self.settle(engine, index);
        }
    }

    fn settle_oldest(&mut self, engine: &Engine) {
        if let Some(index) = self.on_their_way.front().copied() {
            self.settle(engine, index);
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
            self.settle_all(engine);
            return match self.failure.take() {
                Some(error) => Err(error),
                None => Ok(failed.then_some(Rank::ROOT)),
            };
        }
        // Slot 0: larger for a lower failed rank. Then one flag per bucket that received a gradient after its turn.
        let mut flags = vec![0.0_f64; 1 + self.buckets.len()];
        if failed {
            flags[0] = (engine.world() - engine.comm.rank().index()) as f64;
        }
        for (flag, bucket) in flags[1..].iter_mut().zip(&self.buckets) {
            *flag = f64::from(u8::from(bucket.has_gradients()));
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
        self.backwards += 1;
        self.weight += weight;
        if weight > 0.0 {
            self.weighted_loss += weight * loss;
        }
    }

    /// Whether no backward has ended since the last step. The same on all ranks.
    pub(crate) fn is_empty(&self) -> bool {
        self.backwards == 0
    }

    /// Forgets all gradients since the last step.
    pub(crate) fn discard(&mut self) {
        *self = Self::new(self.sums.len(), self.buckets.len());
    }

    /// What all ranks brought since the last step; nothing if some rank refuses to step. `rates` are this rank's learning
    /// rates, or nothing if it refuses.
    pub(crate) fn contributions(
        &self,
        engine: &Engine,
        rates: Option<&[f64]>,
    ) -> Result<Option<Contributions>, CommError> {
        let world = engine.world() as f64;
        let digest = rates.map_or(0, rates::digest);
        let [high, low] = [digest >> 32, digest & u64::from(u32::MAX)].map(|half| half as f64);
        let refuses = f64::from(u8::from(rates.is_none()));
        let mut values = vec![refuses, high, low, self.weight, self.weighted_loss];
        values.extend(self.contributions.iter().map(|&count| count as f64));
        if engine.world() > 1 {
            engine.comm.all_reduce(&mut values, ReduceOp::Sum, "what each rank brings to the step")?;
        }
        if values[0] > 0.0 {
            return Ok(None);
        }
        if let Some(rates) = rates.filter(|_| values[1..3] != [high * world, low * world]) {
            // Ranks whose labels differ are told so: all have to step by the same rates.
            engine.comm.barrier(&format!("a step with {}", rates::describe(rates)))?;
        }
        let counts = values.split_off(5);
        Ok(Some(Contributions { weight: values[3], weighted_loss: values[4], counts }))
    }

    /// Bytes of sums that are held now, or will be when what is on its way has come.
    pub(crate) fn bytes(&self, engine: &Engine) -> Bytes {
        let whole = distinct_bytes(self.sums.iter().flatten());
        let buckets = self.buckets.iter().enumerate().map(|(index, bucket)| bucket.sums.bytes(engine, index));
        Bytes::new(whole + buckets.sum::<usize>() as u64)
    }

    /// Bytes of buckets on the device that fill or are on their way.
    #[cfg(feature = "cube")]
    pub(crate) fn buckets_on_device(&self, engine: &Engine) -> Bytes {
        let wire = engine.config.precision.reduce();
        let buckets = self.buckets.iter().zip(engine.layout.buckets());
        let held = buckets.filter(|(held, _)| held.on_device.is_some() || held.sums.travel_on_device());
        held.map(|(_, bucket)| Bytes::of(bucket.numel(), wire)).sum()
    }

    /// Reduces what is not reduced yet and moves all gradients out.
    pub(crate) fn take(&mut self, engine: &Engine) -> Result<OwnedGradients, CommError> {
        if engine.world() == 1 && !engine.reduces_in_backward() {
            return Ok(OwnedGradients::Whole(self.sums.iter_mut().map(Option::take).collect()));
        }
        if !engine.reduces_in_backward() {
            for index in 0..self.buckets.len() {
                self.take_sums(engine, index);
                self.reduce(engine, index);
            }
        }
        self.settle_all(engine);
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let buckets = self.buckets.iter_mut().enumerate();
        let sums = buckets.map(|(index, bucket)| std::mem::take(&mut bucket.sums).into_part(engine, index));
        let sums: Vec<_> = sums.collect();
        if let Some(spill) = &engine.spill {
            spill.turn();
        }
        Ok(if engine.config.stage.shards_optimizer() {
            OwnedGradients::Parts(sums)
        } else {
            OwnedGradients::Replicated(sums)
        })
    }

    /// The first parameter whose gradient was not finite on this rank, as far as gradients were looked at.
    pub(crate) fn not_finite(&self) -> Option<ParameterIndex> {
        self.not_finite
    }

    /// Moves this rank's sums into a bucket.
    fn take_sums(&mut self, engine: &Engine, index: usize) {
        for &parameter in engine.layout.buckets()[index].parameters() {
            if let Some(sum) = self.sums[parameter.index()].take() {
                self.fill(engine, index, parameter, sum, 1.0);
            }
        }
    }
}
