//! What a store makes of a disk that goes wrong, with either engine.

#[path = "../../../tests/store/common.rs"]
mod common;
mod faulty;
mod pipeline;

use std::error::Error;

use tempfile::TempDir;
use zero_core::Bytes;

use super::{Direction, Engine, NvmeStore, Slot, StoreError, StoreOptions};
use crate::HostPool;
use common::{content, engines, read};
use faulty::{Fault, Faults};

const BLOCK: usize = 16 << 10;

/// A store whose disk can go wrong.
struct Setup {
    store: NvmeStore,
    faults: Faults,
    _directory: TempDir,
}

impl Setup {
    fn new(engine: Engine, depth: usize) -> Self {
        let directory = TempDir::new().unwrap();
        let block = Bytes::new(BLOCK as u64);
        let buffers = Bytes::new(2 * BLOCK as u64);
        let options = StoreOptions { engine, block, depth, buffers, ..StoreOptions::new(directory.path()) };
        let faults = Faults::default();
        let store =
            NvmeStore::with_queue(options, |engine, depth, memory| faults.queue(engine, depth, memory));
        Self { store: store.unwrap(), faults, _directory: directory }
    }

    fn slot(&self, content: &[u8]) -> Slot {
        let mut slot = self.store.reserve("tensor", content.len() as u64).unwrap();
        slot.write(0, content).unwrap();
        slot
    }
}

/// Runs a test with each engine that there is.
fn each(depth: usize, test: impl Fn(&Setup)) {
    engines().into_iter().for_each(|engine| test(&Setup::new(engine, depth)));
}

#[test]
fn a_transfer_that_was_cut_short_is_resumed() {
    each(8, |Setup { store, faults, .. }| {
        faults.set(|_, _| Some(Fault::Short(4096)));
        let old = content(3 * BLOCK + 5, 1);
        let mut slot = store.reserve("tensor", old.len() as u64).unwrap();
        slot.write(0, &old).unwrap();
        assert_eq!(faults.attempts(), (0, 3 * 4 + 1));
        assert_eq!(read(&slot).unwrap(), old);
        assert_eq!(faults.attempts(), (3 * 4 + 1, 3 * 4 + 1));
    });
}

#[test]
fn an_interrupted_transfer_is_tried_again() {
    each(8, |Setup { store, faults, .. }| {
        faults.set(|_, number| match number % 3 {
            0 => Some(Fault::Error(libc::EINTR)),
            1 => Some(Fault::Error(libc::EAGAIN)),
            _ => None,
        });
        let old = content(5 * BLOCK, 1);
        let mut slot = store.reserve("tensor", old.len() as u64).unwrap();
        slot.write(0, &old).unwrap();
        assert_eq!(read(&slot).unwrap(), old);
        let (reads, writes) = faults.attempts();
        assert!(reads > 5 && writes > 5);
    });
}

#[test]
fn interruptions_without_end_are_an_error() {
    each(1, |setup| {
        let slot = setup.slot(&content(BLOCK, 1));
        setup.faults.set(|_, _| Some(Fault::Error(libc::EINTR)));
        let error = read(&slot).unwrap_err();
        assert!(
            matches!(&error, StoreError::Io { source, .. } if source.raw_os_error() == Some(libc::EINTR)),
            "{error}"
        );
    });
}

#[test]
fn a_failed_read_names_the_tensor_the_place_and_the_cause() {
    each(8, |setup| {
        let old = content(3 * BLOCK + 5, 1);
        let slot = setup.slot(&old);
        setup.faults.set(|_, number| (number == 1).then_some(Fault::Error(libc::EIO)));
        let StoreError::Io { direction, tensor, path, offset, length, source } = read(&slot).unwrap_err()
        else {
            panic!("another error");
        };
        assert_eq!((direction, tensor.as_str(), length), (Direction::Read, "tensor", BLOCK));
        assert_eq!((offset % BLOCK as u64, source.raw_os_error()), (4096, Some(libc::EIO)));
        assert!(path.starts_with(setup.store.path()) && path.is_file());

        setup.faults.clear();
        assert_eq!(read(&slot).unwrap(), old);
    });
}

#[test]
fn a_failed_write_leaves_what_was_there() {
    for errno in [libc::EIO, libc::ENOSPC] {
        each(8, |setup| {
            let (old, new) = (content(4 * BLOCK + 5, 1), content(4 * BLOCK + 5, 2));
            let mut slot = setup.slot(&old);
            for failing in 0..5 {
                setup.faults.set(move |_, number| (number == failing).then_some(Fault::Error(errno)));
                let error = slot.write(0, &new).unwrap_err();
                let source =
                    error.source().and_then(|source| source.downcast_ref::<std::io::Error>()).unwrap();
                assert_eq!(source.raw_os_error(), Some(errno), "{error}");
                setup.faults.clear();
                assert_eq!(read(&slot).unwrap(), old);
            }
            slot.write(0, &new).unwrap();
            assert_eq!(read(&slot).unwrap(), new);
        });
    }
}

#[test]
fn a_write_that_cannot_read_the_rest_of_its_block_changes_nothing() {
    each(8, |setup| {
        let old = content(2 * BLOCK, 1);
        let mut slot = setup.slot(&old);
        setup.faults.set(|direction, _| (direction == Direction::Read).then_some(Fault::Error(libc::EIO)));
        slot.write(BLOCK as u64 - 1, &[0, 0]).unwrap_err();
        setup.faults.clear();
        assert_eq!(read(&slot).unwrap(), old);
    });
}

#[test]
fn no_more_transfers_than_allowed_are_in_flight_and_none_starts_after_a_failure() {
    each(4, |setup| {
        let pool = HostPool::default();
        let slot = setup.store.reserve("tensor", 100 * BLOCK as u64).unwrap();
        setup.faults.set(|_, number| (number < 4).then_some(Fault::Held));
        let ticket = slot.start_write(pool.take(100 * BLOCK));
        assert!(!ticket.is_done());
        assert_eq!((setup.faults.in_flight(), setup.faults.attempts()), (4, (0, 4)));
        setup.faults.release();
        let (slot, _, result) = ticket.wait();
        result.unwrap();
        assert_eq!((setup.faults.in_flight(), setup.faults.most_in_flight()), (0, 4));

        setup.faults.set(|_, _| Some(Fault::Error(libc::EIO)));
        slot.start_read(pool.take(100 * BLOCK)).unwrap().wait().unwrap_err();
        assert!(setup.faults.attempts().0 <= 4);
    });
}

#[test]
fn what_a_slow_disk_has_not_written_is_not_there_yet() {
    each(8, |setup| {
        let pool = HostPool::default();
        let (old, new) = (content(9 * BLOCK + 1, 1), content(9 * BLOCK + 1, 2));
        let slot = setup.slot(&old);
        let mut buffer = pool.take(new.len());
        buffer.copy_from_slice(&new);
        setup.faults.set(|_, _| Some(Fault::Held));
        let ticket = slot.start_write(buffer);
        assert!(!ticket.is_done());
        setup.faults.release();
        let (slot, buffer, result) = ticket.wait();
        result.unwrap();
        assert_eq!(read(&slot).unwrap(), new);

        setup.faults.set(|_, _| Some(Fault::Held));
        let ticket = slot.start_read(buffer).unwrap();
        assert!(!ticket.is_done());
        setup.faults.release();
        assert_eq!(ticket.wait().unwrap()[..], new);
    });
}

#[test]
fn a_failed_write_behind_returns_the_slot_with_what_was_there() {
    each(8, |setup| {
        let pool = HostPool::default();
        let old = content(9 * BLOCK + 1, 1);
        let slot = setup.slot(&old);
        setup.faults.set(|_, number| (number == 3).then_some(Fault::Error(libc::ENOSPC)));
        let (slot, buffer, result) = slot.start_write(pool.take(old.len())).wait();
        result.unwrap_err();
        setup.faults.clear();
        assert_eq!(slot.start_read(buffer).unwrap().wait().unwrap()[..], old);
    });
}
