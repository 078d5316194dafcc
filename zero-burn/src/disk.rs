//! Training state on a disk.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use zero_core::{Bytes, Offload};
use zero_offload::{NvmeStore, Pipeline, StoreError, StoreOptions, Table};

use crate::ZeroError;
use crate::base::Base;
use crate::engine::lock;

/// A rank's store, and the buffers through which it is updated.
#[derive(Debug)]
pub(crate) struct Disk {
    store: NvmeStore,
    pipeline: Mutex<Pipeline>,
    traffic: Arc<Traffic>,
}

impl Disk {
    pub(crate) fn open(base: &Base) -> Result<Self, ZeroError> {
        let open = || {
            let offload = base.offload();
            // States pass through the pipeline's buffers; only what is written at first needs others.
            let store = open_store(base, offload.optimizer.path.as_deref(), offload.block_bytes)?;
            let pipeline = Pipeline::new(&store, offload.buffer_bytes)?;
            Ok(Self { store, pipeline: Mutex::new(pipeline), traffic: Arc::clone(&base.traffic) })
        };
        open().map_err(|error: StoreError| {
            ZeroError::from(error).during("opening the disk for optimizer state")
        })
    }

    /// Room for `rows` of `columns`, each of a name, a number of bytes per row and what it holds at first.
    pub(crate) fn reserve(
        &self,
        name: &str,
        rows: usize,
        columns: &[(&str, usize, Vec<u8>)],
    ) -> Result<Table, StoreError> {
        let widths: Vec<_> = columns.iter().map(|(name, width, _)| (*name, *width)).collect();
        let mut table = Table::reserve(&self.store, name, rows as u64, &widths)?;
        for (at, (_, width, initial)) in columns.iter().enumerate() {
            if initial.iter().all(|byte| *byte == 0) {
                continue;
            }
            const ROWS: usize = 1 << 16;
            let some = initial.repeat(ROWS.min(rows));
            for start in (0..rows).step_by(ROWS) {
                let bytes = &some[..(rows - start).min(ROWS) * width];
                if let Some(slot) = table.column_mut(at) {
                    slot.write((start * width) as u64, bytes)?;
                }
            }
        }
        Ok(table)
    }

    /// Runs an update of `bytes` of state, which are read and written.
    pub(crate) fn update<T>(&self, bytes: u64, run: impl FnOnce(&mut Pipeline) -> T) -> T {
        self.traffic.during(2 * bytes, || run(&mut lock(&self.pipeline)))
    }
}

/// A store of this rank in `directory`, which the configuration has where it has a disk, with so much memory for what is not
/// aligned.
pub(crate) fn open_store(
    base: &Base,
    directory: Option<&Path>,
    buffers: Bytes,
) -> Result<NvmeStore, StoreError> {
    let Offload { block_bytes, depth, .. } = *base.offload();
    NvmeStore::open(StoreOptions {
        rank: base.comm.rank(),
        block: block_bytes,
        depth,
        buffers,
        ..StoreOptions::new(directory.unwrap_or_else(|| Path::new("")))
    })
}

/// What went to and from disks, and how long that took.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    bytes: AtomicU64,
    nanos: AtomicU64,
}

impl Traffic {
    /// Runs what moves `bytes`.
    pub(crate) fn during<T>(&self, bytes: u64, run: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let outcome = run();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.nanos.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        outcome
    }

    pub(crate) fn get(&self) -> (Bytes, Duration) {
        let nanos = self.nanos.load(Ordering::Relaxed);
        (Bytes::new(self.bytes.load(Ordering::Relaxed)), Duration::from_nanos(nanos))
    }
}
