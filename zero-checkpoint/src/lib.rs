//! Sharded checkpoints: there as a whole or not at all, verified, loadable at any world size and stage; and weights in plain
//! safetensors files.
//!
//! ```
//! use std::sync::Arc;
//!
//! use zero_checkpoint::{
//!     Checkpoint, Contents, Data, Facts, Held, LoadOptions, MemoryStorage, SavedParameter, SavedState, Saver,
//!     SaverOptions, Solo, Storage, Target, Wanted, WantedParameter, WantedState, WeightLayout,
//! };
//! use zero_core::{DType, ParameterSpec, Stage};
//!
//! let spec = ParameterSpec {
//!     name: "head.weight".to_owned(),
//!     shape: vec![2, 3],
//!     dtype: DType::F32,
//!     trainable: true,
//!     aliases: vec![],
//! };
//! // A `LocalStorage` is a folder. `Solo` is a world of one rank; each rank of a larger one has a `Coordinator`.
//! let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
//! let mut saver = Saver::new(Arc::clone(&storage), Arc::new(Solo), SaverOptions::default())?;
//! saver.save(&Contents {
//!     facts: Facts::new(1000, Stage::Three),
//!     rank_state: serde_json::Value::Null,
//!     parameters: vec![SavedParameter {
//!         spec: spec.clone(),
//!         layout: WeightLayout::InOut,
//!         group: None,
//!         updates: 1000,
//!         held: Held::Part(0..6), // this rank's elements
//!         values: Data::f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
//!         states: vec![SavedState { name: "first_moment".to_owned(), data: Data::f32(&[0.5; 6]) }],
//!     }],
//! })?;
//!
//! // Any rank of any world asks for the elements that it holds: here the second of two.
//! let checkpoint = Checkpoint::open_latest(storage)?;
//! let (mut values, mut first_moment) = ([0.0; 3], [0.0; 3]);
//! let report = checkpoint.load(
//!     Wanted {
//!         parameters: vec![WantedParameter {
//!             spec,
//!             layout: WeightLayout::InOut,
//!             range: 3..6,
//!             values: Target::f32(&mut values),
//!             states: vec![WantedState {
//!                 name: "first_moment".to_owned(),
//!                 target: Target::f32(&mut first_moment),
//!             }],
//!         }],
//!     },
//!     &LoadOptions::default(),
//!     &Solo,
//! )?;
//! assert_eq!((values, first_moment), ([4.0, 5.0, 6.0], [0.5; 3]));
//! assert_eq!((checkpoint.manifest().step, report.parameters[0].updates), (1000, 1000));
//! # Ok::<(), zero_checkpoint::CheckpointError>(())
//! ```
//!
//! `docs/checkpoint-format.md` describes the files.
//!
//! # Modules
//!
//! - `save`: [`Saver`], which writes the [`Contents`] of all ranks as one checkpoint, at once or beside training, and its
//!   parts: which elements a rank writes, its file, the protocol between ranks, [`Retention`], leftovers.
//! - `load`: [`Checkpoint`], which gives each rank what is [`Wanted`]; [`Difference`]s that are told, and how to [`Allow`]
//!   them.
//! - `manifest`: [`Manifest`], what a checkpoint says about itself, and [`Facts`], what is recorded besides numbers.
//! - `bytes`: [`Data`] and [`Target`], numbers in memory or elsewhere, read and written by pieces.
//! - `coordinator`: [`Coordinator`], what ranks need of each other.
//! - `storage`: [`Storage`], a place for checkpoints: [`LocalStorage`], [`MemoryStorage`], `ObjectStorage`.
//! - `tools`: [`Summary`], [`verify`], [`consolidate`], [`diff`]; the program `zero-ckpt` is made of them.
//! - `import`: [`PublishedWeights`], plain weights by intervals, and [`NameMap`], what others call parameters.
//! - `weights`: [`WeightsFile`], the reader of a safetensors file, and [`TensorInfo`], what it knows of a tensor before
//!   reading it.
//! - `transpose`: [`transpose()`], from PyTorch's layout of a linear layer to Burn's.
//! - `digest`: [`Digest`], the hash of files and their chunks.
//! - `folder`, `header`, `memory`: names of folders; the beginning of a safetensors file; memory for transfers.
//! - `error`: [`CheckpointError`], one variant per cause.
//!
//! # Features
//!
//! - `cli`: the program `zero-ckpt`. Off by default.
//! - `object_store`: `ObjectStorage`, checkpoints in whatever the crate of this name has access to; needs Rust 1.88. Off by
//!   default.
//! - `fuzzing`: entry points for fuzzers. Off by default.
//!
//! `LocalStorage` and `consolidate` need Unix.

mod bytes;
mod coordinator;
mod digest;
mod error;
mod folder;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod import;
mod load;
mod manifest;
mod memory;
mod positioned;
mod save;
mod storage;
mod tools;
mod transpose;
mod weights;

pub use bytes::{Data, ReadBytes, Target, WriteBytes};
pub use coordinator::{BoxError, Coordinator, Solo};
pub use digest::{Digest, NotADigest};
pub use error::CheckpointError;
pub use import::{NameMap, NameMapError, PublishedWeights};
pub use load::{
    Allow, Checkpoint, Difference, LoadOptions, LoadReport, LoadedParameter, Wanted, WantedParameter,
    WantedState,
};
pub use manifest::{
    Facts, FileRecord, Manifest, MeshAxis, ModelIdentity, ParameterGroup, ParameterRecord, Piece, Registry,
    TensorRecord, TrainingState, WeightLayout,
};
pub use save::{
    Contents, Held, OnBusy, Pending, Retention, Saved, SavedParameter, SavedState, Saver, SaverOptions,
    prune, superfluous,
};
#[cfg(unix)]
pub use storage::LocalStorage;
#[cfg(feature = "object_store")]
pub use storage::ObjectStorage;
pub use storage::{MemoryStorage, ReadFile, ReadFolder, Storage, Usage, WriteFile};
pub use tools::{Change, Problem, Progress, Summary, diff, verify};
#[cfg(unix)]
pub use tools::{ConsolidateOptions, Consolidated, FileLayout, TiedWeights, consolidate};
pub use transpose::transpose;
pub use weights::{TensorInfo, WeightsFile};
