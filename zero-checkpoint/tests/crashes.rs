//! Whatever stops a save, the newest complete checkpoint is found, and what was left behind goes.

mod common;

use std::env;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::power::FailingPower;
use common::watched::Watched;
use common::{assert_holds, contents, facts, load, model, ranks};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, CheckpointError, Coordinator, LocalStorage, Retention, Saver, SaverOptions, Solo, Storage,
};
use zero_core::{Rank, Stage, WorldSize};

const DIRECTORY: &str = "CHECKPOINTS_OF_THE_CHILD";
const KILLS: usize = 200;

fn options() -> SaverOptions {
    let retention = Retention { last: NonZeroUsize::new(2), every: None };
    SaverOptions { retention, ..SaverOptions::default() }
}

/// The newest step, whose content has been compared; 0 if there is no checkpoint.
fn newest(storage: Arc<dyn Storage>) -> u64 {
    let checkpoint = match Checkpoint::open_latest(storage) {
        Err(CheckpointError::NoCheckpoint { .. }) => return 0,
        checkpoint => checkpoint.unwrap(),
    };
    let step = checkpoint.manifest().step;
    let model = model(step);
    let (loaded, _) = load(&checkpoint, &model, Stage::Three, &Solo).unwrap();
    assert_holds(&loaded, &model, Stage::Three, Rank::ROOT, WorldSize::ONE);
    step
}

/// Saves step after step, tells before each operation that it begins and after each save that it has ended; until it is
/// killed.
#[test]
#[ignore = "run by `a_process_killed_at_any_moment_leaves_the_newest_complete_checkpoint`"]
fn child() {
    let directory = env::var_os(DIRECTORY).unwrap();
    let local: Arc<dyn Storage> = Arc::new(LocalStorage::new(directory));
    let begun = newest(Arc::clone(&local));
    let told = |operation: &str, path: &str| {
        println!("\n{operation} {path}");
        Ok(())
    };
    let storage: Arc<dyn Storage> = Arc::new(Watched::with_rule(local, Box::new(told)));
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), options()).unwrap();
        for step in begun + 1.. {
            let model = model(step);
            let facts = facts(step, Stage::Three, 2);
            let contents = contents(&model, None, facts, rank, world);
            if step % 2 == 0 {
                saver.save(&contents).unwrap();
            } else {
                saver.save_async(&contents).unwrap().wait().unwrap();
            }
            println!("\nsaved {step}");
        }
    });
}

#[test]
fn a_process_killed_at_any_moment_leaves_the_newest_complete_checkpoint() {
    let directory = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(directory.path()));
    let mut random = SmallRng::seed_from_u64(1);
    let mut newest_seen = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut saved = newest_seen;
        let mut see = |line: String| {
            if let Some(step) = line.strip_prefix("saved ") {
                saved = saved.max(step.parse().unwrap());
            }
        };
        // A save tells some thirty operations.
        for _ in 0..random.random_range(5..90) {
            see(lines.next().expect("it does not end by itself").unwrap());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // The last line may be cut.
        lines.map_while(Result::ok).for_each(see);
        let found = newest(Arc::clone(&storage));
        assert!(found >= saved, "kill {kill}: step {saved} was saved, {found} is the newest");
        newest_seen = found;
    }
    assert!(newest_seen > KILLS as u64 / 2, "it got as far as step {newest_seen}");

    let model = model(newest_seen + 1);
    let facts = facts(newest_seen + 1, Stage::Three, 1);
    let mut saver = Saver::new(Arc::clone(&storage), Arc::new(Solo), options()).unwrap();
    saver.save(&contents(&model, None, facts, Rank::ROOT, WorldSize::ONE)).unwrap();
    let expected = [newest_seen, newest_seen + 1].map(|step| format!("step-{step:010}"));
    assert_eq!(storage.list("").unwrap(), expected, "leftovers are swept, the last two are kept");
}

/// Saves until the power fails; the last step whose save had ended.
fn saved_before(disk: &FailingPower) -> u64 {
    let storage: Arc<dyn Storage> = Arc::new(disk.clone());
    let mut saver = Saver::new(storage, Arc::new(Solo), options()).unwrap();
    let mut saved = 0;
    for step in 1..=4 {
        let model = model(step);
        let contents = contents(&model, None, facts(step, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        if saver.save(&contents).is_err() {
            break;
        }
        saved = step;
    }
    // A step that is there already: its checkpoint is replaced.
    if saved == 4 {
        let model = model(4);
        let contents = contents(&model, None, facts(4, Stage::Three, 1), Rank::ROOT, WorldSize::ONE);
        // Once the power has failed, nothing more is expected of it.
        let _ = saver.save(&contents);
    }
    saved
}

#[test]
fn a_power_failure_at_any_operation_leaves_the_newest_complete_checkpoint() {
    let mut random = SmallRng::seed_from_u64(2);
    let mut complete = 0;
    for operations in 0.. {
        let disk = FailingPower::after(operations);
        let saved = saved_before(&disk);
        for case in 0..40 {
            let restored = match case {
                0 => disk.restored(|| false),
                1 => disk.restored(|| true),
                _ => disk.restored(|| random.random()),
            };
            let found = newest(Arc::new(restored));
            assert!(
                found >= saved,
                "power lost after {operations} operations: {saved} was saved, {found} found"
            );
        }
        if !disk.failed() {
            complete = operations;
            break;
        }
    }
    assert!(complete > 40, "all of it takes {complete} operations");
}
