//! What can go wrong outside memory.

use std::fmt;
use std::io;
use std::path::PathBuf;

use zero_core::Bytes;

/// Which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "reading",
            Self::Write => "writing",
        })
    }
}

/// Why an [`NvmeStore`](crate::NvmeStore), or what lives in one, could not do what it was asked for.
///
/// Nothing here costs the content of a slot: what a slot held before a failed write it still holds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// An option has no meaning.
    #[error("the store's option `{option}` is {value}; it must be {rule}")]
    Option {
        /// The field of [`StoreOptions`](crate::StoreOptions).
        option: &'static str,
        /// What it is.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// The directory cannot be used.
    #[error("cannot use {path} for a store: {source}; name an existing directory that may be written to")]
    Directory {
        /// The directory, or what could not be made in it.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is not enough memory for the buffers.
    #[error(
        "no memory for {wanted} of buffers: lower the store's option `buffers`, or the pipeline's budget"
    )]
    NoMemory {
        /// What was asked for.
        wanted: Bytes,
    },
    /// io_uring was asked for, and there is none.
    #[error(
        "no io_uring here: {source}; allow it, or set the store's option `engine` to `Auto` or `Threads`"
    )]
    NoUring {
        /// What the system said.
        source: io::Error,
    },
    /// The threads that do the I/O could not be started.
    #[error("cannot start the threads of a store: {source}; allow more threads or lower its option `depth`")]
    NoThreads {
        /// What the system said.
        source: io::Error,
    },
    /// The disk is too full for a tensor.
    #[error(
        "no space for tensor `{tensor}` in {path}: it needs {wanted} (twice its size), {free} are free; make room or \
         name a larger disk"
    )]
    NoSpace {
        /// The name of the tensor.
        tensor: String,
        /// The store's file.
        path: PathBuf,
        /// What was asked for.
        wanted: Bytes,
        /// What the file system has left for this user.
        free: Bytes,
    },
    /// Space could not be reserved for another reason than a full disk.
    #[error("cannot reserve {wanted} for tensor `{tensor}` in {path}: {source}")]
    Reserve {
        /// The name of the tensor.
        tensor: String,
        /// The store's file.
        path: PathBuf,
        /// What was asked for.
        wanted: Bytes,
        /// What the system said.
        source: io::Error,
    },
    /// The system could not read or write.
    #[error("{direction} tensor `{tensor}`, {length} bytes at {offset} of {path}, failed: {source}")]
    Io {
        /// Which of the two.
        direction: Direction,
        /// The name of the tensor.
        tensor: String,
        /// The store's file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// How many bytes.
        length: usize,
        /// What the system said, with its number.
        source: io::Error,
    },
    /// A transfer ended before all of it was done, and did not go on when it was resumed.
    #[error(
        "{direction} tensor `{tensor}`, {length} bytes at {offset} of {path}, stopped after {done} bytes; did somebody \
         else cut the file?"
    )]
    Short {
        /// Which of the two.
        direction: Direction,
        /// The name of the tensor.
        tensor: String,
        /// The store's file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// How many bytes.
        length: usize,
        /// How many of them were transferred.
        done: usize,
    },
    /// What was read is not what was written.
    #[error(
        "tensor `{tensor}`, {length} bytes at {offset} of {path}, is not what was written there: somebody else wrote \
         to the file, or the disk is failing"
    )]
    Corrupt {
        /// The name of the tensor.
        tensor: String,
        /// The store's file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// How many bytes were compared.
        length: usize,
    },
    /// Part of what was named lies outside the tensor.
    #[error("{length} bytes at {offset} are not all within tensor `{tensor}` of {bytes} bytes")]
    Range {
        /// The name of the tensor.
        tensor: String,
        /// Its size.
        bytes: u64,
        /// Where the range begins.
        offset: u64,
        /// Bytes in the range.
        length: usize,
    },
    /// A slot cannot be written while it is being read.
    #[error("tensor `{tensor}` is still being read: wait for its reads before writing to it")]
    Busy {
        /// The name of the tensor.
        tensor: String,
    },
    /// A table's columns cannot be.
    #[error("table `{table}` of {rows} rows cannot have a column `{column}` of {width} bytes a row")]
    Column {
        /// The name of the table.
        table: String,
        /// How many rows it was to have.
        rows: u64,
        /// The name of the column.
        column: String,
        /// Bytes of a row of it.
        width: usize,
    },
    /// A pipeline has too little memory for one of its tables.
    #[error(
        "table `{table}` cannot pass through {budget} of buffers: it needs {least} at least; allow more or lower the \
         store's option `block`"
    )]
    Budget {
        /// The name of the table.
        table: String,
        /// What the pipeline may use.
        budget: Bytes,
        /// The least it must be for this table.
        least: Bytes,
    },
}
