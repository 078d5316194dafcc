//! What is done with checkpoints besides training.

mod consolidate;
mod diff;
mod inspect;
mod output;
mod verified;
mod verify;

pub use consolidate::{ConsolidateOptions, Consolidated, FileLayout, TiedWeights, consolidate};
pub use diff::{Change, diff};
pub use inspect::Summary;
pub use verify::{Problem, verify};

/// Told how many more bytes have been read.
pub type Progress<'a> = &'a mut dyn FnMut(u64);
