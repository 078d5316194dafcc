//! Ranks that are processes, each with a CUDA device; two share one, if there is only one. Skipped where there is none.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zero_comm::{Communicator, Meeting, NcclCommunicator, ProcessWorld};
use zero_core::{DType, Rank, WorldSize};

use super::find;
use crate::arena::Port;
use crate::transports::fixture::{Member, bytes_of, elements, tensor};
use crate::transports::{BucketParts, DeviceCollectives};
use crate::{DeviceKind, ZeroError};

/// The variable for where processes meet.
const MEETING: &str = "ZERO_BURN_TEST_MEETING";

/// Runs a test of this file in processes.
fn run(test: &str) {
    let devices = NcclCommunicator::device_count().unwrap_or(0);
    if devices == 0 {
        println!("skipped: no CUDA device");
        return;
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
    for child in children {
        let output = child.wait_with_output().unwrap();
        let [said, cried] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success() && said.contains("1 passed"), "{said}\n{cried}");
    }
}

/// What one of the processes does.
fn rank(f: impl Fn(&Arc<dyn Communicator>) -> Result<(), ZeroError>) {
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let meeting = Meeting::File { path: PathBuf::from(env::var_os(MEETING).unwrap()) };
    let size = WorldSize::new(number("SIZE")).unwrap();
    let world = ProcessWorld::new(Rank::new(number("RANK")), size, meeting);
    world.with_deadline(Duration::from_secs(60)).run(|comm| f(&comm)).unwrap();
}

#[test]
fn what_is_on_a_device_comes_to_others() {
    run("a_rank_that_shows_and_gives");
}

#[test]
#[ignore = "run by another test"]
fn a_rank_that_shows_and_gives() {
    rank(|comm| {
        let device = DeviceKind::Cuda.device_of_rank(comm)?;
        let port = Port::of(&device).unwrap();
        let transports = find(comm, Some(&port)).unwrap();
        let has_its_own = NcclCommunicator::device_count().unwrap() >= comm.world_size().get();
        assert_eq!((transports.shards.is_some(), transports.buckets.is_some()), (true, has_its_own));
        let member = Member::new(comm, device, transports.shards.unwrap());
        for first in [0, 50] {
            member.show(first).unwrap();
            comm.fence("shown").unwrap();
            assert_eq!(member.read().unwrap(), elements(first));
            comm.fence("read").unwrap();
        }
        let Some(collectives) = transports.buckets else { return Ok(()) };
        for dtype in [DType::F32, DType::F16] {
            for counts in [vec![3; comm.world_size().get()], (0..comm.world_size().get()).collect()] {
                give(&*collectives, comm, &member, dtype, &counts);
            }
        }
        Ok(())
    });
}

/// Every byte says whose it is, and where it was.
fn give(
    collectives: &dyn DeviceCollectives,
    comm: &Arc<dyn Communicator>,
    member: &Member,
    dtype: DType,
    counts: &[usize],
) {
    let byte = |rank: usize, at: usize| (rank * 64 + at) as u8;
    let (own, size, device) = (comm.rank().index(), dtype.size(), member.on_devices.device());
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
