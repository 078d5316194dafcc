//! What saving, loading and consolidating take of memory: one buffer.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{blank, contents, facts, spec, wanted, whole};
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, ConsolidateOptions, LoadOptions, LocalStorage, NameMap, PublishedWeights, Saver,
    SaverOptions, Solo, Storage, consolidate, verify,
};
use zero_core::{Bytes, Rank, Stage, WorldSize};

/// The system's allocator, and how much of it is in use.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all memory comes from the system's allocator, whose contract is the same.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the memory is that of `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `run` takes at its peak above what was there before, in bytes, and what it leaves.
fn taken<T>(run: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = run();
    (result, PEAK.load(Ordering::Relaxed) - before, LIVE.load(Ordering::Relaxed).saturating_sub(before))
}

/// What manifests, headers, threads and channels take: next to nothing of a buffer.
const SLACK: usize = 256 << 10;

// One test, for there is one allocator.
#[test]
fn everything_goes_through_a_buffer_a_tenth_of_the_model() {
    let folder = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path().join("checkpoints")));
    let budget = 4 << 20;
    let (rank, world) = (Rank::ROOT, WorldSize::ONE);
    let model = [
        whole(spec("a", &[2000, 1000]), 1),
        whole(spec("b", &[1500, 1001]), 2),
        whole(spec("c", &[700_000]), 3),
    ];
    let bytes: usize = model.iter().map(|whole| whole.values.len() * 10).sum();
    assert!(bytes > 10 * budget);

    // Saved from where it lies.
    let options = SaverOptions { buffer: Bytes::new(budget as u64), ..SaverOptions::default() };
    let mut saver = Saver::new(Arc::clone(&storage), Arc::new(Solo), options).unwrap();
    let step = |step| contents(&model, None, facts(step, Stage::Three, 1), rank, world);
    let (_, peak, _) = taken(|| saver.save(&step(1)).unwrap());
    assert!(peak <= budget + 2 * 4096 + SLACK, "a save took {peak}");

    // Twenty times more: nothing that the first one did not take.
    let first = step(2);
    let (_, peak, left) = taken(|| (0..20).for_each(|_| drop(saver.save(&first).unwrap())));
    assert!(peak <= SLACK && left <= 1024, "saves took {peak} and left {left}");

    // Twenty times beside training: one snapshot.
    let (_, peak, _) = taken(|| saver.save_async(&first).unwrap().wait().unwrap());
    assert!(peak <= bytes + (2 << 20) + SLACK, "a snapshot took {peak}");
    let (_, peak, left) =
        taken(|| (0..20).for_each(|_| drop(saver.save_async(&first).unwrap().wait().unwrap())));
    assert!(peak <= SLACK && left <= 4096, "snapshots took {peak} and left {left}");
    drop(saver);

    let checkpoint = Checkpoint::open(storage, 1).unwrap();
    let mut loaded = blank(&model);
    let options = LoadOptions { buffer: Bytes::new(budget as u64), ..LoadOptions::default() };
    let (_, peak, left) = taken(|| {
        let wanted = wanted(&mut loaded, None, Stage::Three, rank, world);
        checkpoint.load(wanted, &options, &Solo).unwrap();
    });
    assert!(peak <= budget + (2 << 20) + SLACK && left <= 4096, "a load took {peak} and left {left}");
    assert!(loaded.iter().zip(&model).all(|(loaded, whole)| loaded.values == whole.values));

    let (_, peak, _) = taken(|| verify(&checkpoint, &mut |_| ()).unwrap());
    assert!(peak <= (1 << 20) + SLACK, "to verify took {peak}");

    let to = folder.path().join("weights");
    let options = ConsolidateOptions { buffer: Bytes::new(budget as u64), ..ConsolidateOptions::default() };
    let (_, peak, _) = taken(|| consolidate(&checkpoint, &to, &options, &mut |_| ()).unwrap());
    assert!(peak <= budget + SLACK, "to consolidate took {peak}");

    let weights = PublishedWeights::open(&to, NameMap::default()).unwrap();
    let mut loaded = blank(&model);
    let options = LoadOptions { buffer: Bytes::new(budget as u64), ..LoadOptions::default() };
    let (_, peak, _) = taken(|| {
        weights.load(wanted(&mut loaded, None, Stage::Three, rank, world), &options).unwrap();
    });
    assert!(peak <= budget + SLACK, "to load plain weights took {peak}");
    assert!(loaded.iter().zip(&model).all(|(loaded, whole)| loaded.values == whole.values));
}
