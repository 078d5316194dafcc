//! Training state outside the device; today this crate holds one thing, the pool of exact, reusable host
//! buffers that gathered parameters and gradient buckets live in.
//!
//! ```
//! use zero_offload::HostPool;
//!
//! let pool = HostPool::default();
//! let mut gathered = pool.take(3 * size_of::<f32>());
//! gathered.as_mut_slice::<f32>().copy_from_slice(&[1.0, 2.0, 3.0]);
//! assert_eq!(pool.live().get(), 12);
//!
//! drop(gathered);
//! assert_eq!((pool.live().get(), pool.idle().get()), (0, 12));
//!
//! // The same size again is the same memory again.
//! let next = pool.take(12);
//! assert_eq!((next.len(), pool.allocations()), (12, 1));
//! ```
//!
//! # Modules
//!
//! - `pool`: [`HostPool`], what it counts and how much it keeps ([`PoolOptions`]).
//! - `buffer`: [`HostBuffer`], the guard that returns its memory when it is dropped.
//! - `memory`: aligned memory, the one file with `unsafe`.
//!
//! # Features
//!
//! None.

mod blocks;
mod buffer;
mod floats;
mod memory;
mod optimizer;
mod pool;
mod simd;
mod squares;
mod workers;

pub use buffer::HostBuffer;
pub use floats::{Floats, FloatsMut};
pub use optimizer::{
    Adagrad, Adam, HostOptimizer, HyperParameterError, Lion, OptimizerConfig, Sgd, StateSpec, Update,
    UpdateError, WeightDecay,
};
pub use pool::{HostPool, PoolOptions};
pub use simd::InstructionSet;
pub use squares::{SquareSum, sum_of_squares};
pub use workers::{Workers, WorkersError};
