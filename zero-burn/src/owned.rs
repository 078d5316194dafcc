//! Reduced gradients on their way to the optimizer.

use burn::tensor::Tensor;
use zero_comm::{CommError, CommunicatorExt, ReduceOp};
use zero_core::{ParameterIndex, Rank};
use zero_offload::HostBuffer;

use crate::engine::Engine;
use crate::host::{HostTensor, tensor_from_buffer};

/// The summed gradients of what this rank updates.
#[derive(Debug)]
pub(crate) enum OwnedGradients {
    /// By parameter: a world of one.
    Whole(Vec<Option<Tensor<1>>>),
    /// By bucket, all of it: stage 0.
    Replicated(Vec<HostBuffer>),
    /// By bucket, this rank's part: stages 1 to 3.
    Parts(Vec<HostBuffer>),
}

impl OwnedGradients {
    /// The sum of squares of all gradients of the world.
    ///
    /// Each rank's range is summed by itself, then the ranks' sums in rank order: every stage gives the same bits.
    pub(crate) fn sum_of_squares(&self, engine: &Engine) -> Result<f64, CommError> {
        let mut by_rank = vec![0.0_f64; engine.world()];
        match self {
            Self::Whole(gradients) => {
                by_rank[0] = gradients
                    .iter()
                    .flatten()
                    .map(|gradient| sum_of_squares(HostTensor::new(gradient.clone()).as_slice()))
                    .sum();
            }
            Self::Replicated(buffers) => {
                for (bucket, buffer) in engine.layout.buckets().iter().zip(buffers) {
                    for (rank, sum) in by_rank.iter_mut().enumerate() {
                        *sum += sum_of_squares(&buffer.as_slice::<f32>()[bucket.part(Rank::new(rank))]);
                    }
                }
            }
            Self::Parts(buffers) => {
                let own = buffers.iter().map(|part| sum_of_squares(part.as_slice::<f32>())).sum();
                by_rank[engine.comm.rank().index()] = own;
                // Every rank adds zeros but at its own place, so this gathers.
                engine.comm.all_reduce(&mut by_rank, ReduceOp::Sum, "gradient norm")?;
            }
        }
        Ok(by_rank.iter().sum())
    }

    /// Moves out the gradient of this rank's part of `parameter`, times `factor`.
    pub(crate) fn take(
        &mut self,
        engine: &Engine,
        parameter: ParameterIndex,
        factor: f32,
    ) -> Option<Tensor<1>> {
        let index = engine.layout.bucket_of(parameter)?;
        let bucket = &engine.layout.buckets()[index];
        // What lies before the buffer in the bucket: a part begins where its rank's range begins.
        let (buffer, before) = match self {
            Self::Whole(gradients) => {
                let gradient = gradients[parameter.index()].take()?;
                return Some(if factor == 1.0 { gradient } else { gradient.mul_scalar(factor) });
            }
            Self::Replicated(buffers) => (&buffers[index], 0),
            Self::Parts(buffers) => (&buffers[index], bucket.part(engine.comm.rank()).start),
        };
        let owned = engine.owned(parameter);
        let mut gradient = engine.scratch.take(owned.len() * size_of::<f32>());
        let target = gradient.as_mut_slice::<f32>();
        for segment in bucket.segments(parameter) {
            let inside = segment.source.start >= owned.start && segment.source.end <= owned.end;
            if !inside || segment.source.is_empty() {
                continue;
            }
            let from = &buffer.as_slice::<f32>()[segment.offset - before..][..segment.source.len()];
            let to = &mut target[segment.source.start - owned.start..][..from.len()];
            for (to, from) in to.iter_mut().zip(from) {
                *to = from * factor;
            }
        }
        Some(tensor_from_buffer(gradient, &engine.device))
    }
}

/// In `f64` and in a fixed order: eight running sums, added up at the end.
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let chunks = values.chunks_exact(lanes.len());
    let rest: f64 = chunks.remainder().iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    lanes.iter().sum::<f64>() + rest
}
