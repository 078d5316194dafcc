//! The fuzz targets' functions, on what they are meant for and on random variations of it.

mod common;

use std::sync::Arc;

use common::{model, save};
use proptest::prelude::*;
use zero_checkpoint::fuzzing::{open, read_index, sealed};
use zero_checkpoint::{Checkpoint, MemoryStorage, Storage};
use zero_core::Stage;

/// A manifest without its end.
fn body() -> Vec<u8> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, &model(1)[4..], 1, Stage::Three, 2);
    let bytes = Checkpoint::open_latest(storage).unwrap().manifest().to_bytes();
    let text = String::from_utf8(bytes).unwrap();
    text.rsplit_once(",\"hash\"").unwrap().0.as_bytes().to_vec()
}

#[test]
fn a_manifest_opens_sealed_and_not_otherwise() {
    assert!(open(&sealed(&body()), b"other content"));
    assert!(!open(&body(), b"other content"));
}

#[test]
fn files_of_an_index_stay_in_its_folder() {
    assert_eq!(read_index(br#"{"weight_map": {"a": "b.safetensors"}}"#), ["b.safetensors"]);
    assert!(read_index(br#"{"weight_map": {"a": "../b.safetensors"}}"#).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_changed_manifest_is_no_panic(
        changes in proptest::collection::vec((any::<usize>(), "[0-9]{1,3}|[a-z{}\\[\\],:\"-]"), 1..4),
        content in proptest::collection::vec(any::<u8>(), 0..3000),
    ) {
        let mut bytes = body();
        for (at, to) in changes {
            let at = at % (bytes.len() - to.len());
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
        open(&sealed(&bytes), &content);
    }
}
