//! Ranks that talk: deterministic collectives, one-sided windows and faults that name their cause.
//!
//! ```
//! use zero_comm::{CommError, CommunicatorExt, LocalWorld, ReduceOp};
//! use zero_core::WorldSize;
//!
//! let world = LocalWorld::new(WorldSize::new(4).unwrap());
//! let sums = world.run(|comm| {
//!     let mut gradient = vec![comm.rank().index() as f32; 3];
//!     comm.all_reduce(&mut gradient, ReduceOp::Sum, "layer.weight")?;
//!     Ok::<_, CommError>(gradient)
//! })?;
//! assert_eq!(sums, vec![vec![6.0; 3]; 4]);
//! # Ok::<_, zero_comm::WorldError<CommError>>(())
//! ```
//!
//! A [`Communicator`] is one rank's place in a group; what it does with typed slices stands in
//! [`CommunicatorExt`]. Results are bitwise the same on every rank and every run. Every wait ends, at the
//! latest at a deadline, and every [`CommError`] names the ranks, the operation and its label.
//!
//! # Modules
//!
//! Everything is re-exported here; inside, one noun has one file.
//!
//! - `communicator`, `ext`: [`Communicator`], what a backend implements, and its typed form.
//! - `element`, `buffer`: [`Element`] and slices of them, [`Buffer`] and [`BufferMut`].
//! - `op`: [`ReduceOp`] and its arithmetic, [`OpKind`].
//! - `window`: [`Region`] and [`WindowKey`], for reads that need nobody's help.
//! - `error`: [`CommError`], one variant per cause.
//! - `local`: [`LocalWorld`], ranks as threads that read each other's memory.
//! - `panic`: [`panic_message`], what a panic said.
//! - `conformance`: what every backend must pass (feature `conformance`).
//!
//! # Features
//!
//! - `conformance`: the conformance suite, for whoever writes a backend. Off by default.

#[cfg(feature = "conformance")]
pub mod conformance;

mod arguments;
mod buffer;
mod communicator;
mod element;
mod error;
mod ext;
mod failure;
mod local;
mod op;
mod panic;
mod reduce;
mod request;
mod window;

pub use buffer::{Buffer, BufferMut};
pub use communicator::Communicator;
pub use element::Element;
pub use error::{Call, CommError, LossCause};
pub use ext::CommunicatorExt;
pub use local::{LocalWorld, RankFailure, WorldError};
pub use op::{OpKind, ReduceOp};
pub use panic::panic_message;
pub use window::{Region, WindowKey};
