//! Every world size and stage into every other.

mod common;

use std::sync::Arc;

use common::watched::Watched;
use common::{assert_holds, blank, contents, disks, facts, load, model, ranks, save, wanted};
use zero_checkpoint::{
    Checkpoint, Coordinator, LoadOptions, MemoryStorage, Saver, SaverOptions, Solo, Storage,
};
use zero_core::{Stage, WorldSize};

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];

#[test]
fn any_world_and_stage_loads_what_any_other_saved() {
    let model = model(1);
    for saved_world in WORLDS {
        for saved_stage in Stage::ALL {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            save(&storage, &model, 10, saved_stage, saved_world);
            for world in WORLDS {
                for stage in Stage::ALL {
                    ranks(world, |group| {
                        let open = Checkpoint::open_together(Arc::clone(&storage), None, &group);
                        let (loaded, _) = load(&open.unwrap(), &model, stage, &group).unwrap();
                        assert_holds(&loaded, &model, stage, group.rank(), group.world_size());
                    });
                }
            }
        }
    }
}

#[test]
fn state_comes_from_a_disk_and_goes_to_one() {
    let model = model(2);
    for (saved_world, world) in [(1, 3), (3, 2), (4, 4)] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        ranks(saved_world, |group| {
            let (rank, size) = (group.rank(), group.world_size());
            let disks = disks(&model, Stage::Two, rank, size);
            let facts = facts(1, Stage::Two, saved_world);
            let mut saver =
                Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
            saver.save(&contents(&model, Some(&disks), facts, rank, size)).unwrap();
        });
        ranks(world, |group| {
            let checkpoint = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
            let (rank, size) = (group.rank(), group.world_size());
            let mut loaded = blank(&model);
            let mut targets = disks(&loaded, Stage::Two, rank, size);
            let wanted = wanted(&mut loaded, Some(&mut targets), Stage::Two, rank, size);
            checkpoint.load(wanted, &LoadOptions::default(), &group).unwrap();
            for (target, expected) in targets.iter().zip(disks(&model, Stage::Two, rank, size)) {
                assert_eq!(target.0, expected.0);
            }
        });
    }
}

#[test]
fn each_byte_is_read_once_per_host_at_most() {
    // Larger than several chunks, so that ranks have some for themselves and some in common.
    let model = vec![common::whole(common::spec("large", &[1500, 1000]), 3)];
    let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&inner, &model, 1, Stage::Three, 3);
    for (world, stage) in [(1, Stage::Three), (2, Stage::Three), (4, Stage::One), (4, Stage::Zero)] {
        let watched = Arc::new(Watched::new(Arc::clone(&inner)));
        let storage: Arc<dyn Storage> = watched.clone();
        let read: u64 = ranks(world, |group| {
            let checkpoint = Checkpoint::open_together(Arc::clone(&storage), Some(1), &group).unwrap();
            let (loaded, report) = load(&checkpoint, &model, stage, &group).unwrap();
            assert_holds(&loaded, &model, stage, group.rank(), group.world_size());
            report.bytes_read
        })
        .into_iter()
        .sum();
        let mut total = 0;
        for (path, counts) in watched.reads() {
            assert!(counts.iter().all(|&count| count == 1), "{path} in a world of {world} at {stage}");
            total += if path.ends_with("manifest.json") { 0 } else { counts.len() as u64 };
        }
        assert_eq!(read, total);
    }
}

#[test]
fn what_all_ranks_hold_is_written_once_and_evenly() {
    let model = vec![
        common::whole(common::spec("large", &[300, 1000]), 1),
        common::whole(common::spec("small", &[100, 10]), 2),
        common::whole(common::spec("other", &[1000]), 3),
    ];
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let saved = save(&storage, &model, 1, Stage::Zero, 4);
    let numel: usize = model.iter().map(|whole| whole.values.len()).sum();
    let data = numel as u64 * (4 + 4 + 2);
    assert!((data..data + 4096).contains(&saved[0].total_bytes), "{saved:?}");
    for saved in &saved {
        let share = saved.bytes as f64 / (data as f64 / 4.0);
        assert!((0.9..1.1).contains(&share), "{share} of an even share");
    }
}

#[test]
fn one_rank_alone_loads_any_interval() {
    let model = model(4);
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, &model, 1, Stage::Three, 4);
    let checkpoint = Checkpoint::open(storage, 1).unwrap();
    // As the third of five would, whoever else there is.
    let (rank, world) = (zero_core::Rank::new(2), WorldSize::new(5).unwrap());
    let mut loaded = blank(&model);
    let asked = wanted(&mut loaded, None, Stage::Three, rank, world);
    let report = checkpoint.load(asked, &LoadOptions::default(), &Solo).unwrap();
    for (whole, parameter) in loaded.iter_mut().zip(&report.parameters) {
        (whole.updates, whole.group) = (parameter.updates, parameter.group.clone());
    }
    assert_holds(&loaded, &model, Stage::Three, rank, world);
}
