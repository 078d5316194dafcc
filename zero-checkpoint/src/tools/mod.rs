//! What is done with checkpoints besides training.

#[cfg(unix)]
mod consolidate;
mod diff;
mod inspect;
#[cfg(unix)]
mod output;
mod verified;
mod verify;

#[cfg(unix)]
pub use consolidate::{ConsolidateOptions, Consolidated, FileLayout, TiedWeights, consolidate};
pub use diff::{Change, diff};
pub use inspect::Summary;
pub use verify::{Problem, verify};

/// Told how many more bytes have been read.
pub type Progress<'a> = &'a mut dyn FnMut(u64);
