//! What goes between CUDA devices: of processes, two of which share one if there is only one, and of threads. Skipped where
//! there is none.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zero_comm::{
    CommError, Communicator, DeviceCopier, LocalWorld, Meeting, NcclCommunicator, ProcessWorld, WorldError,
};
use zero_core::{DType, Rank, WorldSize};

use super::find;
use crate::DeviceKind;
use crate::arena::Port;
use crate::board::Board;
use crate::transports::fixture::{Member, bytes_of, elements, tensor};
use crate::transports::{BucketParts, DeviceCollectives, DeviceWindows};

/// The variable for where processes meet.
const MEETING: &str = "ZERO_BURN_TEST_MEETING";

/// Runs a test of this file in processes; gives what they did, by rank.
fn run(test: &str) -> Vec<Output> {
    let devices = NcclCommunicator::device_count().unwrap_or(0);
    if devices == 0 {
        println!("skipped: no CUDA device");
        return Vec::new();
    }
    let (folder, size) = (tempfile::tempdir().unwrap(), devices.max(2));
    let children = (0..size).map(|rank| {
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", &format!("cuda::tests::{test}"), "--ignored", "--nocapture"]);
        child.env(MEETING, folder.path().join("meeting"));
        child.env("RANK", rank.to_string()).env("SIZE", size.to_string());
        child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let children: Vec<_> = children.collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn check(output: &Output) {
    let [said, cried] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{cried}");
}

/// What one of the processes does with its transports.
fn rank(
    f: impl Fn(&Arc<dyn Communicator>, Member, Option<Arc<dyn DeviceCollectives>>) -> Result<(), CommError>,
) -> Result<(), WorldError<CommError>> {
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let meeting = Meeting::File { path: PathBuf::from(env::var_os(MEETING).unwrap()) };
    let size = WorldSize::new(number("SIZE")).unwrap();
    let world = ProcessWorld::new(Rank::new(number("RANK")), size, meeting);
    world.with_deadline(Duration::from_secs(60)).run(|comm| {
        let device = DeviceKind::Cuda.device_of_rank(&comm).unwrap();
        let transports = find(&comm, Port::of(&device).as_ref())?;
        let has_its_own = NcclCommunicator::device_count().unwrap() >= size.get();
        assert_eq!((transports.shards.is_some(), transports.buckets.is_some()), (true, has_its_own));
        f(&comm, Member::new(&comm, device, transports.shards.unwrap()), transports.buckets)
    })
}

#[test]
fn what_is_on_a_device_comes_to_others() {
    run("a_rank_that_shows_and_gives").iter().for_each(check);
}

#[test]
#[ignore = "run by another test"]
fn a_rank_that_shows_and_gives() {
    let ran = rank(|comm, member, collectives| {
        show_all(comm, &member)?;
        if let Some(collectives) = collectives {
            give_all(&*collectives, comm);
        }
        Ok(())
    });
    ran.unwrap();
}

/// Runs what threads do, one more than there are devices, if there are two and all are connected.
fn on_threads(f: impl Fn(&Arc<dyn Communicator>, &Member, &Board) -> Result<(), CommError> + Sync) {
    let devices = NcclCommunicator::device_count().unwrap_or(0);
    if devices < 2 {
        println!("two CUDA devices are needed, and there are {devices}");
        return;
    }
    let reaches_all = |device| {
        let mut copier = DeviceCopier::new(device).unwrap();
        (0..devices).all(|other| copier.reach(other).unwrap())
    };
    let are_connected = (0..devices).all(reaches_all);
    let world = LocalWorld::new(WorldSize::new(devices + 1).unwrap()).with_deadline(Duration::from_secs(60));
    let ran = world.run(|comm| {
        let device = DeviceKind::Cuda.device_of_rank(&comm).unwrap();
        let board = Board::meet(&comm, Port::of(&device).as_ref())?;
        assert_eq!(board.is_some(), are_connected);
        let Some(board) = board else { return Ok(()) };
        f(&comm, &Member::new(&comm, device, board.clone()), &board)
    });
    ran.unwrap();
    if !are_connected {
        println!("nothing connects the CUDA devices");
    }
}

#[test]
fn what_is_on_a_device_comes_to_other_threads() {
    on_threads(|comm, member, board| {
        show_all(comm, member)?;
        give_all(board, comm);
        Ok(())
    });
}

#[test]
fn what_comes_does_not_meet_what_the_device_has_still_to_do() {
    on_threads(|comm, member, board| {
        member.show(0)?;
        comm.fence("shown")?;
        let device = DeviceWindows::device(board);
        // This takes a while, and then memory is written that is free to what comes.
        let large = tensor(device, &vec![0; 256 << 20], DType::F32);
        drop((0..16).map(|_| tensor(device, &[2; 40], DType::F32)).collect::<Vec<_>>());
        let whole = member.whole()?;
        drop(large);
        assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes_of(&whole)), elements(0));
        comm.fence("read")
    });
}

#[test]
fn a_rank_that_dies_is_named_by_all() {
    // The first one dies.
    run("a_rank_that_dies_or_is_left").iter().skip(1).for_each(check);
}

#[test]
#[ignore = "run by another test"]
fn a_rank_that_dies_or_is_left() {
    let ran = rank(|comm, member, collectives| {
        if comm.rank() == Rank::ROOT {
            // Not by a panic, of which it could tell the others.
            std::process::exit(7);
        }
        member.show(0)?;
        // One gives, the others read what was never shown.
        if let Some(collectives) = collectives.filter(|_| comm.rank().index() == 1) {
            let counts = vec![3; comm.world_size().get()];
            let parts = BucketParts { comm: &**comm, bucket: 7, counts: &counts, label: "bucket" };
            let bucket = tensor(member.on_devices.device(), &vec![0; 12 * counts.len()], DType::F32);
            return collectives.all_to_all(&parts, bucket).map(drop);
        }
        member.read().map(drop)
    });
    let error = ran.unwrap_err();
    let WorldError::Failed { source: CommError::PeerLost { rank, .. }, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(*rank, Rank::ROOT);
}

/// All see what each shows, and then what it shows in its place.
fn show_all(comm: &Arc<dyn Communicator>, member: &Member) -> Result<(), CommError> {
    for first in [0, 50] {
        member.show(first)?;
        comm.fence("shown")?;
        assert_eq!(member.read()?, elements(first));
        comm.fence("read")?;
    }
    Ok(())
}

/// Buckets of some types, cut in some ways.
fn give_all(collectives: &dyn DeviceCollectives, comm: &Arc<dyn Communicator>) {
    let ranks = comm.world_size().get();
    for dtype in [DType::F32, DType::F16] {
        for counts in [vec![3; ranks], (0..ranks).collect()] {
            give(collectives, comm, dtype, &counts);
        }
    }
}

/// Every byte says whose it is, and where it was.
fn give(collectives: &dyn DeviceCollectives, comm: &Arc<dyn Communicator>, dtype: DType, counts: &[usize]) {
    let byte = |rank: usize, at: usize| (rank * 64 + at) as u8;
    let (own, size, device) = (comm.rank().index(), dtype.size(), collectives.device());
    let starts: Vec<_> = (0..counts.len()).map(|rank| counts[..rank].iter().sum::<usize>() * size).collect();
    let parts = BucketParts { comm: &**comm, bucket: 7, counts, label: "bucket" };
    let all: usize = counts.iter().sum::<usize>() * size;
    let bucket: Vec<u8> = (0..all).map(|at| byte(own, at)).collect();
    let addends = collectives.all_to_all(&parts, tensor(device, &bucket, dtype)).unwrap();
    let part = starts[own]..starts[own] + counts[own] * size;
    let expected = (0..counts.len()).filter(|_| !part.is_empty());
    let expected = expected.map(|rank| part.clone().map(|at| byte(rank, at)).collect::<Vec<_>>());
    assert_eq!(addends.iter().map(bytes_of).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    let sums = collectives.all_gather(&parts, tensor(device, &bucket[part], dtype)).unwrap();
    let expected = (0..counts.len()).filter(|rank| counts[*rank] > 0).map(|rank| {
        let bytes = (0..counts[rank] * size).map(|at| byte(rank, starts[rank] + at));
        (starts[rank] / size, bytes.collect::<Vec<_>>())
    });
    let sums = sums.iter().map(|(start, part)| (*start, bytes_of(part)));
    assert_eq!(sums.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    collectives.finish(&parts, None).unwrap();
}
