//! What this rank's machine has room for, and how fast.

use std::collections::BTreeSet;
use std::fs;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use zero_comm::{CommunicatorExt, ReduceOp};
use zero_core::{
    Bytes, Footprints, Layout, Machine, Medium, MemorySetup, OptimizerCost, PlacementPlan, Tier,
};
use zero_offload::StoreError;

use crate::ZeroError;
use crate::base::Base;
use crate::disk::open_store;
use crate::error::During;

/// How much is moved to measure a bandwidth: more than caches hold.
const SAMPLE: usize = 64 << 20;

/// Of several tries the quickest counts: others were disturbed.
const TRIES: usize = 3;

/// Chooses the tiers that the configuration leaves to the engine, if it leaves any. Collective, and the same on all ranks:
/// by the largest state and the scarcest machine of any.
pub(crate) fn place(base: &Base, layout: &Layout) -> Result<Option<PlacementPlan>, ZeroError> {
    let offload = &base.config.offload;
    let kinds = [&offload.optimizer, &offload.gradients, &offload.parameters];
    if kinds.iter().all(|kind| kind.tier != Tier::Auto) {
        return Ok(None);
    }
    #[cfg(feature = "cube")]
    if base.port.is_some() {
        return Err(ZeroError::AutoTier { device: format!("{:?}", base.device) });
    }
    let setup = MemorySetup::new(&base.config, OptimizerCost::ADAMW);
    let own = setup.footprints(layout, base.comm.rank(), NonZeroU32::MIN);
    let mut state = [own.optimizer, own.gradients, own.parameters].map(|bytes| bytes.get() as f64);
    let paths: BTreeSet<_> = kinds.iter().filter_map(|kind| kind.path.as_deref()).collect();
    let choosing = || String::from("choosing tiers");
    // The ranks of a host share what is measured, so all of them measure at the same time.
    base.comm.barrier("before memory and disk are measured").during(choosing)?;
    let measured = Measured::new(base, &paths);
    let mut machine = measured.as_ref().map_or_else(|_| [0.0; 7], Measured::to_array);
    let mut agree = || {
        base.comm.all_reduce(&mut state, ReduceOp::Max, "the largest state of a rank")?;
        base.comm.all_reduce(&mut machine, ReduceOp::Min, "the scarcest machine of a rank")
    };
    agree().during(choosing)?;
    measured.map_err(|error| ZeroError::from(error).during("measuring the disk"))?;
    let [optimizer, gradients, parameters] = state.map(|bytes| Bytes::new(bytes as u64));
    let state = Footprints { optimizer, gradients, parameters, ..own };
    let plan = offload.resolve(&state, &Measured::machine(machine));
    let plan = plan.map_err(|error| ZeroError::Placement(Arc::new(error)))?;
    tracing::info!(%plan, "tiers chosen");
    Ok(Some(plan))
}

/// Capacities in bytes and bandwidths in bytes per second.
#[derive(Debug)]
struct Measured {
    memory: Medium,
    disk: Option<Medium>,
}

impl Measured {
    /// Of several disks the scarcest and slowest counts.
    fn new(base: &Base, directories: &BTreeSet<&Path>) -> Result<Self, StoreError> {
        let neighbours = base.comm.ranks_of_host().len() as u64;
        // Half of it is for activations and whatever else there is.
        let capacity = Bytes::new(available_memory().get() / 2 / neighbours);
        // On page boundaries, as what goes to a disk in a step.
        let [mut sample, mut to] = [(); 2].map(|()| base.exports.take(SAMPLE));
        sample.fill(1);
        let rate = quickest(|| {
            let begin = Instant::now();
            to.copy_from_slice(black_box(&sample));
            black_box(&to);
            Ok(begin.elapsed().as_secs_f64())
        })?;
        let mut disk: Option<Medium> = None;
        for directory in directories {
            let store = open_store(base, Some(directory), base.offload().block_bytes)?;
            let capacity = Bytes::new(store.free().get() / neighbours);
            let mut slot = store.reserve("a sample to measure the disk by", SAMPLE as u64)?;
            let write = quickest(|| {
                let begin = Instant::now();
                slot.write(0, &sample)?;
                Ok(begin.elapsed().as_secs_f64())
            })?;
            let read = quickest(|| {
                let begin = Instant::now();
                slot.read(0, &mut sample)?;
                Ok(begin.elapsed().as_secs_f64())
            })?;
            let before = disk.unwrap_or(Medium { capacity, read, write });
            disk = Some(Medium {
                capacity: before.capacity.min(capacity),
                read: before.read.min(read),
                write: before.write.min(write),
            });
        }
        Ok(Self { memory: Medium { capacity, read: rate, write: rate }, disk })
    }

    fn to_array(&self) -> [f64; 7] {
        let numbers = |medium: &Medium| [medium.capacity.get() as f64, medium.read, medium.write];
        let [capacity, read, write] = numbers(&self.memory);
        let disk = self.disk.as_ref().map_or([0.0; 3], numbers);
        [capacity, read, write, f64::from(u8::from(self.disk.is_some())), disk[0], disk[1], disk[2]]
    }

    fn machine(numbers: [f64; 7]) -> Machine {
        let medium = |numbers: &[f64]| Medium {
            capacity: Bytes::new(numbers[0] as u64),
            read: numbers[1],
            write: numbers[2],
        };
        // Flex computes in the host's memory.
        let disk = (numbers[3] > 0.0).then(|| medium(&numbers[4..]));
        Machine { device: medium(&numbers[..3]), host: None, disk }
    }
}

/// Bytes per second of the quickest try.
fn quickest(mut once: impl FnMut() -> Result<f64, StoreError>) -> Result<f64, StoreError> {
    let mut least = f64::INFINITY;
    for _ in 0..TRIES {
        least = least.min(once()?);
    }
    Ok(SAMPLE as f64 / least.max(1e-9))
}

/// What the system can give without swapping.
fn available_memory() -> Bytes {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")).and_then(|kib| kib.trim().parse().ok());
    Bytes::new(kib.unwrap_or(0_u64).saturating_mul(1024))
}
