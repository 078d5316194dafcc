//! Worlds over MPI have the properties that every backend must have. Where there is no `mpirun`, this is skipped,
//! which the output says.

use std::env;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use mpi::Threading;
use zero_comm::conformance::{self, Harness};
use zero_comm::{CommError, Communicator, ProcessWorld, WorldError};
use zero_core::WorldSize;

const PATIENT: Duration = Duration::from_secs(60);

/// This process, one rank of each world, and which host each rank claims to be on.
struct Process(fn(usize) -> usize);

impl Harness for Process {
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
        let world = ProcessWorld::over_mpi(PATIENT).unwrap();
        assert_eq!(world.size(), size);
        let host = format!("host {}", self.0(world.rank().index()));
        let ran = world.with_host(host).run(|comm| {
            comm.set_deadline(deadline);
            f(comm);
            Ok::<_, CommError>(())
        });
        match ran {
            Err(WorldError::Panicked { message, .. }) => panic!("panicked: {message}"),
            Err(error) => panic!("{error}"),
            Ok(()) => {}
        }
    }
}

/// What the processes do that the tests start.
fn suite(hosts: fn(usize) -> usize) {
    // Worlds come and go, but MPI can be started once.
    let (_universe, _) = mpi::initialize_with_threading(Threading::Multiple).unwrap();
    let size = WorldSize::new(env::var("SIZE").unwrap().parse().unwrap()).unwrap();
    for (name, property) in conformance::PROPERTIES {
        println!("{name} at world size {size}");
        property(&Process(hosts), size);
    }
    println!("conforms");
}

#[test]
#[ignore = "run by the other tests"]
fn ranks_on_a_host_each() {
    suite(|rank| rank);
}

#[test]
#[ignore = "run by the other tests"]
fn two_ranks_on_a_host() {
    suite(|rank| rank / 2);
}

/// Runs `test` of this file under `mpirun`.
fn run(test: &str, sizes: std::ops::RangeInclusive<usize>) {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: there is no mpirun");
        return;
    }
    for size in sizes {
        let output = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()])
            .arg(env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("SIZE", size.to_string())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{} at {size} ranks\n{}", output.status, text.concat());
        assert_eq!(text[0].matches("conforms\n").count(), size, "{}", text.concat());
    }
}

#[test]
fn ranks_that_share_nothing_conform() {
    run("ranks_on_a_host_each", 1..=5);
}

#[test]
fn ranks_that_share_some_memory_conform() {
    run("two_ranks_on_a_host", 3..=5);
}
