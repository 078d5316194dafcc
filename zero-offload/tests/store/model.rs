//! Random use, against what memory would do.

use std::ops::Range;

use proptest::prelude::*;
use tempfile::TempDir;
use zero_core::Bytes;
use zero_offload::{HostPool, NvmeStore, Pipeline, Slot, StoreError, Table};

use super::{content, engines, options, read};

#[derive(Clone, Debug)]
enum Step {
    Reserve { bytes: usize },
    Drop { slot: usize },
    Write { slot: usize, range: Range<usize>, seed: u64 },
    WriteBehind { slot: usize, seed: u64 },
    Read { slot: usize, range: Range<usize> },
}

fn step() -> impl Strategy<Value = Step> {
    let slot = 0_usize..8;
    let range = (0_usize..20_000, 0_usize..20_000).prop_map(|(a, b)| a.min(b)..a.max(b));
    prop_oneof![
        2 => (0_usize..20_000).prop_map(|bytes| Step::Reserve { bytes }),
        1 => slot.clone().prop_map(|slot| Step::Drop { slot }),
        4 => (slot.clone(), range.clone(), 0_u64..1000)
            .prop_map(|(slot, range, seed)| Step::Write { slot, range, seed }),
        1 => (slot.clone(), 0_u64..1000).prop_map(|(slot, seed)| Step::WriteBehind { slot, seed }),
        3 => (slot, range).prop_map(|(slot, range)| Step::Read { slot, range }),
    ]
}

fn within(range: Range<usize>, bytes: usize) -> Range<usize> {
    range.start.min(bytes)..range.end.min(bytes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_store_holds_what_memory_would(steps in prop::collection::vec(step(), 1..40)) {
        let pool = HostPool::default();
        for engine in engines() {
            let directory = TempDir::new().unwrap();
            let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
            let mut slots: Vec<(Slot, Vec<u8>)> = Vec::new();
            for step in steps.clone() {
                let count = slots.len();
                match step {
                    Step::Reserve { bytes } => {
                        slots.push((store.reserve("tensor", bytes as u64).unwrap(), vec![0; bytes]));
                    }
                    Step::Drop { slot } if count > 0 => drop(slots.swap_remove(slot % count)),
                    Step::Write { slot, range, seed } if count > 0 => {
                        let (slot, model) = &mut slots[slot % count];
                        let range = within(range, model.len());
                        model[range.clone()].copy_from_slice(&content(range.len(), seed));
                        slot.write(range.start as u64, &model[range]).unwrap();
                    }
                    Step::WriteBehind { slot, seed } if count > 0 => {
                        let (slot, mut model) = slots.swap_remove(slot % count);
                        model = content(model.len(), seed);
                        let mut buffer = pool.take(model.len());
                        buffer.copy_from_slice(&model);
                        let (slot, _, result) = slot.start_write(buffer).wait();
                        result.unwrap();
                        slots.push((slot, model));
                    }
                    Step::Read { slot, range } if count > 0 => {
                        let (slot, model) = &slots[slot % count];
                        let range = within(range, model.len());
                        let mut bytes = vec![0xEE; range.len()];
                        slot.read(range.start as u64, &mut bytes).unwrap();
                        prop_assert!(bytes == model[range]);
                    }
                    _ => {}
                }
                let reserved: usize = slots.iter().map(|(_, model)| 2 * model.len().next_multiple_of(4096)).sum();
                prop_assert_eq!(store.reserved(), Bytes::new(reserved as u64));
            }
            for (slot, model) in &slots {
                prop_assert!(read(slot).unwrap() == *model);
            }
        }
    }

    #[test]
    fn a_pipeline_passes_every_row_once(
        tables in prop::collection::vec((0_u64..6000, prop::collection::vec(1_usize..13, 1..4)), 1..5),
        spare in 0_u64..200_000,
    ) {
        for engine in engines() {
            let directory = TempDir::new().unwrap();
            let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
            let mut tables: Vec<_> = tables.iter().map(|(rows, widths)| {
                let columns: Vec<_> = widths.iter().map(|&width| ("column", width)).collect();
                Table::reserve(&store, "table", *rows, &columns).unwrap()
            }).collect();
            // What any of them needs: 4096 rows of three columns.
            let mut pipeline = Pipeline::new(&store, Bytes::new(3 * 4096 * 36 + spare)).unwrap();
            for round in 1..=2_u8 {
                let mut next = (0, 0);
                pipeline.update(&mut tables, |tile| {
                    if next.0 != tile.table {
                        next = (tile.table, 0);
                    }
                    assert_eq!(tile.rows.start, next.1);
                    next.1 = tile.rows.end;
                    for column in &mut tile.columns {
                        let width = column.len() / (tile.rows.end - tile.rows.start) as usize;
                        for (row, bytes) in tile.rows.clone().zip(column.chunks_exact_mut(width)) {
                            assert!(round == 1 || bytes.iter().all(|&byte| byte == (row % 251) as u8));
                            bytes.fill(((row % 251) as u8).wrapping_mul(round));
                        }
                    }
                    Ok::<_, StoreError>(())
                }).unwrap();
            }
            for (table, column) in tables.iter().flat_map(|table| (0..3).map(move |column| (table, column))) {
                let Some(slot) = table.column(column) else { continue };
                let width = slot.bytes().checked_div(table.rows()).unwrap_or(1) as usize;
                for (row, bytes) in (0..table.rows()).zip(read(slot).unwrap().chunks_exact(width)) {
                    prop_assert!(bytes.iter().all(|&byte| byte == ((row % 251) as u8).wrapping_mul(2)));
                }
            }
        }
    }
}
