//! Reduced gradients on their way to the optimizer.

#[cfg(feature = "cube")]
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use zero_comm::{CommError, CommunicatorExt, ReduceOp};
use zero_core::{Bucket, DType, ParameterIndex, Rank, Segment};
use zero_offload::{HostBuffer, StoreError};

#[cfg(feature = "cube")]
use crate::device_bucket;
use crate::engine::Engine;
use crate::exclusive::Exclusive;
use crate::floats::{Floats, FloatsMut, Squares, Write};
use crate::host::{HostTensor, on, tensor_dtype, tensor_from_buffer};
#[cfg(feature = "cube")]
use crate::kernels::Buffer;
use crate::spill::Place;

/// How many elements are read from a disk, or copied, at a time.
pub(crate) const PIECE: usize = 1 << 18;

/// The summed gradients of what this rank updates.
#[derive(Debug)]
pub(crate) enum OwnedGradients {
    /// By parameter: a world of one.
    Whole(Vec<Option<Tensor<1>>>),
    /// By bucket, all of it: stage 0.
    Replicated(Vec<Part>),
    /// By bucket, this rank's part: stages 1 to 3.
    Parts(Vec<Part>),
}

/// This rank's part of a bucket.
#[derive(Debug)]
pub(crate) enum Part {
    Sums(HostBuffer),
    /// The same, on a disk.
    Disk(Arc<Place>),
    /// The same, on a CubeCL device.
    #[cfg(feature = "cube")]
    Device(Buffer),
    /// The same, `f32` and multiplied by the step's factor: a parameter's gradient is a view of it.
    Gradients(Box<Tensor<1>>),
}

/// Some elements of this rank's part of a parameter, side by side in a bucket.
struct Run<'e> {
    bucket: usize,
    segment: &'e Segment,
    /// Which elements of the segment.
    within: Range<usize>,
    /// Where the segment begins in the part.
    first: usize,
}

impl OwnedGradients {
    /// The sum of squares of all gradients of the world.
    ///
    /// Each rank's range of each parameter is summed by itself, then a rank's ranges in the order of the model, then the
    /// ranks' sums in their order: stages and bucket sizes give the same bits.
    ///
    /// What the disk cannot give is an error of this rank alone, beside one between ranks.
    pub(crate) fn sum_of_squares(&self, engine: &Engine) -> Result<Result<f64, StoreError>, CommError> {
        #[cfg(feature = "cube")]
        if let (Self::Whole(gradients), Some(port)) = (self, &engine.port) {
            match device_bucket::sum_of_squares(port, gradients) {
                Ok(sum) => return Ok(Ok(sum)),
                Err(error) => engine.phase.note(error.into()),
            }
        }
        #[cfg(feature = "cube")]
        let on_device = self.squares_on_device(engine);
        let mut by_rank = vec![0.0_f64; engine.world()];
        let mut read = Ok(());
        for parameter in engine.layout.parameters() {
            if let Self::Whole(gradients) = self {
                if let Some(gradient) = &gradients[parameter.index().index()] {
                    by_rank[0] += HostTensor::new(gradient.clone()).floats().sum_of_squares();
                }
                continue;
            }
            #[cfg(feature = "cube")]
            if let Some(squares) = on_device.get(&parameter.index()) {
                by_rank.iter_mut().zip(squares).for_each(|(sum, squares)| *sum += squares);
                continue;
            }
            let mut squares = vec![Squares::default(); engine.world()];
            let seen = self.each_sum(engine, parameter.index(), &mut |segment, _, sums| {
                squares[segment.rank.index()].add(sums);
                Ok::<_, StoreError>(())
            });
            read = read.and(seen);
            by_rank.iter_mut().zip(squares).for_each(|(sum, squares)| *sum += squares.sum());
        }
        if let Self::Parts(_) = self {
            // Every rank adds zeros but at its own place, so this gathers.
            engine.comm.all_reduce(&mut by_rank, ReduceOp::Sum, "gradient norm")?;
        }
        let mut sum = [by_rank.iter().sum::<f64>()];
        if let Self::Replicated(_) = self
            && engine.has_device()
        {
            // Devices of another kind add in another order.
            engine.comm.broadcast(&mut sum, Rank::ROOT, "gradient norm")?;
        }
        Ok(read.map(|()| sum[0]))
    }

    /// The sums of squares, by rank, of the gradients whose sums are on the device, in one pass and one read; NaN where the
    /// device has failed, which the next call tells.
    #[cfg(feature = "cube")]
    fn squares_on_device(&self, engine: &Engine) -> HashMap<ParameterIndex, Vec<f64>> {
        let (Self::Parts(parts) | Self::Replicated(parts), Some(port)) = (self, &engine.port) else {
            return HashMap::new();
        };
        let mut rows: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
        let mut owners: BTreeMap<usize, Vec<(ParameterIndex, Rank)>> = BTreeMap::new();
        for parameter in engine.layout.parameters() {
            for (bucket, segment) in self.segments(engine, parameter.index()) {
                if let Part::Device(_) = &parts[bucket] {
                    let start = self.start(engine, bucket, segment);
                    rows.entry(bucket).or_default().push(start..start + segment.source.len());
                    owners.entry(bucket).or_default().push((parameter.index(), segment.rank));
                }
            }
        }
        let on_device = rows.iter().filter_map(|(bucket, rows)| match &parts[*bucket] {
            Part::Device(sums) => Some((sums, rows)),
            _ => None,
        });
        let squares = device_bucket::squares(port, on_device).unwrap_or_else(|error| {
            engine.phase.note(error.into());
            rows.values().map(|rows| vec![f64::NAN; rows.len()]).collect()
        });
        let mut by_parameter = HashMap::new();
        for (owners, squares) in owners.values().zip(squares) {
            for (&(parameter, rank), square) in owners.iter().zip(squares) {
                let by_rank = by_parameter.entry(parameter).or_insert_with(|| vec![0.0; engine.world()]);
                by_rank[rank.index()] += square;
            }
        }
        by_parameter
    }

    /// Shows the gradient of the elements `rows` of this rank's part of `parameter`, piece by piece: `see` gets where a piece
    /// begins in the part, and its sums.
    pub(crate) fn each_own<E: From<StoreError>>(
        &self,
        engine: &Engine,
        parameter: ParameterIndex,
        rows: Range<usize>,
        see: &mut dyn FnMut(usize, Floats<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Self::Whole(gradients) = self {
            return match gradients[parameter.index()].clone() {
                Some(gradient) => see(rows.start, HostTensor::new(gradient).floats().slice(rows)),
                None => Ok(()),
            };
        }
        for Run { bucket, segment, within, first } in self.runs(engine, parameter, rows) {
            self.pieces(engine, bucket, segment, within, &mut |at, sums| see(first + at, sums))?;
        }
        Ok(())
    }

    /// Whether the gradient of this rank's part of `parameter` is in memory, and of the type of values.
    pub(crate) fn has_room_for_values(&self, engine: &Engine, parameter: ParameterIndex) -> bool {
        match self {
            Self::Whole(gradients) => gradients[parameter.index()]
                .as_ref()
                .is_some_and(|gradient| gradient.dtype() == tensor_dtype(DType::F32)),
            Self::Replicated(parts) | Self::Parts(parts) => {
                let is_here = |bucket: usize| matches!(parts[bucket], Part::Sums(_));
                engine.config.precision.accumulate == DType::F32
                    && engine.layout.bucket_of(parameter).is_some_and(is_here)
            }
        }
    }

    /// As [`each_own`](Self::each_own) of what [has room for values](Self::has_room_for_values), for one who may write there.
    pub(crate) fn each_own_mut<E>(
        &mut self,
        engine: &Engine,
        parameter: ParameterIndex,
        rows: Range<usize>,
        mut see: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let runs: Vec<_> = self.runs(engine, parameter, rows.clone()).collect();
        let starts: Vec<_> = runs.iter().map(|run| self.start(engine, run.bucket, run.segment)).collect();
        match self {
            Self::Whole(gradients) => {
                let gradient = &mut gradients[parameter.index()];
                let Some(mut memory) = gradient.take().map(Exclusive::new) else { return Ok(()) };
                let seen = see(rows.start, &mut memory.values()[rows]);
                *gradient = Some(memory.into_tensor(&engine.home));
                seen
            }
            Self::Replicated(parts) | Self::Parts(parts) => {
                runs.into_iter().zip(starts).try_for_each(|(Run { bucket, within, first, .. }, start)| {
                    let Part::Sums(sums) = &mut parts[bucket] else { return Ok(()) };
                    let sums = &mut sums.as_mut_slice::<f32>()[start + within.start..start + within.end];
                    see(first + within.start, sums)
                })
            }
        }
    }

    /// Where runs of this rank's part of `parameter` lie: their beginnings in it and in the sums of its bucket, and how many
    /// elements they have.
    #[cfg(feature = "cube")]
    pub(crate) fn places(&self, engine: &Engine, parameter: ParameterIndex) -> Vec<[usize; 3]> {
        let all = 0..engine.holdings.owned(parameter).len();
        let place = |Run { bucket, segment, within, first }: Run<'_>| {
            let start = self.start(engine, bucket, segment) + within.start;
            [first + within.start, start, within.len()]
        };
        self.runs(engine, parameter, all).map(place).collect()
    }

    /// Moves the sums of a bucket that are here to the device.
    #[cfg(feature = "cube")]
    pub(crate) fn take_to_device(&mut self, engine: &Engine, bucket: usize) -> Result<Tensor<1>, StoreError> {
        let accumulate = engine.config.precision.accumulate;
        let (Self::Replicated(parts) | Self::Parts(parts)) = self else {
            return Ok(Tensor::empty([0], &engine.device));
        };
        let sums = match std::mem::replace(&mut parts[bucket], Part::Sums(engine.sums.take(0))) {
            Part::Gradients(gradients) => return Ok(*gradients),
            Part::Device(sums) => return Ok(device_bucket::tensor(engine, &sums)),
            Part::Sums(sums) => sums,
            Part::Disk(place) => {
                let mut sums = engine.sums(bucket);
                place.read(0, &mut sums)?;
                sums
            }
        };
        Ok(tensor_from_buffer(sums, accumulate, &engine.device))
    }

    /// Where the elements `rows` of this rank's part of `parameter` lie in buckets.
    fn runs<'e>(
        &self,
        engine: &'e Engine,
        parameter: ParameterIndex,
        rows: Range<usize>,
    ) -> impl Iterator<Item = Run<'e>> + use<'e> {
        let is_part = matches!(self, Self::Parts(_));
        self.segments(engine, parameter).filter_map(move |(bucket, segment)| {
            let first = if is_part { 0 } else { segment.source.start };
            let part = rows.start.max(first)..rows.end.min(first + segment.source.len());
            let within = || part.start - first..part.end - first;
            (!part.is_empty()).then(|| Run { bucket, segment, within: within(), first })
        })
    }

    /// The segments of `parameter` whose sums are here, each with the number of its bucket.
    fn segments<'e>(
        &self,
        engine: &'e Engine,
        parameter: ParameterIndex,
    ) -> impl Iterator<Item = (usize, &'e Segment)> + use<'e> {
        let index = engine.layout.bucket_of(parameter).filter(|_| !matches!(self, Self::Whole(_)));
        let here = index.map(|index| (index, self.here(engine, &engine.layout.buckets()[index])));
        here.into_iter().flat_map(move |(index, here)| {
            let segments = engine.layout.buckets()[index].segments(parameter).iter();
            segments
                .filter(move |segment| {
                    segment.offset >= here.start && segment.offset + segment.source.len() <= here.end
                })
                .map(move |segment| (index, segment))
        })
    }

    /// The elements of a bucket whose sums are here.
    fn here(&self, engine: &Engine, bucket: &Bucket) -> Range<usize> {
        match self {
            Self::Parts(_) => bucket.part(engine.comm.rank()),
            Self::Whole(_) | Self::Replicated(_) => 0..bucket.numel(),
        }
    }

    /// Where a segment of a bucket begins in the sums that are here.
    fn start(&self, engine: &Engine, index: usize, segment: &Segment) -> usize {
        segment.offset - self.here(engine, &engine.layout.buckets()[index]).start
    }

    /// Shows the elements `within` a segment of a bucket to `see`, with where in the segment they begin: all at once, or from
    /// a disk [`PIECE`] of them at a time.
    fn pieces<E: From<StoreError>>(
        &self,
        engine: &Engine,
        index: usize,
        segment: &Segment,
        within: Range<usize>,
        see: &mut dyn FnMut(usize, Floats<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (Self::Parts(parts) | Self::Replicated(parts)) = self else { return Ok(()) };
        let accumulate = engine.config.precision.accumulate;
        let start = self.start(engine, index, segment);
        match &parts[index] {
            Part::Gradients(_) => Ok(()),
            #[cfg(feature = "cube")]
            Part::Device(sums) => {
                let mut memory = engine.scratch.take(within.len() * accumulate.size());
                device_bucket::read(engine, sums, start + within.start, &mut memory);
                see(within.start, Floats::new(accumulate, &memory))
            }
            Part::Sums(sums) => {
                let range = start + within.start..start + within.end;
                see(within.start, Floats::new(accumulate, sums).slice(range))
            }
            Part::Disk(place) => {
                let size = accumulate.size();
                let mut memory = engine.scratch.take(within.len().min(PIECE) * size);
                for at in within.clone().step_by(PIECE) {
                    let numel = PIECE.min(within.end - at);
                    place.read((start + at) * size, &mut memory[..numel * size])?;
                    see(at, Floats::new(accumulate, &memory[..numel * size]))?;
                }
                Ok(())
            }
        }
    }

    /// Shows the sums of `parameter` that are in buckets here to `see`: a segment, where in it a piece begins, and the piece.
    fn each_sum<E: From<StoreError>>(
        &self,
        engine: &Engine,
        parameter: ParameterIndex,
        see: &mut dyn FnMut(&Segment, usize, Floats<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        for (bucket, segment) in self.segments(engine, parameter) {
            let whole = 0..segment.source.len();
            self.pieces(engine, bucket, segment, whole, &mut |at, sums| see(segment, at, sums))?;
        }
        Ok(())
    }

    /// Moves out the gradient of this rank's part of `parameter`, times `factor`, which is the same for all.
    pub(crate) fn take(
        &mut self,
        engine: &Engine,
        parameter: ParameterIndex,
        factor: f32,
    ) -> Result<Option<Tensor<1>>, StoreError> {
        let Some(index) = engine.layout.bucket_of(parameter) else { return Ok(None) };
        let bucket = &engine.layout.buckets()[index];
        let accumulate = engine.config.precision.accumulate;
        match self {
            Self::Whole(gradients) => {
                let Some(gradient) = gradients[parameter.index()].take() else { return Ok(None) };
                let gradient = on(&engine.home, gradient.cast(FloatDType::F32));
                return Ok(Some(if factor == 1.0 { gradient } else { gradient.mul_scalar(factor) }));
            }
            Self::Parts(parts) => {
                let gradients = parts[index].gradients(engine, index, accumulate, factor)?;
                let part = bucket.part(engine.comm.rank());
                let here = |segment: &&Segment| segment.rank == engine.comm.rank();
                return Ok(Some(match bucket.segments(parameter).iter().find(here) {
                    None => Tensor::empty([0], &engine.home),
                    Some(segment) => {
                        let start = segment.offset - part.start;
                        gradients.narrow(0, start, segment.source.len())
                    }
                }));
            }
            Self::Replicated(_) => {}
        }
        let numel = engine.parameter(parameter).numel();
        let mut gradient = engine.sums.take(numel * size_of::<f32>());
        let target = gradient.as_mut_slice::<f32>();
        self.each_sum(engine, parameter, &mut |segment, at, sums| {
            let start = segment.source.start + at;
            FloatsMut::F32(&mut target[start..start + sums.len()]).write(Write::Put, sums, factor);
            Ok::<_, StoreError>(())
        })?;
        Ok(Some(tensor_from_buffer(gradient, DType::F32, &engine.home)))
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
            let seen = self.each_sum(engine, parameter, &mut |_, _, sums| {
                finite &= sums.are_finite();
                Ok::<_, StoreError>(())
            });
            // What cannot be read any more is not known to be finite.
            seen.is_err() || !finite
        })
    }
}

impl Part {
    fn gradients(
        &mut self,
        engine: &Engine,
        index: usize,
        accumulate: DType,
        factor: f32,
    ) -> Result<Tensor<1>, StoreError> {
        if let Self::Disk(place) = self {
            let mut sums = engine.sums(index);
            place.read(0, &mut sums)?;
            *self = Self::Sums(sums);
        }
        #[cfg(feature = "cube")]
        if let Self::Device(sums) = self {
            let gradients = device_bucket::tensor(engine, sums).cast(FloatDType::F32).mul_scalar(factor);
            *self = Self::Gradients(Box::new(on(&engine.home, gradients)));
        }
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
            *self = Self::Gradients(Box::new(tensor_from_buffer(buffer, DType::F32, &engine.home)));
        }
        match self {
            Self::Gradients(gradients) => Ok((**gradients).clone()),
            _ => unreachable!("made above"),
        }
    }
}
