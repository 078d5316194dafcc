//! Weights that others have published, and weights for others.

mod names;
mod weights;

pub use names::{NameMap, NameMapError};
pub use weights::PublishedWeights;
pub(crate) use weights::transpose_bytes;
