//! Gradients on a disk, from backward to step.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use zero_core::{Bucket, Bytes, Rank, Stage, Tier};
use zero_offload::{Slot, StoreError};

use crate::ZeroError;
use crate::base::Base;
use crate::disk::{Traffic, open_store};
use crate::engine::lock;

/// Room on a disk for this rank's sums of each bucket.
#[derive(Debug)]
pub(crate) struct Spill {
    /// By bucket; nothing where they stay in memory. With updates beside compute there are two, for the sums that one reads
    /// and for those of the step after it.
    places: Vec<Vec<Arc<Place>>>,
    /// Counts steps.
    turn: AtomicUsize,
}

/// The sums of one bucket on a disk.
#[derive(Debug)]
pub(crate) struct Place {
    slot: Mutex<Slot>,
    /// What went wrong beside compute, until somebody asks.
    failure: Mutex<Option<StoreError>>,
    traffic: Arc<Traffic>,
}

impl Spill {
    /// Room for what the configuration keeps on a disk; `labels` and `sums` have the name of each bucket and the bytes of its
    /// sums here.
    pub(crate) fn open(base: &Base, labels: &[String], sums: &[usize]) -> Result<Option<Self>, ZeroError> {
        let offload = base.offload();
        let placement = &offload.gradients;
        if placement.tier != Tier::Nvme {
            return Ok(None);
        }
        let open = || {
            let largest = Bytes::new(sums.iter().max().copied().unwrap_or(0) as u64);
            let buffers = offload.buffer_bytes.min(largest).max(offload.block_bytes);
            let store = open_store(base, placement.path.as_deref(), buffers)?;
            let mut missing = placement.elements(sums.iter().sum());
            let turns = if offload.delayed_update { 2 } else { 1 };
            let places = labels.iter().zip(sums).map(|(label, &bytes)| {
                if missing == 0 || bytes == 0 {
                    return Ok(Vec::new());
                }
                missing = missing.saturating_sub(bytes);
                let place = |_| {
                    Ok(Arc::new(Place {
                        slot: Mutex::new(store.reserve(label, bytes as u64)?),
                        failure: Mutex::default(),
                        traffic: Arc::clone(&base.traffic),
                    }))
                };
                (0..turns).map(place).collect()
            });
            Ok(Self { places: places.collect::<Result<_, StoreError>>()?, turn: AtomicUsize::new(0) })
        };
        let spill =
            open().map_err(|error: StoreError| ZeroError::from(error).during("making room for gradients"))?;
        Ok(Some(spill))
    }

    pub(crate) fn place(&self, bucket: usize) -> Option<&Arc<Place>> {
        let places = &self.places[bucket];
        places.get(self.turn.load(Ordering::Acquire) % places.len().max(1))
    }

    /// Lets what is there now be, for an update to read: what comes next goes to the other places, if there are some.
    pub(crate) fn turn(&self) {
        self.turn.fetch_add(1, Ordering::AcqRel);
    }

    /// The first thing that went wrong beside compute since the last call.
    pub(crate) fn check(&self) -> Result<(), ZeroError> {
        let failures: Vec<_> =
            self.places.iter().flatten().filter_map(|place| lock(&place.failure).take()).collect();
        failures
            .into_iter()
            .next()
            .map_or(Ok(()), |error| Err(ZeroError::from(error).during("keeping gradients on the disk")))
    }
}

impl Place {
    /// Reads sums from `offset` on, in bytes.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), StoreError> {
        let bytes = into.len() as u64;
        self.traffic.during(bytes, || lock(&self.slot).read(offset as u64, into))
    }

    /// Reads all sums; after a failure they are of no use.
    pub(crate) fn fetch(&self, into: &mut [u8]) {
        if let Err(error) = self.read(0, into) {
            lock(&self.failure).get_or_insert(error);
        }
    }

    /// Writes all sums.
    pub(crate) fn put(&self, sums: &[u8]) {
        let written = self.traffic.during(sums.len() as u64, || lock(&self.slot).write(0, sums));
        if let Err(error) = written {
            lock(&self.failure).get_or_insert(error);
        }
    }
}

/// Bytes of the sums of `bucket` on `rank`.
pub(crate) fn sums_bytes(stage: Stage, rank: Rank, bucket: &Bucket, size: usize) -> usize {
    let numel = if stage.shards_optimizer() { bucket.counts()[rank.index()] } else { bucket.numel() };
    numel * size
}
