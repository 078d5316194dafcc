//! Saves beside training.

mod common;

use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex};

use common::watched::Watched;
use common::{assert_holds, contents, facts, load, model, ranks};
use zero_checkpoint::{
    BoxError, Checkpoint, CheckpointError, Coordinator, Data, MemoryStorage, OnBusy, Retention, Saver,
    SaverOptions, Solo, Storage,
};
use zero_core::{Rank, Stage, WorldSize};

/// A door that is shut until it is opened.
#[derive(Clone, Default)]
struct Door(Arc<(Mutex<bool>, Condvar)>);

impl Door {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// A storage whose writes wait at a door.
fn behind(door: &Door, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
    let door = door.clone();
    let rule = move |operation: &str, _: &str| {
        if operation == "write" {
            door.pass();
        }
        Ok(())
    };
    Arc::new(Watched::with_rule(inner, Box::new(rule)))
}

fn steps(storage: &Arc<dyn Storage>) -> Vec<String> {
    storage.list("").unwrap()
}

const ONE: (Rank, WorldSize) = (Rank::ROOT, WorldSize::ONE);

#[test]
fn what_changes_after_the_call_is_not_saved() {
    let (door, inner): (_, Arc<dyn Storage>) = (Door::default(), Arc::new(MemoryStorage::new()));
    let saved = model(1);
    let mut changing = model(1);
    let mut saver =
        Saver::new(behind(&door, Arc::clone(&inner)), Arc::new(Solo), SaverOptions::default()).unwrap();
    let pending =
        saver.save_async(&contents(&changing, None, facts(1, Stage::Three, 1), ONE.0, ONE.1)).unwrap();
    assert!(!pending.is_done());
    changing.iter_mut().for_each(|whole| whole.values.fill(f32::NAN));
    door.open();
    assert_eq!(pending.wait().unwrap().step, 1);
    let (loaded, _) = load(&Checkpoint::open_latest(inner).unwrap(), &saved, Stage::Three, &Solo).unwrap();
    assert_holds(&loaded, &saved, Stage::Three, ONE.0, ONE.1);
}

#[test]
fn a_second_save_waits_for_the_first() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
        for step in 1..=5 {
            saver.save_async(&contents(&model, None, facts(step, Stage::Three, 2), rank, world)).unwrap();
        }
        assert_eq!(saver.finish().unwrap().map(|saved| saved.step), Some(5));
        assert_eq!(saver.finish().unwrap(), None);
    });
    assert_eq!(steps(&storage).len(), 5);
}

#[test]
fn a_second_save_is_refused_by_policy() {
    let (door, inner): (_, Arc<dyn Storage>) = (Door::default(), Arc::new(MemoryStorage::new()));
    let model = model(1);
    let options = SaverOptions { on_busy: OnBusy::Refuse, ..SaverOptions::default() };
    let mut saver = Saver::new(behind(&door, Arc::clone(&inner)), Arc::new(Solo), options).unwrap();
    let contents = |step| contents(&model, None, facts(step, Stage::Three, 1), ONE.0, ONE.1);
    let pending = saver.save_async(&contents(1)).unwrap();
    let error = saver.save_async(&contents(2)).unwrap_err();
    assert!(matches!(error, CheckpointError::Busy { step: 2, saving: 1 }), "{error}");
    door.open();
    pending.wait().unwrap();
    saver.save_async(&contents(3)).unwrap();
    saver.finish().unwrap();
    assert_eq!(steps(&inner), ["step-0000000001", "step-0000000003"]);
}

/// A coordinator whose last answer of the first save comes late.
struct Late<C> {
    inner: C,
    door: Door,
    broadcasts: Mutex<usize>,
}

impl<C: Coordinator> Coordinator for Late<C> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.inner.world_size()
    }

    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        self.inner.gather(bytes)
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) -> Result<(), BoxError> {
        self.inner.broadcast(root, bytes)?;
        let mut broadcasts = self.broadcasts.lock().unwrap();
        *broadcasts += 1;
        // Two for each of the two phases.
        if *broadcasts == 4 {
            self.door.pass();
        }
        Ok(())
    }
}

/// A coordinator that no two threads of a rank may use at once.
struct Exclusive<C> {
    inner: C,
    used: Mutex<()>,
}

impl<C: Coordinator> Coordinator for Exclusive<C> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.inner.world_size()
    }

    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        let _used = self.used.try_lock().map_err(|_| "two threads of one rank are in the group")?;
        self.inner.gather(bytes)
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) -> Result<(), BoxError> {
        let _used = self.used.try_lock().map_err(|_| "two threads of one rank are in the group")?;
        self.inner.broadcast(root, bytes)
    }
}

#[test]
fn what_one_rank_refuses_no_rank_saves_and_none_waits() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    let door = Door::default();
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let options = SaverOptions { on_busy: OnBusy::Refuse, ..SaverOptions::default() };
        let late = rank == Rank::new(1);
        let own = if late { door.clone() } else { Door::default() };
        if !late {
            own.open();
        }
        let coordinator = Late { inner: group, door: own, broadcasts: Mutex::new(0) };
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(coordinator), options).unwrap();
        let contents = |step| contents(&model, None, facts(step, Stage::Three, 2), rank, world);
        let first = saver.save_async(&contents(1)).unwrap();
        if late {
            // Busy for as long as the door is shut.
            assert!(matches!(saver.save_async(&contents(2)), Err(CheckpointError::Busy { .. })));
            door.open();
            first.wait().unwrap();
        } else {
            first.wait().unwrap();
            let error = saver.save_async(&contents(2)).unwrap().wait().unwrap_err();
            assert!(error.to_string().contains("rank 1 failed: step 2 could not be saved"), "{error}");
        }
        saver.save_async(&contents(3)).unwrap().wait().unwrap();
    });
    assert_eq!(steps(&storage), ["step-0000000001", "step-0000000003"]);
}

/// A storage that cannot write the manifest of a step.
fn failing_at(step: u64, inner: &Arc<dyn Storage>) -> Arc<dyn Storage> {
    let rule = move |operation: &str, path: &str| {
        if operation == "finish" && path.contains(&format!("{step:010}")) && path.ends_with("manifest.json") {
            return Err(io::Error::other("the medium is full"));
        }
        Ok(())
    };
    Arc::new(Watched::with_rule(Arc::clone(inner), Box::new(rule)))
}

#[test]
fn an_error_that_nobody_waited_for_is_returned_by_the_next_call_on_all_ranks() {
    let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let storage = failing_at(1, &inner);
    let model = model(1);
    ranks(3, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
        let contents = |step| contents(&model, None, facts(step, Stage::Three, 3), rank, world);
        drop(saver.save_async(&contents(1)).unwrap());
        let error = saver.save_async(&contents(2)).unwrap_err();
        assert!(error.to_string().contains("the medium is full"), "{error}");
        // Told once; the saver goes on.
        saver.save_async(&contents(3)).unwrap();
        saver.finish().unwrap();
        saver.save(&contents(4)).unwrap();
    });
    assert_eq!(steps(&inner), ["step-0000000003", "step-0000000004"]);
}

#[test]
fn an_error_is_returned_at_the_end_or_by_the_handle_and_only_once() {
    let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    let contents = |step| contents(&model, None, facts(step, Stage::Three, 1), ONE.0, ONE.1);
    let saver = || Saver::new(failing_at(1, &inner), Arc::new(Solo), SaverOptions::default()).unwrap();

    let mut at_the_end = saver();
    let pending = at_the_end.save_async(&contents(1)).unwrap();
    assert!(at_the_end.finish().unwrap_err().to_string().contains("the medium is full"));
    assert!(matches!(pending.wait(), Err(CheckpointError::AlreadyTold { step: 1 })));

    let pending = at_the_end.save_async(&contents(2)).unwrap();
    assert_eq!(at_the_end.finish().unwrap().map(|saved| saved.step), Some(2));
    assert_eq!(pending.wait().unwrap().step, 2, "what was saved is told to all who ask");
    inner.remove_folder("step-0000000002").unwrap();

    let mut by_the_handle = saver();
    let pending = by_the_handle.save_async(&contents(1)).unwrap();
    assert!(pending.wait().unwrap_err().to_string().contains("the medium is full"));
    assert_eq!(by_the_handle.finish().unwrap(), None);

    let mut by_a_save = saver();
    drop(by_a_save.save_async(&contents(1)).unwrap());
    assert!(by_a_save.save(&contents(2)).unwrap_err().to_string().contains("the medium is full"));
    assert!(steps(&inner).is_empty());
}

#[test]
fn what_follows_a_refusal_waits_until_the_other_ranks_have_heard_of_it() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    let door = Door::default();
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let group = Arc::new(Exclusive { inner: group, used: Mutex::new(()) });
        let coordinator: Arc<dyn Coordinator> = Arc::clone(&group) as _;
        let mut saver = Saver::new(Arc::clone(&storage), coordinator, SaverOptions::default()).unwrap();
        let contents = |step| contents(&model, None, facts(step, Stage::Three, 2), rank, world);
        for step in [1, 3, 5] {
            let mut wrong = contents(step);
            if rank == Rank::new(1) {
                wrong.parameters[0].values = Data::f32(&[0.0; 3]);
                saver.save_async(&wrong).unwrap_err();
            } else {
                // Late, so that the other rank's refusal is still to be heard.
                door.pass();
                drop(saver.save_async(&wrong).unwrap());
            }
            door.open();
            let finished = saver.finish();
            assert_eq!(finished.is_err(), rank == Rank::ROOT, "{finished:?}");
            saver.save(&contents(step + 1)).unwrap();
            let opened = Checkpoint::open_together(Arc::clone(&storage), None, &*group).unwrap();
            let (loaded, _) = load(&opened, &model, Stage::Three, &*group).unwrap();
            assert_holds(&loaded, &model, Stage::Three, rank, world);
        }
    });
    assert_eq!(steps(&storage), [2, 4, 6].map(|step| format!("step-{step:010}")));
}

#[test]
fn a_panic_while_saving_is_an_error_and_nobody_waits_for_good() {
    let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let rule = |operation: &str, _: &str| {
        assert_ne!(operation, "write", "as a storage with a mistake would panic");
        Ok(())
    };
    let storage: Arc<dyn Storage> = Arc::new(Watched::with_rule(inner, Box::new(rule)));
    let model = model(1);
    let mut saver = Saver::new(storage, Arc::new(Solo), SaverOptions::default()).unwrap();
    let contents = |step| contents(&model, None, facts(step, Stage::Three, 1), ONE.0, ONE.1);
    let error = saver.save_async(&contents(1)).unwrap().wait().unwrap_err();
    assert!(matches!(error, CheckpointError::WorkerGone), "{error}");
    // Whether it is sent just before the thread has ended, or not at all.
    let error = saver.save_async(&contents(2)).and_then(|pending| pending.wait()).unwrap_err();
    assert!(matches!(error, CheckpointError::WorkerGone), "{error}");
}

#[test]
fn no_rank_waits_until_old_checkpoints_are_removed() {
    let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    let door = Door::default();
    let retention = Retention { last: NonZeroUsize::new(1), every: None };
    let options = SaverOptions { retention, ..SaverOptions::default() };
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let own = door.clone();
        let rule = move |operation: &str, path: &str| {
            if (operation, path) == ("rename", "step-0000000001") {
                own.pass();
            }
            Ok(())
        };
        let storage: Arc<dyn Storage> = Arc::new(Watched::with_rule(Arc::clone(&inner), Box::new(rule)));
        let mut saver = Saver::new(storage, Arc::new(group), options).unwrap();
        for step in 1..=2 {
            saver.save(&contents(&model, None, facts(step, Stage::Three, 2), rank, world)).unwrap();
        }
        if rank == Rank::new(1) {
            door.open();
        }
    });
    assert_eq!(steps(&inner), ["step-0000000002"]);
}

#[test]
fn a_saver_that_is_dropped_ends_its_save() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let model = model(1);
    let retention = Retention { last: NonZeroUsize::new(1), every: None };
    let options = SaverOptions { retention, ..SaverOptions::default() };
    let mut saver = Saver::new(Arc::clone(&storage), Arc::new(Solo), options).unwrap();
    for step in 1..=3 {
        let contents = contents(&model, None, facts(step, Stage::Three, 1), ONE.0, ONE.1);
        saver.reserve(&contents).unwrap();
        drop(saver.save_async(&contents).unwrap());
    }
    drop(saver);
    assert_eq!(steps(&storage), ["step-0000000003"]);
}
