//! Bytes that one rank holds, measured.

use zero_core::{Bytes, StateBytes};

/// Memory of one rank by category, as measured: parameters and gradients from the allocations, optimizer state
/// from the tensors in it when it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Parameters and gradients as held when the last backward ended, and optimizer state as held now.
    pub state: StateBytes,
    /// Gathered parameters alive now: what layers in the middle of their work or a model from
    /// [`unshard`](crate::Zero::unshard) hold, and what is gathered ahead or kept for its next use.
    pub gathered: Bytes,
    /// The most that gathered parameters took at once, since the engine started or
    /// [`reset_gathered_peak`](crate::Zero::reset_gathered_peak).
    pub gathered_peak: Bytes,
    /// Buckets that fill with gradients or are on their way to their owners now.
    pub buckets: Bytes,
    /// Copies of this rank's shards for other ranks to read, where there are any: ranks that are processes of one host share
    /// memory for that, and see no other of each other's. They are on the device where ranks read each other's devices, else on
    /// the host.
    pub windows: Bytes,
    /// Buffers kept for the next gather, bucket, sum or replica: at most four times the largest module's parameters, what
    /// may be gathered ahead and kept, some ten times the largest bucket, and between a step and the next backward the
    /// gradients that this rank sums up.
    pub idle: Bytes,
    /// How many buffers were allocated rather than reused, since the engine started: a steady run allocates no more.
    pub allocations: u64,
}

impl MemoryReport {
    /// The categories as plain numbers, in the order of the fields.
    pub(crate) fn to_array(self) -> [f64; 9] {
        let Self { state, gathered, gathered_peak, buckets, windows, idle, allocations } = self;
        let StateBytes { parameters, gradients, optimizer } = state;
        let allocations = Bytes::new(allocations);
        [parameters, gradients, optimizer, gathered, gathered_peak, buckets, windows, idle, allocations]
            .map(|bytes| bytes.get() as f64)
    }

    pub(crate) fn from_array(values: [f64; 9]) -> Self {
        let [parameters, gradients, optimizer, gathered, gathered_peak, buckets, windows, idle, allocations] =
            values.map(|bytes| Bytes::new(bytes as u64));
        Self {
            state: StateBytes { parameters, gradients, optimizer },
            gathered,
            gathered_peak,
            buckets,
            windows,
            idle,
            allocations: allocations.get(),
        }
    }
}
