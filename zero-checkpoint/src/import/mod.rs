//! Weights that others have published, and weights for others.

mod names;
mod weights;

pub use names::{NameMap, NameMapError};
pub use weights::PublishedWeights;
#[cfg(feature = "fuzzing")]
pub(crate) use weights::read_index;
#[cfg(unix)]
pub(crate) use weights::transpose_bytes;
