//! Files that somebody, or the disk, has changed.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use tempfile::TempDir;
use zero_offload::{Direction, NvmeStore, StoreError};

use super::{content, engines, options, read};

#[test]
fn a_flipped_bit_is_found_and_named() {
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        let mut slot = store.reserve("layers.0/moment1", 3 * 4096 + 10).unwrap();
        let old = content(3 * 4096 + 10, 1);
        slot.write(0, &old).unwrap();
        let data = OpenOptions::new().read(true).write(true).open(store.path().join("data")).unwrap();
        // Each block lies in one of two places; the first and the last bit of each matter.
        let length = data.metadata().unwrap().len();
        let mut found = Vec::new();
        for at in (0..length).step_by(4096).chain((4095..length).step_by(4096)) {
            let mut byte = [0];
            data.read_exact_at(&mut byte, at).unwrap();
            data.write_all_at(&[byte[0] ^ 1], at).unwrap();
            match read(&slot) {
                Ok(bytes) => assert_eq!(bytes, old),
                Err(StoreError::Corrupt { tensor, path, offset, length }) => {
                    assert_eq!((tensor.as_str(), length), ("layers.0/moment1", 4096));
                    assert_eq!(path, store.path().join("data"));
                    assert!((offset..offset + 4096).contains(&at));
                    found.push(at);
                }
                Err(error) => panic!("{error}"),
            }
            data.write_all_at(&byte, at).unwrap();
        }
        assert_eq!(found.len(), 8);
        assert_eq!(read(&slot).unwrap(), old);
    }
}

#[test]
fn a_truncated_file_is_found_and_a_new_write_mends_it() {
    for engine in engines() {
        for direct in [true, false] {
            for cut in [0, 1, 4095, 4096, 4097, 8191] {
                let directory = TempDir::new().unwrap();
                let mut options = options(directory.path(), engine);
                options.direct = direct;
                let store = NvmeStore::open(options).unwrap();
                let mut slot = store.reserve("moment", 8192).unwrap();
                // Twice: the current content is in the first half of the file.
                (0..2).for_each(|seed| slot.write(0, &content(8192, seed)).unwrap());
                let data = OpenOptions::new().write(true).open(store.path().join("data")).unwrap();
                data.set_len(cut).unwrap();
                match read(&slot).unwrap_err() {
                    StoreError::Short { direction, tensor, path, offset, length, done } => {
                        assert_eq!((direction, tensor.as_str(), length), (Direction::Read, "moment", 4096));
                        assert_eq!(path, store.path().join("data"));
                        assert!(offset + done as u64 <= cut);
                    }
                    error => panic!("{error}"),
                }
                (0..2).for_each(|seed| slot.write(0, &content(8192, seed + 7)).unwrap());
                assert_eq!(read(&slot).unwrap(), content(8192, 8));
            }
        }
    }
}

#[test]
fn a_deleted_file_serves_its_store_to_the_end() {
    for engine in engines() {
        let directory = TempDir::new().unwrap();
        let store = NvmeStore::open(options(directory.path(), engine)).unwrap();
        let mut slot = store.reserve("moment", 8193).unwrap();
        slot.write(0, &content(8193, 1)).unwrap();
        fs::remove_dir_all(store.path()).unwrap();
        assert_eq!(read(&slot).unwrap(), content(8193, 1));
        slot.write(0, &content(8193, 2)).unwrap();
        assert_eq!(read(&slot).unwrap(), content(8193, 2));
    }
}
