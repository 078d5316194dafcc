//! Saves that succeed on all ranks, and saves that fail on all ranks.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::group::Group;
use common::watched::Watched;
use common::{contents, facts, model, ranks, save, spec, whole};
use serde_json::json;
use zero_checkpoint::{
    BoxError, Checkpoint, CheckpointError, Coordinator, Data, Digest, Held, MemoryStorage, ReadBytes, Saver,
    SaverOptions, Solo, Storage,
};
use zero_core::{Bytes, DType, Rank, Stage, WorldSize};

fn memory() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new())
}

/// What each rank of two gets when their contents have been changed by `change`; nothing must be left behind.
fn refused(change: impl Fn(usize, &mut zero_checkpoint::Contents<'_>) + Sync) -> Vec<String> {
    let storage = memory();
    let model = model(1);
    let errors = ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
        let mut contents = contents(&model, None, facts(1, Stage::Three, 2), rank, world);
        change(rank.index(), &mut contents);
        saver.save(&contents).unwrap_err().to_string()
    });
    assert!(storage.list("").unwrap().is_empty(), "{:?}", storage.list(""));
    errors
}

#[test]
fn the_manifest_tells_all_that_was_said() {
    let storage = memory();
    let model = model(3);
    let saved = save(&storage, &model, 1000, Stage::Two, 3);
    assert_eq!((saved[0].step, saved[0].folder.as_str()), (1000, "step-0000001000"));

    let checkpoint = Checkpoint::open(storage, 1000).unwrap();
    let manifest = checkpoint.manifest();
    let facts = facts(1000, Stage::Two, 3);
    assert_eq!((manifest.step, manifest.stage, &manifest.mesh), (1000, Stage::Two, &facts.mesh));
    assert_eq!((&manifest.dtypes, &manifest.groups), (&facts.dtypes, &facts.groups));
    assert_eq!(manifest.training, facts.training);
    assert_eq!(manifest.ranks, [json!({"rank": 0}), json!({"rank": 1}), json!({"rank": 2})]);
    let sorted = r#"{"a":{"c":3,"d":2},"b":1}"#;
    assert_eq!(manifest.registry.config_hash, Some(Digest::of(sorted.as_bytes())));
    assert_eq!(manifest.registry.frameworks["zero-checkpoint"], env!("CARGO_PKG_VERSION"));
    assert_eq!(manifest.bytes(), saved[0].total_bytes);
    for (record, whole) in manifest.parameters.iter().zip(&model) {
        assert_eq!((&record.name, &record.shape), (&whole.spec.name, &whole.spec.shape));
        assert_eq!((record.trainable, &record.aliases), (whole.spec.trainable, &whole.spec.aliases));
        assert_eq!((record.layout, record.updates), (whole.layout, whole.updates));
        assert_eq!(record.states.len(), if whole.first.is_some() { 2 } else { 0 }, "{}", record.name);
    }
    let head = manifest.parameter("head.weight").unwrap();
    assert_eq!(head.name, "embedding.weight");
    assert_eq!(manifest.group_of(head).unwrap().hyper_parameters["lr"], json!(0.1 + 0.2));
}

#[test]
fn elements_that_nobody_or_two_hold_are_named() {
    let errors = refused(|rank, contents| {
        if rank == 1 {
            contents.parameters[1].held = Held::Part(40..72);
            contents.parameters[1].values = Data::bytes(DType::F32, &[0; 128]);
            contents.parameters[1].states.clear();
        }
        if rank == 0 {
            contents.parameters[1].states.clear();
        }
    });
    assert!(
        errors[0].contains("`blocks.0.linear.weight`: no rank holds its elements 36..40"),
        "{}",
        errors[0]
    );
    assert!(errors[1].starts_with("not done, because rank 0 failed: cannot save"), "{}", errors[1]);

    let errors = refused(|rank, contents| {
        if rank == 1 {
            contents.parameters[6].held = Held::Part(0..2);
            contents.parameters[6].values = Data::bytes(DType::F32, &[0; 8]);
            contents.parameters[6].states.clear();
        }
        if rank == 0 {
            contents.parameters[6].states.clear();
        }
    });
    assert!(errors[0].contains("`tiny`: its elements 0..1 are held by rank 1"), "{}", errors[0]);
}

#[test]
fn what_ranks_tell_differently_is_named() {
    let errors = refused(|rank, contents| contents.parameters[2].updates += rank as u64);
    assert!(
        errors[0].contains("`blocks.0.linear.bias`: rank 1 and rank 0 do not describe it alike"),
        "{}",
        errors[0]
    );
    let errors = refused(|rank, contents| contents.facts.step += rank as u64);
    assert!(errors[0].contains("rank 0 saves step 1, rank 1 saves step 2"), "{}", errors[0]);
    let errors = refused(|rank, contents| contents.parameters.truncate(8 - rank));
    assert!(errors[0].contains("rank 1 saves 7 parameters, rank 0 saves 8"), "{}", errors[0]);
}

#[test]
fn what_one_rank_brings_wrongly_fails_all_of_them() {
    let errors = refused(|rank, contents| {
        if rank == 1 {
            contents.parameters[0].values = Data::f32(&[0.0; 3]);
        }
    });
    assert!(
        errors[1].contains("`embedding.weight`: its values have 12 bytes for 57 elements of f32"),
        "{}",
        errors[1]
    );
    assert!(errors[0].starts_with("not done, because rank 1 failed: cannot save"), "{}", errors[0]);
    let errors = refused(|_, contents| contents.parameters[0].states[0].name = "first.moment".to_owned());
    assert!(errors[0].contains("`first.moment` must be called by letters"), "{}", errors[0]);
}

#[test]
fn a_group_that_is_not_there_is_named_before_anything_is_written() {
    let errors = refused(|_, contents| contents.parameters[0].group = Some("odd".to_owned()));
    let expected = "cannot save step 1: parameter `embedding.weight` is in a group `odd` that is not there";
    assert_eq!(errors[0], expected);
    let errors = refused(|_, contents| contents.facts.mesh[0].size = 3);
    assert_eq!(errors[0], "cannot save step 1: its mesh is not one of 2 ranks");
}

#[test]
fn a_manifest_that_could_not_be_read_is_not_written() {
    let deep = || (0..200).fold(json!(1), |inner, _| json!([inner]));
    let reason = "what is recorded besides numbers could not be read again: recursion limit exceeded";
    let errors = refused(|rank, contents| {
        if rank == 1 {
            contents.rank_state = deep();
        }
    });
    assert!(errors.iter().all(|error| error.contains(reason)), "{errors:?}");
    let errors = refused(|_, contents| contents.facts.training.data = deep());
    assert!(errors.iter().all(|error| error.contains(reason)), "{errors:?}");
}

/// A disk that fails.
struct Broken;

impl ReadBytes for Broken {
    fn read(&self, _offset: u64, _into: &mut [u8]) -> Result<(), BoxError> {
        Err("the disk is gone".into())
    }
}

#[test]
fn a_source_that_fails_on_one_rank_fails_the_save_on_all() {
    let errors = refused(|rank, contents| {
        if rank == 1 {
            contents.parameters[0].states[0].data = Data::elsewhere(DType::F32, &Broken);
        }
    });
    assert!(errors[1].contains("first_moment of parameter `embedding.weight`"), "{}", errors[1]);
    assert!(errors[0].contains("rank 1 failed") && errors[0].contains("the disk is gone"), "{}", errors[0]);
}

#[test]
fn a_storage_that_fails_at_any_operation_fails_the_save_on_all_and_leaves_the_checkpoint_before() {
    let model = model(1);
    for rank_that_fails in 0..2 {
        for operation in ["create", "write", "finish", "sync_folder", "rename", "create_folder"] {
            let place = memory();
            save(&place, &model, 1, Stage::Three, 2);
            let results = ranks(2, |group| {
                let (rank, world) = (group.rank(), group.world_size());
                let own = rank.index() == rank_that_fails;
                let rule = move |name: &str, path: &str| {
                    let fails = own && name == operation && path.contains("tmp-step-0000000002");
                    if fails { Err(std::io::Error::other("the medium is full")) } else { Ok(()) }
                };
                let storage: Arc<dyn Storage> =
                    Arc::new(Watched::with_rule(Arc::clone(&place), Box::new(rule)));
                let mut saver = Saver::new(storage, Arc::new(group), SaverOptions::default()).unwrap();
                let saved = saver.save(&contents(&model, None, facts(2, Stage::Three, 2), rank, world));
                saved.map_err(|error| error.to_string())
            });
            // Folders are the root's.
            let failed = rank_that_fails == 0 || ["create", "write", "finish"].contains(&operation);
            for result in &results {
                assert_eq!(result.is_err(), failed, "{operation} on rank {rank_that_fails}: {result:?}");
                if let Err(error) = result {
                    assert!(error.contains("the medium is full"), "{error}");
                }
            }
            let expected =
                if failed { vec!["step-0000000001"] } else { vec!["step-0000000001", "step-0000000002"] };
            assert_eq!(place.list("").unwrap(), expected, "{operation} on rank {rank_that_fails}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_deadline() {
    let model = model(1);
    let storage = memory();
    // Two of three.
    let groups: Vec<_> = Group::all(3, Duration::from_millis(50)).into_iter().take(2).collect();
    std::thread::scope(|scope| {
        for group in groups {
            let (model, storage) = (&model, Arc::clone(&storage));
            scope.spawn(move || {
                let (rank, world) = (group.rank(), group.world_size());
                let mut saver = Saver::new(storage, Arc::new(group), SaverOptions::default()).unwrap();
                let error =
                    saver.save(&contents(model, None, facts(1, Stage::Three, 3), rank, world)).unwrap_err();
                assert!(matches!(error, CheckpointError::Coordination { .. }), "{error}");
                assert!(error.to_string().contains("[2]"), "{error}");
            });
        }
    });
    assert!(storage.list("").unwrap().is_empty());
}

#[test]
fn a_step_is_saved_again_in_place_of_the_first_time() {
    let storage = memory();
    save(&storage, &model(1), 5, Stage::Three, 2);
    save(&storage, &model(2), 5, Stage::Three, 1);
    assert_eq!(storage.list("").unwrap(), ["step-0000000005"]);
    let checkpoint = Checkpoint::open_latest(storage).unwrap();
    assert_eq!(checkpoint.manifest().world_size(), 1);
}

#[test]
fn names_that_would_be_one_tensor_are_refused() {
    let storage = memory();
    let mut models = vec![whole(spec("w", &[4]), 1), whole(spec("w[0:2]", &[2]), 2)];
    for whole in &mut models {
        (whole.first, whole.second) = (None, None);
    }
    let errors = ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
        let mut contents = contents(&models, None, facts(1, Stage::Three, 2), rank, world);
        contents.parameters[1].held = Held::Part(if rank == Rank::ROOT { 0..2 } else { 2..2 });
        contents.parameters[1].values =
            Data::f32(&models[1].values[..if rank == Rank::ROOT { 2 } else { 0 }]);
        saver.save(&contents).unwrap_err().to_string()
    });
    assert!(errors[0].contains("rename one"), "{}", errors[0]);
}

#[test]
fn a_buffer_that_is_too_small_is_refused() {
    let options = SaverOptions { buffer: Bytes::new(1000), ..SaverOptions::default() };
    let error = Saver::new(memory(), Arc::new(Solo), options).unwrap_err();
    assert_eq!(error.to_string(), "a buffer of 1000 B is too small: at least 2.0 MiB are needed");
}

#[test]
fn a_model_without_parameters_is_a_checkpoint_too() {
    let storage = memory();
    save(&storage, &[], 0, Stage::Three, 2);
    let checkpoint = Checkpoint::open_latest(storage).unwrap();
    assert_eq!((checkpoint.manifest().files.len(), checkpoint.manifest().world_size()), (0, 2));
    let world = WorldSize::new(2).unwrap();
    let wanted = common::wanted(&mut [], None, Stage::Three, Rank::ROOT, world);
    let report = checkpoint.load(wanted, &zero_checkpoint::LoadOptions::default(), &Solo).unwrap();
    assert!(report.parameters.is_empty());
}
