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
//! Builds on Linux: ranks as processes share its memory files and are told of events by its means.
//!
//! # Modules
//!
//! Everything is re-exported here; inside, one noun has one file.
//!
//! - `communicator`, `ext`: [`Communicator`], what a backend implements, and its typed form.
//! - `element`, `buffer`: [`Element`] and slices of them, [`Buffer`] and [`BufferMut`].
//! - `op`: [`ReduceOp`], [`OpKind`]; `reduce` is the arithmetic.
//! - `arguments`, `request`: what can be wrong with the arguments of an operation, and whether those of several
//!   ranks fit together.
//! - `window`: [`Region`] and [`WindowKey`], for reads that need nobody's help; `windows` are those of a rank, and
//!   `reading` is how another asks for a part of one.
//! - `error`: [`CommError`], one variant per cause; `failure` is why a world failed.
//! - `world`, `world_error`: [`World`], whatever ranks are, and [`WorldError`], why it did not come to its end.
//! - `local`: [`LocalWorld`], ranks as threads that read each other's memory.
//! - `environment`: [`Launch`], what a launcher told this process; [`TorchStore`] and [`AddressFile`], which
//!   carry the address of rank 0.
//! - `process`: [`ProcessWorld`], ranks as processes, and the operations between them; `tcp` is how hosts reach
//!   each other.
//! - `control`: [`Coordinator`], which brings processes together and tells all why a world failed.
//! - `last_words`: what a failing rank leaves for its launcher.
//! - `flight`: [`FlightRecord`] and [`FlightReport`], what ranks did last.
//! - `launcher`: what the program `zero-run` does (feature `launcher`).
//! - `work`: [`WorkQueue`], operations that a thread of their own does, and [`Work`], their results.
//! - `throttled`: [`Throttled`], a communicator as slow as a given [`Link`].
//! - `faulty`: [`Faulty`], a communicator with the faults of a [`FaultPlan`].
//! - `clock`: [`Clock`], the time that decorators go by.
//! - `mpi`: how hosts reach each other over MPI (feature `mpi`).
//! - `nccl`: `NcclCommunicator`, devices that NVIDIA's NCCL connects, and `DeviceWindow`, their memory as other
//!   processes see it (feature `nccl`).
//! - `panic`: [`panic_message`], what a panic said.
//! - `lock`, `network`, `open_files`, `text`: locks, the way to hosts, the limit of sockets, and texts of bounded
//!   length.
//! - `conformance`: what every backend must pass (feature `conformance`).
//!
//! # Features
//!
//! - `conformance`: the conformance suite, for whoever writes a backend. Off by default.
//! - `launcher`: the program `zero-run`, and the same for other programs. Off by default.
//! - `fuzzing`: entry points for fuzzers. Off by default.
//! - `mpi`: links over MPI. Builds against the machine's MPI library, so off by default; see `docs/mpi.md`.
//! - `nccl`: NVIDIA devices. Builds without CUDA, which is looked for at run time; needs Rust 1.88. Off by
//!   default.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "zero-comm builds on Linux only: its ranks as processes need memory files, event descriptors and /proc"
);

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "launcher")]
pub mod launcher;

mod arguments;
mod buffer;
mod clock;
mod communicator;
mod control;
mod element;
mod environment;
mod error;
mod ext;
mod failure;
mod faulty;
mod flight;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod last_words;
mod local;
mod lock;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod network;
mod op;
mod open_files;
mod panic;
mod process;
mod reading;
mod reduce;
mod request;
mod tcp;
mod text;
mod throttled;
mod window;
mod windows;
mod work;
mod world;
mod world_error;

#[cfg(feature = "mpi")]
pub use crate::mpi::MpiError;
pub use buffer::{Buffer, BufferMut};
pub use clock::Clock;
pub use communicator::Communicator;
pub use control::{Coordinator, CoordinatorOptions, JoinError, Refusal, Token, TokenError};
/// Whose streams and memory `NcclCommunicator` works with.
#[cfg(feature = "nccl")]
pub use cudarc;
pub use element::Element;
pub use environment::{
    AddressFile, AddressFileError, EnvironmentError, FoundVariables, JobId, Launch, Launcher, Meeting,
    NodeListError, Surroundings, TorchStore, TorchStoreError, expand_node_list,
};
pub use error::{Call, CommError, LossCause};
pub use ext::CommunicatorExt;
pub use faulty::{Fault, FaultKind, FaultPlan, FaultPlanError, Faulty};
pub use flight::{FlightRecord, FlightReport, FlightState, GroupId};
pub use local::LocalWorld;
use lock::lock;
#[cfg(feature = "nccl")]
pub use nccl::{
    Agreement, DeviceBuffer, DeviceBufferMut, DeviceCopier, DeviceCopy, DeviceView, DeviceWindow,
    DeviceWindowHandle, NcclCommunicator, NcclError, NcclGroup, NcclVersion,
};
pub use op::{OpKind, ReduceOp};
pub use panic::panic_message;
pub use process::{ConnectError, ProcessWorld};
pub use throttled::{Link, LinkError, Throttled, Traffic};
pub use window::{Region, WindowKey};
pub use work::{Gather, Work, WorkError, WorkQueue, WorkStats};
pub use world::World;
pub use world_error::{RankFailure, WorldError};
