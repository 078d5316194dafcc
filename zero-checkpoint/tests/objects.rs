//! Checkpoints in object storage: in memory and on disk.

mod common;

use std::num::NonZeroUsize;
use std::sync::Arc;

use common::watched::Watched;
use common::{assert_holds, contents, facts, load, model, ranks, save, spec, whole};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, CheckpointError, Coordinator, ObjectStorage, Retention, Saver, SaverOptions, Solo, Storage,
    verify,
};
use zero_core::{Rank, Stage, WorldSize};

/// Both kinds of stores, below a prefix.
fn each_store(test: impl Fn(Arc<dyn Storage>)) {
    let folder = TempDir::new().unwrap();
    let stores: [Arc<dyn ObjectStore>; 2] = [
        Arc::new(InMemory::new()),
        Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap().with_automatic_cleanup(true)),
    ];
    for store in stores {
        test(Arc::new(ObjectStorage::new(store, "runs/a").unwrap()));
    }
}

fn saver(storage: &Arc<dyn Storage>, last: usize) -> Saver {
    let retention = Retention { last: NonZeroUsize::new(last), every: None };
    let options = SaverOptions { retention, ..SaverOptions::default() };
    Saver::new(Arc::clone(storage), Arc::new(Solo), options).unwrap()
}

#[test]
fn what_is_saved_is_loaded_at_another_world_size() {
    each_store(|storage| {
        let mut model = model(1);
        // In several parts.
        model.push(whole(spec("large", &[3_000_000]), 9));
        save(&storage, &model, 10, Stage::Three, 3);
        let checkpoint = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
        assert!(checkpoint.manifest().files.iter().all(|file| file.bytes > 8 << 20));
        assert!(verify(&checkpoint, &mut |_| ()).unwrap().is_empty());
        ranks(2, |group| {
            let (loaded, _) = load(&checkpoint, &model, Stage::Three, &group).unwrap();
            assert_holds(&loaded, &model, Stage::Three, group.rank(), group.world_size());
        });
    });
}

#[test]
fn a_save_that_fails_leaves_no_checkpoint_and_a_later_one_succeeds() {
    each_store(|inner| {
        let model = model(1);
        let rule = |operation: &str, path: &str| {
            let fails = operation == "finish" && path.ends_with("manifest.json");
            if fails { Err(std::io::Error::other("the service is gone")) } else { Ok(()) }
        };
        let storage: Arc<dyn Storage> = Arc::new(Watched::with_rule(Arc::clone(&inner), Box::new(rule)));
        let step = |step| contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        saver(&storage, 0).save(&step(1)).unwrap_err();
        assert!(matches!(
            Checkpoint::open_latest(Arc::clone(&inner)),
            Err(CheckpointError::NoCheckpoint { .. })
        ));
        saver(&inner, 0).save(&step(1)).unwrap();
        let checkpoint = Checkpoint::open_latest(Arc::clone(&inner)).unwrap();
        assert_eq!(inner.list("step-0000000001").unwrap().len(), 1 + checkpoint.manifest().files.len());
    });
}

#[test]
fn a_step_that_is_there_is_refused_and_leftovers_go() {
    each_store(|storage| {
        let model = model(1);
        let step = |step| contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        saver(&storage, 0).save(&step(5)).unwrap();
        let error = saver(&storage, 0).save(&step(5)).unwrap_err();
        assert!(matches!(error, CheckpointError::StepExists { step: 5, .. }), "{error}");
        assert!(Checkpoint::open(Arc::clone(&storage), 5).is_ok());

        let mut leftover = storage.create("step-0000000004/rank-00000-of-00001-x.safetensors", 3).unwrap();
        leftover.write(b"abc").unwrap();
        leftover.finish().unwrap();
        saver(&storage, 0).save(&step(6)).unwrap();
        assert_eq!(storage.list("").unwrap(), ["step-0000000005", "step-0000000006"]);
    });
}

#[test]
fn a_save_that_goes_on_stays_when_a_later_step_is_there() {
    each_store(|storage| {
        let model = model(1);
        let step = |step| contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        saver(&storage, 0).save(&step(5)).unwrap();
        // Training was taken up from an older step: in the middle of its save, somebody else sweeps.
        let other = Arc::clone(&storage);
        let rule = move |operation: &str, path: &str| {
            if operation == "create" && path.ends_with("manifest.json") {
                saver(&other, 0)
                    .save(&contents(&[], None, facts(9, Stage::Three, 1), Rank::ROOT, WorldSize::ONE))
                    .unwrap();
            }
            Ok(())
        };
        let watched: Arc<dyn Storage> = Arc::new(Watched::with_rule(Arc::clone(&storage), Box::new(rule)));
        saver(&watched, 0).save(&step(3)).unwrap();
        let checkpoint = Checkpoint::open(Arc::clone(&storage), 3).unwrap();
        assert!(verify(&checkpoint, &mut |_| ()).unwrap().is_empty());
    });
}

#[test]
fn old_ones_go_but_not_what_this_process_reads() {
    each_store(|storage| {
        let model = model(1);
        let step = |step| contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        let mut saver = saver(&storage, 1);
        saver.save(&step(1)).unwrap();
        let reader = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
        saver.save(&step(2)).unwrap();
        assert_eq!(storage.list("").unwrap(), ["step-0000000001", "step-0000000002"]);
        drop(reader);
        saver.save(&step(3)).unwrap();
        assert_eq!(storage.list("").unwrap(), ["step-0000000003"]);
    });
}

#[test]
fn it_works_within_a_runtime_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(ObjectStorage::new(Arc::new(InMemory::new()), "").unwrap());
        save(&storage, &model(1), 1, Stage::Three, 1);
        assert_eq!(Checkpoint::open_latest(storage).unwrap().manifest().step, 1);
    });
}
