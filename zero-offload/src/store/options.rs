//! How a store behaves.

use std::fmt;
use std::path::PathBuf;

use zero_core::{Bytes, Rank};

use crate::memory::PAGE;
use crate::store::error::StoreError;

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// io_uring where the system allows it, else threads.
    #[default]
    Auto,
    /// Linux's io_uring; an error where the kernel, or the container, refuses it.
    Uring,
    /// Threads that read and write at positions, one for each transfer in flight.
    Threads,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Uring => "io_uring",
            Self::Threads => "threads",
        })
    }
}

/// How an [`NvmeStore`](crate::NvmeStore) behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// An existing directory on the disk to use. Stores of other ranks and runs may be in it, and anything else.
    pub directory: PathBuf,
    /// A name for the run, for people who look at the disk: ASCII letters, digits, `-`, `_` and `.`, at most 64.
    /// Default: `run`.
    pub run: String,
    /// The rank whose store it is, for the same people. Default: 0.
    pub rank: Rank,
    /// Bytes of one transfer, and of what one checksum covers: a power of two from 4 KiB to 1 GiB. Default: 1 MiB.
    pub block: Bytes,
    /// The most transfers in flight at once, 1 to 4096. Default: 32.
    pub depth: usize,
    /// Aligned memory for tensors that are not aligned themselves: at least one [`block`](Self::block). Default:
    /// 32 MiB.
    pub buffers: Bytes,
    /// Who moves the bytes. Default: [`Engine::Auto`].
    pub engine: Engine,
    /// Whether to go past the page cache (`O_DIRECT`) where the file system can do that. Default: true.
    pub direct: bool,
}

impl StoreOptions {
    /// The defaults, in `directory`.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            run: "run".to_owned(),
            rank: Rank::new(0),
            block: Bytes::new(1 << 20),
            depth: 32,
            buffers: Bytes::new(32 << 20),
            engine: Engine::Auto,
            direct: true,
        }
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let block = self.block.get();
        let rules = [
            (
                (1..=64).contains(&self.run.len()) && self.run.chars().all(allowed),
                "run",
                format!("{:?}", self.run),
                "1 to 64 of the ASCII letters, digits, `-`, `_` and `.`",
            ),
            (
                block.is_power_of_two() && (PAGE as u64..=1 << 30).contains(&block),
                "block",
                self.block.to_string(),
                "a power of two from 4 KiB to 1 GiB",
            ),
            ((1..=4096).contains(&self.depth), "depth", self.depth.to_string(), "1 to 4096"),
            (self.buffers >= self.block, "buffers", self.buffers.to_string(), "at least one `block`"),
        ];
        match rules.into_iter().find(|rule| !rule.0) {
            Some((_, option, value, rule)) => Err(StoreError::Option { option, value, rule }),
            None => Ok(()),
        }
    }
}
