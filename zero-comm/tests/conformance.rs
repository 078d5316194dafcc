//! The thread backend has the properties that every backend must have, and the decorators keep them.

use std::sync::Arc;
use std::time::Duration;

use zero_comm::conformance::{self, Harness};
use zero_comm::{CommError, Communicator, FaultPlan, Faulty, Link, LocalWorld, Throttled};
use zero_core::WorldSize;

struct Threads;

impl Harness for Threads {
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
        let finished = LocalWorld::new(size).with_deadline(deadline).run(|comm| {
            f(comm);
            Ok::<_, CommError>(())
        });
        if let Err(error) = finished {
            panic!("{error}");
        }
    }
}

/// Threads whose communicators are decorated.
struct Decorated(fn(Arc<dyn Communicator>) -> Arc<dyn Communicator>);

impl Harness for Decorated {
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
        Threads.run(size, deadline, &|comm| f(self.0(comm)));
    }
}

#[test]
fn a_throttled_communicator_conforms() {
    conformance::all(&Decorated(|comm| Arc::new(Throttled::new(comm, Link::INSTANT))));
}

#[test]
fn a_faulty_communicator_without_faults_conforms() {
    conformance::all(&Decorated(|comm| Arc::new(Faulty::new(comm, &FaultPlan::default()).unwrap())));
}

#[test]
fn threads_conform_at_all_world_sizes() {
    conformance::all(&Threads);
}

#[test]
#[should_panic(expected = "rank 1 panicked: not what was expected")]
fn a_property_that_does_not_hold_is_reported() {
    let size = WorldSize::new(3).unwrap();
    Threads.run(size, Duration::from_secs(60), &|comm| {
        assert!(comm.rank().index() != 1, "not what was expected");
        comm.barrier("all").ok();
    });
}
