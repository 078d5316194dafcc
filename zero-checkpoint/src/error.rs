//! What can be wrong with a checkpoint.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use thiserror::Error;
use zero_core::DType;

/// Why weights could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file is not there, or may not be read.
    #[error("cannot open the weights {}: check the path and its permissions", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The file is there, but reading it failed.
    #[error("cannot read {bytes} bytes at offset {offset} of {}: check the disk or mount it is on", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// How much was to be read.
        bytes: u64,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The file ends before what its header promises.
    #[error(
        "{} is truncated: {expected} bytes expected, {found} found; copy or download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The least length the file must have, in bytes.
        expected: u64,
        /// Its length, in bytes.
        found: u64,
    },

    /// The header is not one of a safetensors file, or contradicts itself.
    #[error("{} is not a valid safetensors file: {reason}; copy or export it again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// No tensor has this name.
    #[error("{} has no tensor '{name}'; {}", path.display(), hint(nearest))]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// The most similar names in the file, nearest first; at most three.
        nearest: Vec<String>,
    },

    /// The tensor's elements are of a type that this crate does not handle.
    #[error("tensor '{name}' in {} holds {dtype}, which cannot be read; convert it to f32 first", path.display())]
    UnsupportedDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The format's name of the type.
        dtype: String,
    },

    /// The tensor's elements are of another type than the one asked for.
    #[error(
        "tensor '{name}' in {} holds {found}, not {expected}; read it as {found} or convert the file",
        path.display()
    )]
    WrongDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The type asked for.
        expected: DType,
        /// The type in the file.
        found: DType,
    },

    /// The range of elements does not lie within the tensor.
    #[error(
        "elements {}..{} of tensor '{name}' in {} were asked for, but it has {numel}; \
         check the partition against the tensor's shape",
        range.start, range.end, path.display()
    )]
    OutOfBounds {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The elements asked for.
        range: Range<usize>,
        /// How many elements the tensor has.
        numel: usize,
    },

    /// Values do not fill the matrix they are said to be.
    #[error("{len} values are no matrix of {rows} x {cols}; pass the shape that the file states")]
    NotAMatrix {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// How many values there are.
        len: usize,
    },
}

fn hint(nearest: &[String]) -> String {
    match nearest {
        [] => "it has no tensors at all".to_owned(),
        _ => format!("the most similar names are '{}'", nearest.join("', '")),
    }
}
