//! Training state outside the device: optimizers on host memory, exact, reusable host buffers that gathered parameters and
//! gradient buckets live in, and tensors on a fast disk for what host memory does not hold.
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
//! Optimizers update slices in place, on all cores of a rank, with the same result on every machine:
//! [`HostOptimizer`] shows how.
//!
//! # Modules
//!
//! - `pool`: [`HostPool`], what it counts, how much it keeps ([`PoolOptions`]), whether it is page-locked ([`PageLocking`]).
//! - `buffer`: [`HostBuffer`], the guard that returns its memory when it is dropped.
//! - `lock`: mutexes without poison.
//! - `memory`: aligned memory; `cuda`: the driver that page-locks it, found at run time.
//! - `floats`: [`Floats`] and [`FloatsMut`], slices of f32, bf16 or f16; `blocks`, the same cut for the instruction sets.
//! - `optimizer`: [`HostOptimizer`] with [`Adam`], [`Adagrad`], [`Lion`] and [`Sgd`], and the pass over memory they share.
//! - `squares`: [`sum_of_squares`], the norm of a gradient and whether it is finite.
//! - `simd`: arithmetic written once for every [`InstructionSet`].
//! - `workers`: [`Workers`], the threads of a rank and the cores they run on.
//! - `store`: [`NvmeStore`], tensors in files: io_uring or threads, past the page cache, every transfer checked.
//! - `table`, `pipeline`, `circle`: [`Pipeline`], which updates [`Table`]s in a store while it reads and writes ahead and
//!   behind, in a circle of memory.
//!
//! # Features
//!
//! None.

mod blocks;
mod buffer;
#[cfg(unix)]
mod circle;
mod cuda;
mod floats;
mod lock;
mod memory;
mod optimizer;
#[cfg(unix)]
mod pipeline;
mod pool;
mod simd;
mod squares;
#[cfg(unix)]
mod store;
#[cfg(unix)]
mod table;
mod workers;

pub use buffer::HostBuffer;
pub use cuda::PageLockError;
pub use floats::{Floats, FloatsMut};
pub use optimizer::{
    Adagrad, AdagradRule, Adam, AdamRule, Coefficients, HostOptimizer, HyperParameterError, Lion, LionRule,
    MomentumRule, OptimizerConfig, Sgd, StateSpec, Update, UpdateError, UpdateRule, WeightDecay,
};
#[cfg(unix)]
pub use pipeline::{Pipeline, StagedUpdate, Tile};
pub use pool::{HostPool, PageLocking, PoolOptions};
pub use simd::InstructionSet;
pub use squares::{SquareSum, sum_of_squares};
#[cfg(unix)]
pub use store::{Direction, Engine, NvmeStore, ReadTicket, Slot, StoreError, StoreOptions, WriteTicket};
#[cfg(unix)]
pub use table::Table;
pub use workers::{Workers, WorkersError};
