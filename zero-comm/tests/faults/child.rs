//! What the processes do that the tests start.

use std::env;
use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::mem;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use zero_comm::{
    CommError, Communicator, CommunicatorExt, Coordinator, CoordinatorOptions, Meeting, ProcessWorld,
    ReduceOp, WindowKey,
};
use zero_core::{Rank, WorldSize};

use crate::ranks::listening;

/// The variable that makes a process one of those.
pub(crate) const PLAN: &str = "ZERO_COMM_TEST_PLAN";

/// How long joining may take.
pub(crate) const JOINING: Duration = Duration::from_secs(60);

const MIB: usize = 1 << 20;

/// What a process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Plan {
    /// Hosts the coordinator of so many ranks.
    Lead {
        size: usize,
        token: String,
    },
    Rank(RankPlan),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankPlan {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) token: String,
    pub(crate) host: Option<String>,
    pub(crate) meeting: Place,
    /// How long operations wait.
    pub(crate) deadline: Duration,
    pub(crate) scenario: Scenario,
}

/// Where the ranks meet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Place {
    Coordinator(String),
    File(PathBuf),
    RankZero(String, u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Scenario {
    /// All but one wait for that one.
    Wait {
        victim: usize,
    },
    /// Large reductions, again and again.
    Move,
    /// One sends large messages to the others in turn, again and again.
    Send {
        victim: usize,
    },
    /// All but one read that one's window, again and again.
    Read {
        victim: usize,
    },
    Panic {
        victim: usize,
    },
    Fail {
        victim: usize,
    },
    Exit {
        victim: usize,
    },
    /// The last rank calls something else than the others.
    OtherOperation,
    OtherType,
    OtherLength,
    /// One joins with so few files left.
    JoinWithout {
        victim: usize,
        files: usize,
    },
    /// All make groups, one without files for many.
    LackFiles {
        victim: usize,
    },
}

/// Says something to the test.
fn say(what: &str, value: &impl Serialize) {
    // The test harness may be in the middle of a line.
    let line = format!("\n@@{what} {}\n", serde_json::to_string(value).unwrap());
    io::stdout().write_all(line.as_bytes()).unwrap();
    io::stdout().flush().unwrap();
}

/// What the processes do that the tests start.
#[test]
#[ignore = "run by the other tests"]
fn a_process_of_a_test() {
    let plan = env::var(PLAN).expect("another test should have started this");
    match serde_json::from_str(&plan).unwrap() {
        Plan::Lead { size, token } => lead(size, &token),
        Plan::Rank(plan) => be(&plan),
    }
}

fn lead(size: usize, token: &str) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (size, token) = (WorldSize::new(size).unwrap(), token.parse().unwrap());
    let options = CoordinatorOptions { size, token, deadline: JOINING, host: None };
    let coordinator = Coordinator::new(listener, options).unwrap();
    say("address", &coordinator.address());
    sleep_for_ever();
}

fn be(plan: &RankPlan) {
    let meeting = match plan.meeting.clone() {
        Place::Coordinator(address) => Meeting::Coordinator { address },
        Place::File(path) => Meeting::File { path },
        Place::RankZero(host, port) => Meeting::Bind { host, port },
    };
    let world = ProcessWorld::new(Rank::new(plan.rank), WorldSize::new(plan.size).unwrap(), meeting)
        .with_token(plan.token.parse().unwrap())
        .with_deadline(JOINING);
    let world = match &plan.host {
        Some(host) => world.with_host(host),
        None => world,
    };
    match plan.scenario {
        Scenario::JoinWithout { victim, files } if plan.rank == victim => leave_files_for(files),
        _ => {}
    }
    let outcome = world.run(|comm| {
        comm.set_deadline(plan.deadline);
        act(&comm, plan.scenario)
    });
    assert!(outcome.is_err(), "the world has not failed");
    // The process goes on, without anything of the world.
    let ports = listening(process::id());
    assert!(ports.is_empty(), "rank {} still listens at {ports:?}", plan.rank);
}

fn act(comm: &Arc<dyn Communicator>, scenario: Scenario) -> Result<(), Box<dyn Error>> {
    let (rank, is_last) = (comm.rank().index(), comm.rank().index() + 1 == comm.world_size().get());
    comm.barrier("before")?;
    let error = match scenario {
        Scenario::Wait { victim } => {
            say("ready", &());
            if rank == victim {
                sleep_for_ever();
            }
            await_word();
            comm.barrier("waiting").unwrap_err()
        }
        Scenario::Move => {
            let mut buffer = vec![0.0_f32; 8 * MIB];
            comm.all_reduce(&mut buffer, ReduceOp::Sum, "first")?;
            say("ready", &());
            loop {
                if let Err(error) = comm.all_reduce(&mut buffer, ReduceOp::Sum, "gradient") {
                    break error;
                }
            }
        }
        Scenario::Send { victim } => {
            let (mut buffer, others) = (vec![0.0_f32; MIB], comm.world_size().ranks());
            let others: Vec<_> = others.filter(|other| other.index() != victim).collect();
            let mut turns = 0;
            loop {
                let outcome = if rank == victim {
                    others.iter().try_for_each(|other| comm.send(*other, &buffer, "message"))
                } else {
                    comm.receive(Rank::new(victim), &mut buffer, "message")
                };
                if let Err(error) = outcome {
                    break error;
                }
                turns += 1;
                if turns == 2 {
                    say("ready", &());
                }
            }
        }
        Scenario::Read { victim } => {
            let (key, mut buffer) = (WindowKey::new(7), vec![0; 4 * MIB]);
            if rank == victim {
                comm.expose(key, Arc::new(vec![1_u8; 4 * MIB]))?;
            }
            comm.fence("exposed")?;
            say("ready", &());
            if rank == victim {
                sleep_for_ever();
            }
            loop {
                if let Err(error) = comm.read(Rank::new(victim), key, 0, &mut buffer, "window") {
                    break error;
                }
            }
        }
        Scenario::Panic { victim } if rank == victim => panic!("no more paper"),
        Scenario::Fail { victim } if rank == victim => return Err("the disk is full".into()),
        Scenario::Exit { victim } if rank == victim => process::exit(3),
        Scenario::Panic { .. } | Scenario::Fail { .. } | Scenario::Exit { .. } => {
            comm.barrier("waiting").unwrap_err()
        }
        Scenario::LackFiles { victim } => {
            if rank == victim {
                leave_files_for(4);
            }
            let mut groups = Vec::new();
            loop {
                match comm.split(Some(0), 0, "group") {
                    Ok(group) => groups.push(group),
                    Err(error) => break error,
                }
            }
        }
        Scenario::OtherType if is_last => unchanged(|ones: &mut [i32]| sum(comm, ones), 1, MIB / 4),
        Scenario::OtherLength if is_last => unchanged(|ones: &mut [f32]| sum(comm, ones), 1.0, MIB / 4 + 1),
        Scenario::OtherOperation if is_last => {
            let broadcast = |ones: &mut [f32]| comm.broadcast(ones, Rank::ROOT, "gradient");
            unchanged(broadcast, 1.0, MIB / 4)
        }
        _ => unchanged(|ones: &mut [f32]| sum(comm, ones), 1.0, MIB / 4),
    };
    say("error", &error);
    Err(error.into())
}

/// Lets this process open only so many files more.
fn leave_files_for(few: usize) {
    let limit = Rlimit { current: Some(200), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut open: Vec<_> = iter::from_fn(|| File::open("/dev/null").ok()).collect();
    open.truncate(open.len().checked_sub(few).unwrap());
    mem::forget(open);
}

fn sum<T: zero_comm::Element>(comm: &Arc<dyn Communicator>, ones: &mut [T]) -> Result<(), CommError> {
    comm.all_reduce(ones, ReduceOp::Sum, "gradient")
}

/// The error of `call`, which must leave its buffer of `length` ones alone.
fn unchanged<T: Copy + PartialEq>(
    call: impl FnOnce(&mut [T]) -> Result<(), CommError>,
    one: T,
    length: usize,
) -> CommError {
    let mut ones = vec![one; length];
    let error = call(&mut ones).unwrap_err();
    assert!(ones.iter().all(|other| *other == one), "data has moved");
    error
}

/// Waits for the test to say that it has done what it does to others.
fn await_word() {
    let mut word = String::new();
    io::stdin().read_line(&mut word).unwrap();
}

fn sleep_for_ever() -> ! {
    loop {
        thread::park();
    }
}
