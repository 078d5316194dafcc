//! What is kept, what is removed, and what is in use.

mod common;

use std::fs;
use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;

use common::watched::Watched;
use common::{contents, facts, model};
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, CheckpointError, LocalStorage, MemoryStorage, Retention, Saver, SaverOptions, Solo, Storage,
    Usage,
};
use zero_core::{Rank, Stage, WorldSize};

fn saver(storage: &Arc<dyn Storage>, last: usize, every: u64) -> Saver {
    let retention = Retention { last: NonZeroUsize::new(last), every: NonZeroU64::new(every) };
    let options = SaverOptions { retention, ..SaverOptions::default() };
    Saver::new(Arc::clone(storage), Arc::new(Solo), options).unwrap()
}

fn save(saver: &mut Saver, step: u64) {
    let model = model(step);
    let contents = contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
    saver.save(&contents).unwrap();
}

fn steps(storage: &Arc<dyn Storage>) -> Vec<u64> {
    let names = storage.list("").unwrap();
    names.iter().map(|name| name.strip_prefix("step-").expect("no leftover").parse().unwrap()).collect()
}

/// Both kinds of places.
fn each_place(test: impl Fn(Arc<dyn Storage>)) {
    let folder = TempDir::new().unwrap();
    test(Arc::new(LocalStorage::new(folder.path().join("not/there/yet"))));
    test(Arc::new(MemoryStorage::new()));
}

#[test]
fn the_last_and_every_nth_are_kept() {
    each_place(|storage| {
        let mut saver = saver(&storage, 2, 30);
        (1..=8).for_each(|save_number| save(&mut saver, 10 * save_number));
        assert_eq!(steps(&storage), [30, 60, 70, 80]);
    });
}

#[test]
fn what_was_just_saved_is_kept_when_later_steps_are_there() {
    each_place(|storage| {
        let mut saver = saver(&storage, 2, 0);
        [100, 200, 300].iter().for_each(|&step| save(&mut saver, step));
        // Training was taken up from step 100, and loses its way differently this time.
        for (step, expected) in [
            (150, vec![150, 200, 300]),
            (160, vec![150, 160, 200, 300]),
            (170, vec![160, 170, 200, 300]),
            (310, vec![300, 310]),
        ] {
            save(&mut saver, step);
            assert_eq!(steps(&storage), expected);
        }
    });
}

#[test]
fn what_is_being_read_is_kept_until_it_is_not() {
    each_place(|storage| {
        let mut saver = saver(&storage, 1, 0);
        save(&mut saver, 1);
        let reader = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
        let another = Checkpoint::open(Arc::clone(&storage), 1).unwrap();
        save(&mut saver, 2);
        assert_eq!(steps(&storage), [1, 2]);
        drop(reader);
        save(&mut saver, 3);
        assert_eq!(steps(&storage), [1, 3]);
        let model = model(1);
        let (loaded, _) = common::load(&another, &model, Stage::Three, &Solo).unwrap();
        common::assert_holds(&loaded, &model, Stage::Three, Rank::ROOT, WorldSize::ONE);
        drop(another);
        save(&mut saver, 4);
        assert_eq!(steps(&storage), [4]);
    });
}

#[test]
fn the_last_good_one_is_kept_when_newer_ones_are_damaged() {
    let folder = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    let mut unlimited = saver(&storage, 0, 0);
    (1..=3).for_each(|step| save(&mut unlimited, step));
    let path = |step: u64, name: &str| folder.path().join(format!("step-{step:010}")).join(name);
    fs::write(path(3, "manifest.json"), "{}").unwrap();
    fs::write(path(2, "rank-00000-of-00001.safetensors"), "short").unwrap();

    // The newest is kept: it is good, so the damaged ones may go, and the older one too.
    let mut one = saver(&storage, 1, 0);
    save(&mut one, 4);
    assert_eq!(steps(&storage), [4]);

    (5..=6).for_each(|step| save(&mut unlimited, step));
    fs::write(path(6, "manifest.json"), "{}").unwrap();
    let error = zero_checkpoint::prune(&*storage, Retention { last: NonZeroUsize::new(1), every: None });
    assert!(matches!(error, Err(CheckpointError::NoneGood { .. })), "{error:?}");
    assert_eq!(steps(&storage), [4, 5, 6]);
}

#[test]
fn who_reads_a_checkpoint_that_is_replaced_goes_on_reading_it() {
    each_place(|storage| {
        let place = |seed: u64| {
            let model = model(seed);
            let contents = contents(&model, None, facts(5, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
            saver(&storage, 1, 0).save(&contents).unwrap();
        };
        place(1);
        // No file is open yet.
        let reader = Checkpoint::open(Arc::clone(&storage), 5).unwrap();
        (2..=3).for_each(place);
        for (checkpoint, seed) in [(Checkpoint::open(Arc::clone(&storage), 5).unwrap(), 3), (reader, 1)] {
            let model = model(seed);
            let (loaded, _) = common::load(&checkpoint, &model, Stage::Three, &Solo).unwrap();
            common::assert_holds(&loaded, &model, Stage::Three, Rank::ROOT, WorldSize::ONE);
        }
        save(&mut saver(&storage, 1, 0), 6);
        assert_eq!(steps(&storage), [6]);
    });
}

#[test]
fn a_checkpoint_that_is_being_replaced_is_not_removed() {
    each_place(|inner| {
        let mut unlimited = saver(&inner, 0, 0);
        (1..=3).for_each(|step| save(&mut unlimited, step));
        let (other, one) = (Arc::clone(&inner), Retention { last: NonZeroUsize::new(1), every: None });
        let rule = move |operation: &str, _: &str| {
            if operation == "rename" {
                assert_eq!(zero_checkpoint::prune(&*other, one).unwrap(), [2]);
            }
            Ok(())
        };
        let storage: Arc<dyn Storage> = Arc::new(Watched::with_rule(Arc::clone(&inner), Box::new(rule)));
        save(&mut saver(&storage, 0, 0), 1);
        assert_eq!(steps(&inner), [1, 3]);
    });
}

#[test]
fn what_cannot_be_removed_does_not_keep_the_others() {
    each_place(|inner| {
        let mut unlimited = saver(&inner, 0, 0);
        (1..=5).for_each(|step| save(&mut unlimited, step));
        let other = Arc::clone(&inner);
        let rule = move |operation: &str, path: &str| match (operation, path) {
            ("rename", "step-0000000002") => Err(io::Error::other("the medium is gone")),
            ("mark", "step-0000000003") => other.remove_folder(path),
            _ => Ok(()),
        };
        let storage = Watched::with_rule(Arc::clone(&inner), Box::new(rule));
        let retention = Retention { last: NonZeroUsize::new(1), every: None };
        let error = zero_checkpoint::prune(&storage, retention).unwrap_err();
        // Step 3 has been removed by somebody else.
        assert!(
            matches!(&error, CheckpointError::Pruned { removed, step: 2, .. } if removed == &[1, 4]),
            "{error}"
        );
        assert!(error.to_string().contains("the medium is gone"), "{error}");
        assert_eq!(steps(&inner), [2, 5]);
    });
}

#[test]
fn leftovers_of_others_that_live_and_names_of_others_stay() {
    each_place(|storage| {
        let leftover = ".tmp-step-0000000009-0123456789abcdef";
        let in_use = ".tmp-step-0000000009-fedcba9876543210";
        let foreign = [".tmp-other", ".tmp-step-9-0123456789abcdef", "notes", "step-7"];
        for name in [leftover, in_use].iter().chain(&foreign) {
            storage.create_folder(name).unwrap();
        }
        let mark = storage.mark(in_use, Usage::Shared).unwrap().unwrap();
        let mut saver = saver(&storage, 1, 0);
        save(&mut saver, 1);
        let found = storage.list("").unwrap();
        assert!(!found.iter().any(|name| name == leftover), "{found:?}");
        assert!(
            [in_use].iter().chain(&foreign).all(|name| found.iter().any(|found| found == name)),
            "{found:?}"
        );
        drop(mark);
        save(&mut saver, 2);
        assert!(!storage.list("").unwrap().iter().any(|name| name == in_use));
    });
}

#[test]
fn a_folder_without_a_manifest_is_no_checkpoint() {
    each_place(|storage| {
        assert!(matches!(
            Checkpoint::open_latest(Arc::clone(&storage)),
            Err(CheckpointError::NoCheckpoint { .. })
        ));
        save(&mut saver(&storage, 0, 0), 1);
        storage.create_folder("step-0000000002").unwrap();
        let checkpoint = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
        assert_eq!(checkpoint.manifest().step, 1);
        let error = Checkpoint::open(Arc::clone(&storage), 2).unwrap_err();
        assert!(matches!(&error, CheckpointError::NoStep { step: 2, steps, .. } if steps == &[1]), "{error}");
    });
}

#[test]
fn a_checkpoint_that_cannot_be_written_to_can_be_read() {
    let folder = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    save(&mut saver(&storage, 0, 0), 1);
    // As after a copy by a tool that leaves hidden files out.
    let step = folder.path().join("step-0000000001");
    fs::remove_file(step.join(".lock")).unwrap();
    let mut permissions = fs::metadata(&step).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&step, permissions.clone()).unwrap();
    let opened = Checkpoint::open_latest(storage).map(|checkpoint| checkpoint.manifest().step);
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(&step, permissions).unwrap();
    assert_eq!(opened.unwrap(), 1);
}
