//! What a store promises: any size and alignment, checked, beside others, gone afterwards.

#![cfg(unix)]

#[path = "store/common.rs"]
mod common;
#[path = "store/crashes.rs"]
mod crashes;
#[path = "store/damage.rs"]
mod damage;
#[cfg(target_os = "linux")]
#[path = "store/disks.rs"]
mod disks;
#[path = "store/model.rs"]
mod model;
#[path = "store/refusals.rs"]
mod refusals;
#[cfg(target_os = "linux")]
#[path = "store/system.rs"]
mod system;

use std::fs;
use std::path::Path;
use std::thread;

use common::{content, engines, read};
use tempfile::TempDir;
use zero_core::{Bytes, Rank};
use zero_offload::{Engine, HostPool, NvmeStore, Slot, StoreError, StoreOptions};

/// Small blocks and few of them, to have many.
fn options(directory: &Path, engine: Engine) -> StoreOptions {
    let (block, buffers) = (Bytes::new(4096), Bytes::new(3 * 4096));
    StoreOptions { block, buffers, depth: 4, engine, ..StoreOptions::new(directory) }
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_tensor_may_have_any_size() {
    let pool = HostPool::default();
    for engine in engines() {
        for direct in [true, false] {
            let directory = TempDir::new().unwrap();
            let store =
                NvmeStore::open(StoreOptions { direct, ..options(directory.path(), engine) }).unwrap();
            assert_eq!(store.engine(), engine);
            // The disk itself is slow: past the page cache near what could be a border, otherwise everywhere.
            for bytes in (0..=8193).filter(|bytes| !direct || bytes % 61 == 0 || (bytes + 2) % 512 < 5) {
                let new = content(bytes, bytes as u64);
                let mut slot = store.reserve("tensor", bytes as u64).unwrap();
                slot.write(0, &new).unwrap();
                assert!(read(&slot).unwrap() == new, "{bytes} bytes");
                let mut buffer = pool.take(bytes);
                buffer.fill(0xEE);
                assert!(slot.start_read(buffer).unwrap().wait().unwrap()[..] == new, "{bytes} bytes");
            }
            assert_eq!(store.reserved(), Bytes::ZERO);
        }
    }
}

#[test]
fn a_tensor_may_be_larger_than_all_buffers_and_lie_anywhere() {
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        let bytes = 10 * 3 * 4096 + 123;
        let mut slot = store.reserve("tensor", bytes as u64).unwrap();
        // Pages in the memory of the caller, and bytes before them.
        let mut memory = vec![0; bytes + 2 * 4096];
        let page = memory.as_ptr().align_offset(4096);
        for (seed, shift) in [0, 1, 64, 511, 4095].into_iter().enumerate() {
            let new = content(bytes, seed as u64);
            let own = &mut memory[page + shift..][..bytes];
            own.copy_from_slice(&new);
            slot.write(0, own).unwrap();
            own.fill(0xEE);
            slot.read(0, own).unwrap();
            assert!(own == new, "shift {shift}");
        }
    }
}

#[test]
fn whole_tensors_are_read_and_written_behind() {
    let pool = HostPool::default();
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        for bytes in [0, 1, 5000, 128 << 10, (128 << 10) + 1, 999_999] {
            let slot = store.reserve("tensor", bytes as u64).unwrap();
            assert_eq!(slot.start_read(pool.take(bytes)).unwrap().wait().unwrap()[..], vec![0; bytes]);
            let mut buffer = pool.take(bytes);
            buffer.copy_from_slice(&content(bytes, 3));
            let (slot, mut buffer, result) = slot.start_write(buffer).wait();
            result.unwrap();
            buffer.fill(0);
            let tickets = [buffer, pool.take(bytes)].map(|buffer| slot.start_read(buffer).unwrap());
            for ticket in tickets {
                assert!(ticket.wait().unwrap()[..] == content(bytes, 3), "{bytes} bytes");
            }
        }
    }
}

#[test]
fn a_slot_that_is_being_read_is_not_written() {
    for engine in engines() {
        let (directory, pool) = (TempDir::new().unwrap(), HostPool::default());
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        let mut slot = store.reserve("moment", 5000).unwrap();
        let ticket = slot.start_read(pool.take(5000)).unwrap();
        let error = slot.write(0, &[1]).unwrap_err();
        assert!(matches!(&error, StoreError::Busy { tensor } if tensor == "moment"), "{error}");
        let (mut slot, buffer, result) = slot.start_write(pool.take(5000)).wait();
        assert!(matches!(result, Err(StoreError::Busy { .. })));
        drop(buffer);
        assert_eq!(ticket.wait().unwrap()[..], [0; 5000]);
        slot.write(0, &[1]).unwrap();
        assert_eq!(read(&slot).unwrap()[..2], [1, 0]);
    }
}

#[test]
fn a_dropped_ticket_leaves_the_store_as_it_was() {
    for engine in engines() {
        let (directory, pool) = (TempDir::new().unwrap(), HostPool::default());
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        let slot = store.reserve("moment", 200_000).unwrap();
        drop(slot.start_read(pool.take(200_000)).unwrap());
        drop(slot.start_write(pool.take(200_000)));
        assert_eq!((store.reserved(), pool.live()), (Bytes::ZERO, Bytes::ZERO));
    }
}

#[test]
fn threads_share_a_store() {
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        thread::scope(|scope| {
            for thread in 0..8 {
                let store = store.clone();
                scope.spawn(move || {
                    let mut slot = store.reserve("tensor", 50_001).unwrap();
                    for round in 0..10 {
                        let new = content(50_001, thread * 100 + round);
                        slot.write(0, &new).unwrap();
                        assert!(read(&slot).unwrap() == new);
                    }
                });
            }
        });
        assert_eq!(store.reserved(), Bytes::ZERO);
    }
}

#[test]
fn stores_of_several_ranks_and_runs_share_a_directory() {
    let directory = TempDir::new().unwrap();
    let open = |run: &str, rank| {
        let rank = Rank::new(rank);
        NvmeStore::open(StoreOptions { run: run.to_owned(), rank, ..options(directory.path(), Engine::Auto) })
            .unwrap()
    };
    let stores = [open("a", 0), open("a", 1), open("b", 0), open("a", 0)];
    let names = ["zero-offload-a-0-0", "zero-offload-a-0-1", "zero-offload-a-1-0", "zero-offload-b-0-0"];
    assert_eq!(entries(directory.path()), names);

    let mut slots: Vec<_> = stores.iter().map(|store| store.reserve("same", 10_000).unwrap()).collect();
    for (seed, slot) in slots.iter_mut().enumerate() {
        slot.write(0, &content(10_000, seed as u64)).unwrap();
    }
    for (seed, slot) in slots.iter().enumerate() {
        assert_eq!(read(slot).unwrap(), content(10_000, seed as u64));
    }
    drop(slots);
    drop(stores);
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn stores_may_come_and_go_at_once() {
    let directory = TempDir::new().unwrap();
    thread::scope(|scope| {
        for thread in 0..8 {
            let directory = directory.path();
            scope.spawn(move || {
                for round in 0..25 {
                    let store = NvmeStore::open(options(directory, Engine::Threads)).unwrap();
                    let mut slot = store.reserve("tensor", 5000).unwrap();
                    slot.write(0, &content(5000, thread * 100 + round)).unwrap();
                    assert!(store.path().join("data").is_file() && store.path().join("lock").is_file());
                    assert!(read(&slot).unwrap() == content(5000, thread * 100 + round));
                }
            });
        }
    });
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn the_files_go_with_the_last_slot() {
    let directory = TempDir::new().unwrap();
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    let mut slot = store.reserve("tensor", 5000).unwrap();
    drop(store);
    slot.write(4999, &[7]).unwrap();
    assert_eq!(read(&slot).unwrap()[4998..], [0, 7]);
    assert_eq!(entries(directory.path()).len(), 1);
    drop(slot);
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn space_is_reserved_at_once_and_given_back() {
    use std::os::unix::fs::MetadataExt;

    let directory = TempDir::new().unwrap();
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    let blocks = || fs::metadata(store.path().join("data")).unwrap().blocks() * 512;
    let slots: Vec<_> = (0..3).map(|_| store.reserve("tensor", 1 << 20).unwrap()).collect();
    assert_eq!(store.reserved(), Bytes::new(6 << 20));
    assert!(blocks() >= 6 << 20);
    let [first, middle, last] = <[Slot; 3]>::try_from(slots).unwrap();
    drop(middle);
    assert!(blocks() < 5 << 20);
    drop(first);
    drop(last);
    assert_eq!((store.reserved(), fs::metadata(store.path().join("data")).unwrap().len()), (Bytes::ZERO, 0));
}
