//! Sharded checkpoints; today this crate does one part of that, it reads safetensors weights, validated and
//! by range.
//!
//! ```
//! use zero_checkpoint::{WeightsFile, transpose};
//! # use safetensors::{Dtype, tensor::TensorView};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! # let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
//! # let view = TensorView::new(Dtype::F32, vec![2, 3], &bytes)?;
//! # safetensors::serialize_to_file([("head.weight", view)], None, &path)?;
//!
//! let file = WeightsFile::open(&path)?;
//! assert_eq!(file.names().collect::<Vec<_>>(), ["head.weight"]);
//! assert_eq!(file.info("head.weight")?.shape, [2, 3]);
//!
//! // A shard: only these 8 bytes are read.
//! assert_eq!(file.read_f32_range("head.weight", 2..4)?, [3.0, 4.0]);
//!
//! // A linear layer as PyTorch stores it, laid out as Burn wants it.
//! let weight = file.read_f32("head.weight")?;
//! assert_eq!(transpose(&weight, 2, 3)?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//!
//! - `weights`: [`WeightsFile`], the reader, and [`TensorInfo`], what it knows of a tensor before reading it.
//! - `transpose`: [`transpose()`], from PyTorch's layout of a linear layer to Burn's.
//! - `error`: [`CheckpointError`], one variant per cause.
//!
//! # Features
//!
//! None.

mod error;
mod positioned;
mod transpose;
mod weights;

pub use error::CheckpointError;
pub use transpose::transpose;
pub use weights::{TensorInfo, WeightsFile};
