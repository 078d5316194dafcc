//! What a pipeline makes of it.

use std::panic::{self, AssertUnwindSafe};

use tempfile::TempDir;
use zero_core::Bytes;

use super::{BLOCK, Setup, content, each, faulty::Fault, read};
use crate::store::{Direction, NvmeStore, StoreError, StoreOptions};
use crate::{Pipeline, Table};

const ROWS: u64 = 10_000;

fn tables(store: &NvmeStore) -> Vec<Table> {
    let names = ["first", "second", "third"];
    let mut tables = names.map(|name| Table::reserve(store, name, ROWS, &[("a", 4), ("b", 8)]).unwrap());
    for (seed, table) in tables.iter_mut().enumerate() {
        table.column_mut(0).unwrap().write(0, &content(4 * ROWS as usize, seed as u64)).unwrap();
    }
    tables.into()
}

fn pipeline(setup: &Setup) -> Pipeline {
    // Three times 4096 rows of 12 bytes.
    let budget = Bytes::new(3 * 3 * BLOCK as u64);
    Pipeline::with_queue(&setup.store, budget, |engine, depth, memory| {
        setup.faults.queue(engine, depth, memory)
    })
    .unwrap()
}

fn all(tables: &[Table]) -> Vec<Vec<u8>> {
    let columns = tables.iter().flat_map(|table| [table.column(0).unwrap(), table.column(1).unwrap()]);
    columns.map(|slot| read(slot).unwrap()).collect()
}

fn add_one(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
}

/// Updates everything and checks that it is what comes of `before`.
fn still_works(pipeline: &mut Pipeline, tables: &mut [Table], before: &[Vec<u8>]) {
    assert_eq!(all(tables), before);
    let updated = pipeline.update(tables, |tile| {
        tile.columns.iter_mut().for_each(|column| add_one(column));
        Ok::<_, StoreError>(())
    });
    updated.unwrap();
    let mut after = before.to_vec();
    after.iter_mut().for_each(|column| add_one(column));
    assert_eq!(all(tables), after);
}

#[test]
fn a_table_of_a_store_with_blocks_of_another_size_is_updated_as_well() {
    each(64, |setup| {
        for block in [BLOCK / 4, BLOCK * 4] {
            let directory = TempDir::new().unwrap();
            let block = Bytes::new(block as u64);
            let buffers = Bytes::new(2 * block.get());
            let options = StoreOptions {
                engine: setup.store.engine(),
                block,
                buffers,
                ..StoreOptions::new(directory.path())
            };
            let mut tables = tables(&NvmeStore::open(options).unwrap());
            let before = all(&tables);
            let mut pipeline = Pipeline::new(&setup.store, Bytes::new(32 * BLOCK as u64)).unwrap();
            still_works(&mut pipeline, &mut tables, &before);
        }
    });
}

#[test]
fn the_next_tile_is_read_and_the_last_one_written_while_one_is_updated() {
    each(64, |setup| {
        let (mut tables, mut pipeline) = (tables(&setup.store), pipeline(setup));
        let before = all(&tables);
        still_works(&mut pipeline, &mut tables, &before);

        setup.faults.set(|direction, _| (direction == Direction::Write).then_some(Fault::Held));
        let mut tile = 0;
        let updated = pipeline.update(&mut tables, |_| {
            // 4096 rows are one block and two, the last rows of a table one and one.
            match tile {
                0 => assert_eq!(setup.faults.attempts(), (3 + 3 + 2, 0)),
                1 => {
                    assert_eq!(setup.faults.attempts(), (3 + 3 + 2, 3));
                    assert!(setup.faults.in_flight() >= 3);
                    setup.faults.release();
                }
                _ => {}
            }
            tile += 1;
            Ok::<_, StoreError>(())
        });
        updated.unwrap();
        assert_eq!(tile, 9);
    });
}

#[test]
fn a_failed_transfer_leaves_every_table_as_it_was() {
    each(8, |setup| {
        let (mut tables, mut pipeline) = (tables(&setup.store), pipeline(setup));
        let mut before = all(&tables);
        for failing in [Direction::Read, Direction::Write] {
            for at in [0, 1, 7] {
                setup.faults.set(move |direction, number| {
                    (direction == failing && number == at).then_some(Fault::Error(libc::EIO))
                });
                let failed = pipeline.update(&mut tables, |tile| {
                    tile.columns.iter_mut().for_each(|column| add_one(column));
                    Ok::<_, StoreError>(())
                });
                let error = failed.unwrap_err();
                assert!(
                    matches!(&error, StoreError::Io { direction, .. } if *direction == failing),
                    "{error}"
                );
                assert_eq!(setup.faults.in_flight(), 0);
                setup.faults.clear();
                still_works(&mut pipeline, &mut tables, &before);
                before = all(&tables);
            }
        }
    });
}

#[test]
fn an_error_or_a_panic_of_the_update_leaves_every_table_as_it_was() {
    each(8, |setup| {
        let (mut tables, mut pipeline) = (tables(&setup.store), pipeline(setup));
        let before = all(&tables);
        let mut tiles = 0;
        let failed = pipeline.update(&mut tables, |tile| {
            tile.columns.iter_mut().for_each(|column| add_one(column));
            tiles += 1;
            if tiles == 5 { Err(StoreError::Busy { tensor: "the fifth".to_owned() }) } else { Ok(()) }
        });
        assert!(failed.unwrap_err().to_string().contains("the fifth"));
        assert_eq!((tiles, setup.faults.in_flight()), (5, 0));
        still_works(&mut pipeline, &mut tables, &before);

        let before = all(&tables);
        let mut tiles = 0;
        let panicked = panic::catch_unwind(AssertUnwindSafe(|| {
            pipeline.update(&mut tables, |tile| {
                tile.columns.iter_mut().for_each(|column| add_one(column));
                tiles += 1;
                assert!(tiles < 4, "on purpose");
                Ok::<_, StoreError>(())
            })
        }));
        assert!(panicked.is_err());
        assert_eq!((tiles, setup.faults.in_flight()), (4, 0));
        still_works(&mut pipeline, &mut tables, &before);
    });
}

#[test]
fn short_transfers_do_not_show() {
    each(8, |setup| {
        let (mut tables, mut pipeline) = (tables(&setup.store), pipeline(setup));
        let before = all(&tables);
        setup.faults.set(|_, number| (number % 2 == 0).then_some(Fault::Short(4096)));
        still_works(&mut pipeline, &mut tables, &before);
    });
}
