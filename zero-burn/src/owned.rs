//! Reduced gradients on their way to the optimizer.

use burn::tensor::{FloatDType, Tensor};
use zero_comm::{CommError, CommunicatorExt, ReduceOp};
use zero_core::{DType, ParameterIndex, Rank, Segment};
use zero_offload::HostBuffer;

use crate::engine::Engine;
use crate::floats::{Floats, FloatsMut, Write};
use crate::host::{HostTensor, tensor_from_buffer};

/// The summed gradients of what this rank updates.
#[derive(Debug)]
pub(crate) enum OwnedGradients {
    /// By parameter: a world of one.
    Whole(Vec<Option<Tensor<1>>>),
    /// By bucket, all of it: stage 0.
    Replicated(Vec<HostBuffer>),
    /// By bucket, this rank's part: stages 1 to 3.
    Parts(Vec<Part>),
}

/// This rank's part of a bucket.
#[derive(Debug)]
pub(crate) enum Part {
    Sums(HostBuffer),
    /// The same, `f32` and multiplied by the step's factor: a parameter's gradient is a view of it.
    Gradients(Box<Tensor<1>>),
}

impl OwnedGradients {
    /// The sum of squares of all gradients of the world.
    ///
    /// Each rank's range of each parameter is summed by itself, then a rank's ranges in the order of the model, then the
    /// ranks' sums in their order: stages and bucket sizes give the same bits.
    pub(crate) fn sum_of_squares(&self, engine: &Engine) -> Result<f64, CommError> {
        let mut by_rank = vec![0.0_f64; engine.world()];
        for parameter in engine.layout.parameters() {
            if let Self::Whole(gradients) = self {
                if let Some(gradient) = &gradients[parameter.index().index()] {
                    by_rank[0] += HostTensor::new(gradient.clone()).floats().sum_of_squares();
                }
            } else {
                self.each_sum(engine, parameter.index(), |segment, sums| {
                    by_rank[segment.rank.index()] += sums.sum_of_squares();
                });
            }
        }
        if let Self::Parts(_) = self {
            // Every rank adds zeros but at its own place, so this gathers.
            engine.comm.all_reduce(&mut by_rank, ReduceOp::Sum, "gradient norm")?;
        }
        Ok(by_rank.iter().sum())
    }

    /// Shows the gradient of this rank's part of `parameter`, piece by piece: `see` gets where a piece begins in the part,
    /// and its sums.
    pub(crate) fn each_own<E>(
        &self,
        engine: &Engine,
        parameter: ParameterIndex,
        mut see: impl FnMut(usize, Floats<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Self::Whole(gradients) = self {
            let gradient = gradients[parameter.index()].clone();
            return gradient.map_or(Ok(()), |gradient| see(0, HostTensor::new(gradient).floats()));
        }
        let is_part = matches!(self, Self::Parts(_));
        let mut outcome = Ok(());
        self.each_sum(engine, parameter, |segment, sums| {
            if outcome.is_ok() {
                outcome = see(if is_part { 0 } else { segment.source.start }, sums);
            }
        });
        outcome
    }

    /// Shows the sums of `parameter` that are in buckets here, segment by segment, to `see`.
    fn each_sum(
        &self,
        engine: &Engine,
        parameter: ParameterIndex,
        mut see: impl FnMut(&Segment, Floats<'_>),
    ) {
        let Some(index) = engine.layout.bucket_of(parameter) else { return };
        let bucket = &engine.layout.buckets()[index];
        let (buffer, here) = match self {
            Self::Whole(_) => return,
            Self::Replicated(buffers) => (&buffers[index], 0..bucket.numel()),
            Self::Parts(parts) => match &parts[index] {
                Part::Sums(sums) => (sums, bucket.part(engine.comm.rank())),
                Part::Gradients(_) => return,
            },
        };
        let sums = Floats::new(engine.config.precision.accumulate, buffer);
        for segment in bucket.segments(parameter) {
            let end = segment.offset + segment.source.len();
            if segment.offset >= here.start && end <= here.end {
                see(segment, sums.slice(segment.offset - here.start..end - here.start));
            }
        }
    }

    /// Moves out the gradient of this rank's part of `parameter`, times `factor`, which is the same for all.
    pub(crate) fn take(
        &mut self,
        engine: &Engine,
        parameter: ParameterIndex,
        factor: f32,
    ) -> Option<Tensor<1>> {
        let index = engine.layout.bucket_of(parameter)?;
        let bucket = &engine.layout.buckets()[index];
        let accumulate = engine.config.precision.accumulate;
        let sums = match self {
            Self::Whole(gradients) => {
                let gradient = gradients[parameter.index()].take()?.cast(FloatDType::F32);
                return Some(if factor == 1.0 { gradient } else { gradient.mul_scalar(factor) });
            }
            Self::Parts(parts) => {
                let gradients = parts[index].gradients(engine, accumulate, factor);
                let part = bucket.part(engine.comm.rank());
                let here = |segment: &&Segment| segment.rank == engine.comm.rank();
                return Some(match bucket.segments(parameter).iter().find(here) {
                    None => Tensor::empty([0], &engine.device),
                    Some(segment) => {
                        let start = segment.offset - part.start;
                        gradients.narrow(0, start, segment.source.len())
                    }
                });
            }
            Self::Replicated(buffers) => Floats::new(accumulate, &buffers[index]),
        };
        let numel = engine.parameter(parameter).numel();
        let mut gradient = engine.sums.take(numel * size_of::<f32>());
        let target = gradient.as_mut_slice::<f32>();
        for segment in bucket.segments(parameter) {
            let from = sums.slice(segment.offset..segment.offset + segment.source.len());
            FloatsMut::F32(&mut target[segment.source.clone()]).write(Write::Put, from, factor);
        }
        Some(tensor_from_buffer(gradient, DType::F32, &engine.device))
    }

    /// Which gradient was not finite, and on which rank: on the lowest rank that has one, the first in backward order;
    /// where all were finite but do not add up to something finite, the first such sum. `arrived` is the first that came
    /// to this rank and was not finite.
    pub(crate) fn find_not_finite(
        &self,
        engine: &Engine,
        arrived: Option<ParameterIndex>,
    ) -> Result<Option<(ParameterIndex, Rank)>, CommError> {
        let number = |index: Option<ParameterIndex>| index.map_or(-1, |index| index.index() as i64);
        let own = [number(arrived), number(self.not_finite(engine))];
        let mut all = vec![0_i64; own.len() * engine.world()];
        engine.comm.all_gather(&own, &mut all, "gradients that are not finite")?;
        let found = |kind: usize| {
            let kinds = all.chunks_exact(own.len()).map(|own| own[kind]);
            let (number, rank) =
                kinds.zip(engine.comm.world_size().ranks()).find(|(number, _)| *number >= 0)?;
            Some((ParameterIndex::new(number as usize), rank))
        };
        Ok(found(0).or_else(|| found(1)))
    }

    /// The first parameter, in backward order, whose sum is not finite where this rank has it.
    fn not_finite(&self, engine: &Engine) -> Option<ParameterIndex> {
        let buckets = engine.layout.buckets().iter().flat_map(|bucket| bucket.parameters());
        buckets.copied().find(|&parameter| {
            if let Self::Whole(gradients) = self {
                let gradient = gradients[parameter.index()].clone();
                return gradient.is_some_and(|gradient| !HostTensor::new(gradient).floats().are_finite());
            }
            let mut finite = true;
            self.each_sum(engine, parameter, |_, sums| finite &= sums.are_finite());
            !finite
        })
    }
}

impl Part {
    fn gradients(&mut self, engine: &Engine, accumulate: DType, factor: f32) -> Tensor<1> {
        if let Self::Sums(sums) = self {
            let buffer = if accumulate == DType::F32 {
                let mut buffer = std::mem::replace(sums, engine.sums.take(0));
                buffer.as_mut_slice::<f32>().iter_mut().for_each(|sum| *sum *= factor);
                buffer
            } else {
                let mut buffer = engine.sums.take(sums.len() / accumulate.size() * size_of::<f32>());
                FloatsMut::F32(buffer.as_mut_slice()).write(
                    Write::Put,
                    Floats::new(accumulate, sums),
                    factor,
                );
                buffer
            };
            *self = Self::Gradients(Box::new(tensor_from_buffer(buffer, DType::F32, &engine.device)));
        }
        match self {
            Self::Gradients(gradients) => (**gradients).clone(),
            Self::Sums(_) => unreachable!("made above"),
        }
    }
}
