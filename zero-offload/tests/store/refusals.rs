//! What a store says no to.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use zero_core::Bytes;
use zero_offload::{Engine, NvmeStore, Pipeline, StoreError, StoreOptions, Table};

use super::{content, engines, options, read};

#[test]
fn options_without_a_meaning_are_refused() {
    let directory = TempDir::new().unwrap();
    let good = StoreOptions::new(directory.path());
    let block = |bytes| StoreOptions { block: Bytes::new(bytes), ..good.clone() };
    let bad = [
        ("run", StoreOptions { run: String::new(), ..good.clone() }),
        ("run", StoreOptions { run: "../up".to_owned(), ..good.clone() }),
        ("run", StoreOptions { run: "x".repeat(65), ..good.clone() }),
        ("block", block(0)),
        ("block", block(2048)),
        ("block", block(3 << 20)),
        ("block", block(2 << 30)),
        ("depth", StoreOptions { depth: 0, ..good.clone() }),
        ("depth", StoreOptions { depth: 4097, ..good.clone() }),
        ("buffers", StoreOptions { buffers: Bytes::new(4096), ..good.clone() }),
    ];
    for (name, options) in bad {
        let error = NvmeStore::open(options).unwrap_err();
        assert!(matches!(&error, StoreError::Option { option, .. } if *option == name), "{error}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn more_buffers_than_there_is_memory_are_refused() {
    let directory = TempDir::new().unwrap();
    let all = Bytes::new(u64::MAX);
    let error =
        NvmeStore::open(StoreOptions { buffers: all, ..StoreOptions::new(directory.path()) }).unwrap_err();
    assert!(matches!(error, StoreError::NoMemory { wanted } if wanted == all));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    let error = Pipeline::new(&store, all).unwrap_err();
    assert!(matches!(error, StoreError::NoMemory { wanted } if wanted == all));
}

#[test]
fn a_directory_that_is_none_is_refused() {
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "mine").unwrap();
    for path in [file, directory.path().join("missing"), PathBuf::new()] {
        let error = NvmeStore::open(StoreOptions::new(&path)).unwrap_err();
        assert!(matches!(&error, StoreError::Directory { path: named, .. } if *named == path), "{error}");
    }
}

#[test]
fn what_lies_outside_a_tensor_is_refused() {
    let directory = TempDir::new().unwrap();
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    let mut slot = store.reserve("moment", 10).unwrap();
    for (at, bytes) in [(0, 11), (10, 1), (11, 0), (u64::MAX, 1)] {
        let mut memory = vec![1; bytes];
        for error in [slot.write(at, &memory).unwrap_err(), slot.read(at, &mut memory).unwrap_err()] {
            let StoreError::Range { tensor, bytes: size, offset, length } = error else { panic!("{error}") };
            assert_eq!((tensor.as_str(), size, offset, length), ("moment", 10, at, bytes));
        }
    }
    slot.write(10, &[]).unwrap();
    assert_eq!(read(&slot).unwrap(), [0; 10]);
}

#[test]
fn a_tensor_that_no_disk_can_hold_is_refused_and_takes_nothing() {
    let directory = TempDir::new().unwrap();
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    for bytes in [1 << 50, u64::MAX / 2, u64::MAX] {
        let error = store.reserve("huge", bytes).unwrap_err();
        assert!(matches!(error, StoreError::NoSpace { .. } | StoreError::Reserve { .. }), "{error}");
        assert_eq!(store.reserved(), Bytes::ZERO);
    }
    let mut slot = store.reserve("moment", 10).unwrap();
    slot.write(0, &content(10, 1)).unwrap();
    assert_eq!(read(&slot).unwrap(), content(10, 1));
}

#[test]
fn a_budget_too_small_is_refused_with_the_least() {
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        // 1024 rows make whole blocks of the first column, 4096 of the second.
        let columns = [("moment", 4), ("mask", 1)];
        let mut tables = [
            Table::reserve(&store, "small", 100, &columns).unwrap(),
            Table::reserve(&store, "layers.0", 10_000, &columns).unwrap(),
        ];
        let mut update = |budget| {
            let mut rows = [0; 2];
            let mut pipeline = Pipeline::new(&store, Bytes::new(budget)).unwrap();
            assert!(pipeline.buffers().get() <= budget);
            let updated = pipeline.update(&mut tables, |tile| {
                rows[tile.table] += tile.rows.end - tile.rows.start;
                Ok::<_, StoreError>(())
            });
            updated.map(|()| rows)
        };
        for given in [0, 1, 3 * 5 * 4096 - 1] {
            let StoreError::Budget { table, budget, least } = update(given).unwrap_err() else {
                panic!("another")
            };
            assert!(budget.get() <= given);
            assert_eq!(
                (table.as_str(), least),
                if given < 4096 {
                    ("small", Bytes::new(3 * 2 * 4096))
                } else {
                    ("layers.0", Bytes::new(3 * 5 * 4096))
                }
            );
        }
        assert_eq!(update(3 * 5 * 4096).unwrap(), [100, 10_000]);
    }
}

#[test]
fn a_column_of_no_width_or_beyond_all_bounds_is_refused() {
    let directory = TempDir::new().unwrap();
    let store = NvmeStore::open(options(directory.path(), Engine::Auto)).unwrap();
    for (rows, width) in [(5, 0), (0, 0), (u64::MAX, 2)] {
        let error = Table::reserve(
            &store,
            "layers.0",
            rows,
            &[("good", 1), ("bad", width)]
                .map(|column| if rows == u64::MAX { ("bad", column.1.max(2)) } else { column }),
        );
        let error = error.unwrap_err();
        assert!(matches!(&error, StoreError::Column { table, .. } if table == "layers.0"), "{error}");
        assert_eq!(store.reserved(), Bytes::ZERO);
    }
}
