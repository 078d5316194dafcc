//! The process backend has the properties that every backend must have: between processes, and, with ranks
//! that are threads for speed, on any distribution of ranks over hosts.

use std::env;
use std::net::TcpListener;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use zero_comm::conformance::{self, Harness};
use zero_comm::{
    CommError, Communicator, CommunicatorExt, ConnectError, Coordinator, CoordinatorOptions, LossCause,
    Meeting, ProcessWorld, ReduceOp, Token, WindowKey, WorldError,
};
use zero_core::{Rank, WorldSize};

/// Ranks that are threads, each with everything that a process has.
struct Hosts(fn(usize) -> usize);

impl Harness for Hosts {
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
        let token = Token::generate().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Joining takes longer than some properties wait for their operations.
        let options =
            CoordinatorOptions { size, token: token.clone(), deadline: Duration::from_secs(60), host: None };
        let coordinator = Coordinator::new(listener, options).unwrap();
        let address = coordinator.address().to_string();
        thread::scope(|scope| {
            let ranks = size.ranks().map(|rank| {
                let meeting = Meeting::Coordinator { address: address.clone() };
                let world = ProcessWorld::new(rank, size, meeting)
                    .with_token(token.clone())
                    .with_host(format!("host {}", (self.0)(rank.index())));
                scope.spawn(move || run(&world, deadline, f))
            });
            let ranks: Vec<_> = ranks.collect();
            for rank in ranks {
                if let Err(panic) = rank.join() {
                    resume_unwind(panic);
                }
            }
        });
    }
}

fn run(world: &ProcessWorld, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
    let ran = world.clone().with_deadline(Duration::from_secs(60)).run(|comm| {
        comm.set_deadline(deadline);
        f(comm);
        Ok::<_, CommError>(())
    });
    match ran {
        Err(WorldError::Panicked { message, .. }) => panic!("{} panicked: {message}", world.rank()),
        Err(error) => panic!("{error}"),
        Ok(()) => {}
    }
}

#[test]
fn a_world_of_more_ranks_than_there_can_be_is_refused() {
    let size = WorldSize::new(99_999_999_999).unwrap();
    let meeting = Meeting::Bind { host: "127.0.0.1".to_owned(), port: 1 };
    let refused = ProcessWorld::new(Rank::ROOT, size, meeting).connect().unwrap_err();
    assert!(matches!(refused, ConnectError::TooManyRanks { .. }), "{refused}");
}

#[test]
fn ranks_of_one_host_conform() {
    conformance::all(&Hosts(|_| 0));
}

#[test]
fn ranks_on_a_host_each_conform() {
    conformance::all(&Hosts(|rank| rank));
}

#[test]
fn ranks_in_order_over_hosts_conform() {
    conformance::all(&Hosts(|rank| rank / 2));
}

#[test]
fn ranks_dealt_out_over_hosts_conform() {
    conformance::all(&Hosts(|rank| rank % 2));
}

#[test]
fn windows_of_a_group_that_all_have_dropped_are_freed() {
    for hosts in [Hosts(|rank| rank), Hosts(|rank| rank / 2)] {
        hosts.run(WorldSize::new(3).unwrap(), Duration::from_secs(60), &|comm| {
            // Group by group, so that none is freed by the end of all.
            for _ in 0..3 {
                let group = comm.split(Some(0), 0, "group").unwrap().unwrap();
                let window = Arc::new(vec![7_u8; 1 << 20]);
                let exposed = Arc::downgrade(&window);
                group.expose(WindowKey::new(1), window).unwrap();
                group.fence("exposed").unwrap();
                let (peer, mut bytes) = (Rank::new((comm.rank().index() + 1) % 3), vec![0; 1 << 20]);
                group.read(peer, WindowKey::new(1), 0, &mut bytes, "window").unwrap();
                group.fence("read").unwrap();
                drop(group);
                // The members tell each other, which takes a while.
                let is_left = || i32::from(exposed.strong_count() > 0);
                let mut looks = 0..1_000_000;
                while comm.all_reduce_value(is_left(), ReduceOp::Max, "left").unwrap() > 0 {
                    looks.next().expect("the window is never freed");
                }
            }
        });
    }
}

/// A process that is one rank of each world, which meets the others by files of a folder.
struct Process {
    rank: Rank,
    folder: PathBuf,
    worlds: AtomicUsize,
}

impl Harness for Process {
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
        let path = self.folder.join(self.worlds.fetch_add(1, Ordering::Relaxed).to_string());
        run(&ProcessWorld::new(self.rank, size, Meeting::File { path }), deadline, f);
    }
}

const FOLDER: &str = "ZERO_COMM_TEST_FOLDER";

/// What the processes do that the next test starts.
#[test]
#[ignore = "run by another test"]
fn a_process_of_the_suite() {
    let folder = env::var_os(FOLDER).map(PathBuf::from).expect("another test should have started this");
    let number = |name: &str| env::var(name).unwrap().parse::<usize>().unwrap();
    let size = WorldSize::new(number("SIZE")).unwrap();
    let process = Process { rank: Rank::new(number("RANK")), folder, worlds: AtomicUsize::new(0) };
    for (name, property) in conformance::PROPERTIES {
        println!("{name} at world size {size} on {}", process.rank);
        property(&process, size);
    }
}

#[test]
fn processes_conform() {
    for size in 1..=5 {
        let folder = tempfile::tempdir().unwrap();
        let children: Vec<_> = (0..size)
            .map(|rank| {
                Command::new(env::current_exe().unwrap())
                    .args(["--exact", "a_process_of_the_suite", "--ignored", "--nocapture"])
                    .env(FOLDER, folder.path())
                    .env("RANK", rank.to_string())
                    .env("SIZE", size.to_string())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
            assert!(
                told.contains(&format!("the_mean_of_integers_is_refused at world size {size}")),
                "{told}"
            );
        }
    }
}

#[test]
fn a_panic_of_any_length_reaches_the_other_ranks() {
    let (size, token) = (WorldSize::new(2).unwrap(), Token::generate().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let deadline = Duration::from_secs(60);
    let options = CoordinatorOptions { size, token: token.clone(), deadline, host: None };
    let coordinator = Coordinator::new(listener, options).unwrap();
    let world = |rank| {
        let meeting = Meeting::Coordinator { address: coordinator.address().to_string() };
        ProcessWorld::new(Rank::new(rank), size, meeting).with_token(token.clone()).with_deadline(deadline)
    };
    let long = "ö".repeat(1 << 19);
    thread::scope(|scope| {
        scope.spawn(|| {
            let panic = |_| -> Result<(), CommError> { resume_unwind(Box::new(long.clone())) };
            let own = world(1).run(panic).unwrap_err();
            assert!(matches!(own, WorldError::Panicked { message, .. } if message == long));
        });
        let error = world(0).run(|comm| comm.barrier("with a rank that panics")).unwrap_err();
        let WorldError::Failed { source: CommError::PeerLost { rank, cause, .. }, .. } = error else {
            panic!("{error}")
        };
        let LossCause::Panicked(told) = cause else { panic!("{cause}") };
        let (kept, mark) = told.split_once(" ... ").unwrap();
        assert!(rank.index() == 1 && long.starts_with(kept) && told.len() > 8000, "{told}");
        assert_eq!(mark, "(cut, 1048576 bytes in all)");
    });
}
