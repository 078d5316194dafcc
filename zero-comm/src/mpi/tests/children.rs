//! What each rank of a job does. Ignored but by the tests that start the jobs.

use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ::mpi::environment::{self, Threading};
use ::mpi::traits::{Communicator as _, CommunicatorCollectives as _};
use zero_core::{Rank, WorldSize};

use super::super::memory::PIECE;
use super::super::{MpiError, MpiFabric};
use super::job::{Job, LONG, bytes, number};
use crate::failure::Failure;
use crate::flight::GroupId;
use crate::process::{Fabric, Incoming, Outgoing};
use crate::{CommError, LossCause, Region, WindowKey};

/// Too short for what does not end.
const SHORT: Duration = Duration::from_millis(200);

/// Cuts `range` into parts of random lengths, some of them empty.
fn cuts(seed: [u64; 3], start: usize, end: usize) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    let mut at = start;
    for part in 0.. {
        if at == end {
            break;
        }
        let longest = [3, 1000, 40_000, 700_000][(number([seed[0], seed[1], seed[2] + part]) % 4) as usize];
        let len = (number([seed[1], seed[2], seed[0] + part]) as usize % longest).min(end - at);
        parts.push((at, len));
        at += len;
    }
    parts
}

#[test]
#[ignore = "a rank of an MPI job"]
fn streams_cut_differently() {
    const ROUNDS: u64 = 12;
    let job = Job::start();
    let (me, peers) = (job.rank(), job.all());
    let links = job.collective(GroupId::WORLD).unwrap();
    // What has been offered to the receiver, and asked for by it, from one rank to another before a round.
    let offered = |from: Rank, to: Rank, rounds: u64| -> usize {
        (0..rounds).map(|r| number([from.index() as u64, to.index() as u64, r]) as usize % 800_000).sum()
    };
    let wanted = |from: Rank, to: Rank, rounds: u64| -> usize {
        // All at the end, and never more than what is offered.
        let all = offered(from, to, rounds);
        if rounds == ROUNDS { all } else { all * (rounds as usize) / ROUNDS as usize }
    };
    let mut sent = vec![0; peers.len()];
    for round in 1..=ROUNDS {
        let mut outgoing = Vec::new();
        let mut incoming = Vec::new();
        for peer in &peers {
            let seed = [me.index() as u64 + 100, peer.index() as u64, round * 1000];
            for (at, len) in cuts(seed, sent[peer.index()], offered(me, *peer, round)) {
                outgoing.push((peer.index(), bytes(me, *peer, at, len)));
            }
            let seed = [me.index() as u64 + 200, peer.index() as u64, round * 1000];
            for (at, len) in cuts(seed, wanted(*peer, me, round - 1), wanted(*peer, me, round)) {
                incoming.push((*peer, at, vec![0; len]));
            }
        }
        let mut sends: Vec<_> =
            outgoing.iter().map(|(peer, bytes)| Outgoing { peer: *peer, bytes, done: 0 }).collect();
        let mut receives: Vec<_> = incoming
            .iter_mut()
            .map(|(peer, _, bytes)| Incoming { peer: peer.index(), bytes, done: 0 })
            .collect();
        job.transfer(&*links, &mut sends, &mut receives).unwrap();
        if round == ROUNDS {
            job.transfer(&*links, &mut sends, &mut []).unwrap();
        }
        for send in &sends {
            sent[send.peer] += send.done;
        }
        for (peer, at, got) in &incoming {
            assert!(*got == bytes(*peer, me, *at, got.len()), "from {peer} at {at}, {} bytes", got.len());
        }
    }
    for peer in &peers {
        assert_eq!(sent[peer.index()], offered(me, *peer, ROUNDS));
    }
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn big_exchange() {
    let job = Job::start();
    let me = job.rank();
    let links = job.collective(GroupId::WORLD).unwrap();
    for len in [0, 1, 5_000_001] {
        let got = job.exchange(&*links, &bytes(me, me, 0, len)).unwrap();
        for (peer, got) in job.all().into_iter().zip(got) {
            assert!(got == bytes(peer, peer, 0, len), "from {peer}, {len} bytes");
        }
    }
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn groups_and_threads() {
    const THREADS: u64 = 4;
    let job = Job::start();
    let me = job.rank();
    thread::scope(|scope| {
        for number in 0..THREADS {
            let job = &job;
            scope.spawn(move || {
                // Every rank makes the groups of its threads in an order of its own.
                for round in 0..8 {
                    let group = GroupId::WORLD.child(number, round);
                    let links = job.collective(group).unwrap();
                    let len = 10_000 * (number as usize + 1) + round as usize;
                    let start = number as usize * 1000;
                    let got = job.exchange(&*links, &bytes(me, me, start, len)).unwrap();
                    for (peer, got) in job.all().into_iter().zip(got) {
                        assert!(got == bytes(peer, peer, start, len), "{group} from {peer}");
                    }
                }
            });
            scope.spawn(move || {
                // Messages round the ring, in both directions at once.
                let group = GroupId::WORLD.child(number, 0);
                for peer in job.all() {
                    let sender = job.with_wait(|wait| job.fabric.sender(group, peer, wait)).unwrap();
                    for message in 0..5 {
                        let bytes = bytes(me, peer, message, 300_000 * message);
                        job.transfer(&*sender, &mut [Outgoing { peer: 0, bytes: &bytes, done: 0 }], &mut [])
                            .unwrap();
                    }
                }
            });
            scope.spawn(move || {
                let group = GroupId::WORLD.child(number, 0);
                for peer in job.all() {
                    let receiver = job.with_wait(|wait| job.fabric.receiver(group, peer, wait)).unwrap();
                    for message in 0..5 {
                        let mut into = vec![0; 300_000 * message];
                        let mut receives = [Incoming { peer: 0, bytes: &mut into, done: 0 }];
                        job.transfer(&*receiver, &mut [], &mut receives).unwrap();
                        assert!(into == bytes(peer, me, message, into.len()), "message {message} of {peer}");
                    }
                }
            });
        }
    });
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn sends_alone() {
    const LEN: usize = 300_000;
    let job = Job::start();
    let (me, next) = (job.rank(), job.next());
    let links = job.collective(GroupId::WORLD).unwrap();
    // Both send before either receives.
    let out = bytes(me, next, 0, LEN);
    let mut sends = [Outgoing { peer: next.index(), bytes: &out, done: 0 }];
    job.transfer(&*links, &mut sends, &mut []).unwrap();
    assert_eq!(sends[0].done, LEN);
    // The link's memory is its own.
    drop(out);
    let mut into = vec![0; LEN];
    let mut receives = [Incoming { peer: next.index(), bytes: &mut into, done: 0 }];
    job.transfer(&*links, &mut [], &mut receives).unwrap();
    assert!(into == bytes(next, me, 0, LEN));
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn window_reads() {
    const LEN: usize = 1_500_000;
    let job = Job::start();
    let me = job.rank();
    let links = job.collective(GroupId::WORLD).unwrap();
    let groups = [GroupId::WORLD, GroupId::WORLD.child(1, 1)];
    for (number, group) in groups.iter().enumerate() {
        let windows = job.serve(*group);
        windows.expose(WindowKey::new(7), Arc::new(bytes(me, Rank::new(number), 0, LEN)));
        windows.expose(WindowKey::new(8), Arc::new(Vec::new()));
    }
    job.meet(&*links);
    // All ranks and threads read all windows, while nobody but the service thread answers.
    thread::scope(|scope| {
        for thread in 0..4 {
            let (job, groups) = (&job, &groups);
            scope.spawn(move || {
                for peer in job.all() {
                    for (number, group) in groups.iter().enumerate() {
                        for read in 0..4 {
                            let seed = [me.index() as u64 * 10 + thread, peer.index() as u64, read];
                            let offset = number_below(seed, LEN);
                            let len = number_below([seed[2], seed[1], seed[0]], LEN - offset);
                            let got = job.read(*group, peer, 7, offset, len).unwrap();
                            assert!(got == bytes(peer, Rank::new(number), offset, len), "{peer} {group}");
                        }
                        let whole = job.read(*group, peer, 7, 0, LEN).unwrap();
                        assert!(whole == bytes(peer, Rank::new(number), 0, LEN), "{peer} {group}");
                        assert_eq!(job.read(*group, peer, 7, LEN, 0), Ok(Vec::new()));
                        assert_eq!(job.read(*group, peer, 8, 0, 0), Ok(Vec::new()));
                    }
                }
            });
        }
    });
    job.end();
}

fn number_below(seed: [u64; 3], bound: usize) -> usize {
    number(seed) as usize % bound
}

/// A region that can't be read.
struct Panics;

impl Region for Panics {
    fn bytes(&self) -> &[u8] {
        panic!("no bytes here")
    }
}

#[test]
#[ignore = "a rank of an MPI job"]
fn wrong_reads() {
    let mut job = Job::start();
    let peer = job.next();
    let links = job.collective(GroupId::WORLD).unwrap();
    let windows = job.serve(GroupId::WORLD);
    windows.expose(WindowKey::new(1), Arc::new(vec![5; 10]));
    windows.expose(WindowKey::new(2), Arc::new(vec![6; 10]));
    windows.withdraw(WindowKey::new(2));
    windows.expose(WindowKey::new(3), Arc::new(Panics));
    job.meet(&*links);

    let label = || "label".to_owned();
    let missing = |key| CommError::WindowMissing { peer, key: WindowKey::new(key), label: label() };
    assert_eq!(job.read(GroupId::WORLD, peer, 2, 0, 1), Err(missing(2)));
    assert_eq!(job.read(GroupId::WORLD, peer, 9, 0, 0), Err(missing(9)));
    assert_eq!(job.read(GroupId::WORLD.child(1, 1), peer, 1, 0, 1), Err(missing(1)));
    for (offset, requested) in [(0, 11), (11, 0), (5, 6), (usize::MAX, 1), (1, 5_000_000)] {
        let key = WindowKey::new(1);
        let bounds = CommError::WindowBounds { peer, key, label: label(), offset, requested, available: 10 };
        assert_eq!(job.read(GroupId::WORLD, peer, 1, offset, requested), Err(bounds));
    }
    assert_eq!(job.read(GroupId::WORLD, peer, 1, 4, 6), Ok(vec![5; 6]));

    let lost = job.read(GroupId::WORLD, peer, 3, 0, 1);
    assert!(
        matches!(&lost, Err(CommError::PeerLost { rank, cause: LossCause::Died(how), .. })
            if *rank == peer && how.contains("window 3 panicked")),
        "{lost:?}"
    );
    // The thread that met the panic goes on.
    job.impatient(LONG);
    assert_eq!(job.read(GroupId::WORLD, peer, 1, 4, 6), Ok(vec![5; 6]));
    job.end();
}

/// Says when it goes.
struct Watched {
    bytes: Vec<u8>,
    gone: Arc<AtomicBool>,
}

impl Region for Watched {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "a rank of an MPI job"]
fn region_goes() {
    const LEN: usize = 3_000_000;
    let job = Job::start();
    let (me, peer) = (job.rank(), job.next());
    let links = job.collective(GroupId::WORLD).unwrap();
    let windows = job.serve(GroupId::WORLD);
    let mut replaced = Vec::new();
    let expose = |version: usize| {
        let gone = Arc::new(AtomicBool::new(false));
        let watched = Watched { bytes: bytes(me, peer, version, LEN), gone: Arc::clone(&gone) };
        windows.expose(WindowKey::new(1), Arc::new(watched));
        gone
    };
    replaced.push(expose(0));
    job.meet(&*links);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..10 {
                let got = job.read(GroupId::WORLD, peer, 1, 0, LEN).unwrap();
                assert!((0..=20).any(|version| got == bytes(peer, me, version, LEN)), "a mix of versions");
            }
        });
        // Replaced again and again while it is read.
        for version in 1..=20 {
            replaced.push(expose(version));
            thread::yield_now();
        }
    });
    job.meet(&*links);
    windows.withdraw(WindowKey::new(1));
    // Ends the service thread, too.
    job.end();
    drop(job);
    assert!(replaced.iter().all(|gone| gone.load(Ordering::Relaxed)));
}

#[test]
#[ignore = "a rank of an MPI job"]
fn texts() {
    let job = Job::start();
    let root = job.rank() == Rank::ROOT;
    let longest = "ä".repeat(MpiFabric::TEXT_BYTES / 2);
    for text in ["a", "10.0.0.1:29500 token", &longest] {
        let said = root.then_some(text);
        assert_eq!(job.fabric.broadcast_text(said, LONG).unwrap(), text);
    }
    if root {
        for text in [None, Some(""), Some(&*(longest + "a"))] {
            let refused = job.fabric.broadcast_text(text, LONG);
            assert!(
                matches!(refused, Err(MpiError::Text { limit: MpiFabric::TEXT_BYTES, .. })),
                "{refused:?}"
            );
        }
    }
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn places() {
    let job = Job::start();
    job.fabric.check_place(job.rank(), job.size()).unwrap();
    let wrong = job.fabric.check_place(Rank::new(7), WorldSize::new(9).unwrap());
    assert!(matches!(&wrong, Err(MpiError::Place { mpi_rank, .. }) if *mpi_rank == job.rank()), "{wrong:?}");
    job.end();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn started_by_the_program() {
    let (universe, level) = environment::initialize_with_threading(Threading::Multiple).unwrap();
    assert_eq!(level, Threading::Multiple);
    let size = universe.world().size();
    // Also one after the other in one process.
    for _ in 0..2 {
        let job = Job::start();
        assert_eq!(job.size().get(), size as usize);
        let links = job.collective(GroupId::WORLD).unwrap();
        job.meet(&*links);
        job.end();
    }
    // MPI goes on for the program.
    assert!(!environment::is_finalized());
    universe.world().barrier();
    drop(universe);
}

#[test]
#[ignore = "a rank of an MPI job"]
fn low_thread_level() {
    let universe = environment::initialize().unwrap();
    let refused = MpiFabric::start(LONG).unwrap_err();
    assert!(matches!(&refused, MpiError::Threads { provided } if provided == "Single"), "{refused:?}");
    drop(universe);
    let refused = MpiFabric::start(LONG).unwrap_err();
    assert!(matches!(refused, MpiError::Finalised), "{refused:?}");
}

#[test]
#[ignore = "a rank of an MPI job"]
fn after_the_end() {
    let job = Job::start();
    let links = job.collective(GroupId::WORLD).unwrap();
    job.meet(&*links);
    job.end();
    assert!(environment::is_finalized());
    let finished = |error: CommError| match error {
        CommError::PeerLost { rank, cause: LossCause::Finished, .. } => rank == job.rank(),
        _ => false,
    };
    assert!(finished(job.exchange(&*links, &[1]).unwrap_err()));
    assert!(finished(job.collective(GroupId::WORLD).unwrap_err()));
    assert!(finished(job.read(GroupId::WORLD, job.rank(), 1, 0, 1).unwrap_err()));
    drop(links);
    assert!(matches!(MpiFabric::start(LONG), Err(MpiError::Finalised)));
}

/// Says that an operation failed, if rank 1 was the reason.
fn expect_failure<T: fmt::Debug>(job: &Job, operation: &str, result: Result<T, CommError>) {
    let lost = Rank::new(1);
    let right = match &result {
        // Others may be late, too.
        Err(CommError::Timeout { missing, .. }) => missing.contains(&lost),
        Err(CommError::PeerLost { rank, .. }) => *rank == lost,
        _ => false,
    };
    assert!(right, "{operation}: {result:?}");
    println!("{}: {operation} failed as it must", job.rank());
}

#[test]
#[ignore = "a rank of an MPI job"]
fn killed() {
    let mut job = Job::start();
    let me = job.rank();
    let groups: Vec<_> = (0..4).map(|color| GroupId::WORLD.child(1, color)).collect();
    let links: Vec<_> = groups.iter().map(|group| job.collective(*group).unwrap()).collect();
    job.serve(groups[0]).expose(WindowKey::new(1), Arc::new(vec![1]));
    job.meet(&*links[0]);
    if me == Rank::new(1) {
        // Dies while the others are about to take what it has sent.
        let bytes = bytes(me, me, 0, 4 * PIECE);
        let mut sends: Vec<_> =
            (0..job.size().get()).map(|peer| Outgoing { peer, bytes: &bytes, done: 0 }).collect();
        job.transfer(&*links[1], &mut sends, &mut []).unwrap();
        Command::new("sh").args(["-c", "kill -9 $PPID"]).status().unwrap();
        unreachable!("killed");
    }
    job.impatient(SHORT);
    expect_failure(&job, "big transfer", job.exchange(&*links[1], &bytes(me, me, 0, 6 * PIECE)));
    job.impatient(SHORT);
    expect_failure(&job, "transfer", job.exchange(&*links[2], &[1]));
    job.impatient(SHORT);
    expect_failure(&job, "read", job.read(groups[0], Rank::new(1), 1, 0, 1));
    job.impatient(SHORT);
    expect_failure(&job, "collective", job.collective(GroupId::WORLD.child(2, 0)));
    // A rank that is told of the failure does not wait for its deadline.
    job.impatient(Duration::MAX);
    thread::scope(|scope| {
        scope.spawn(|| {
            let (rank, cause) = (Rank::new(1), LossCause::Died("killed".to_owned()));
            job.standing.settle(Failure::Lost { rank, cause });
        });
        expect_failure(&job, "failed world", job.exchange(&*links[3], &[1]));
    });
    job.fabric.finalize(false, LONG).unwrap();
}

#[test]
#[ignore = "a rank of an MPI job"]
fn unhealthy_end() {
    let job = Job::start();
    let links = job.collective(GroupId::WORLD).unwrap();
    let peer = job.next().index();
    if job.rank() == Rank::ROOT {
        let mut into = [0];
        job.transfer(&*links, &mut [], &mut [Incoming { peer, bytes: &mut into, done: 0 }]).unwrap();
    } else {
        let late = job.fabric.broadcast_text(None, SHORT);
        assert!(matches!(late, Err(MpiError::Timeout { what: "a broadcast", after: SHORT })), "{late:?}");
        println!("the broadcast has timed out");
        job.transfer(&*links, &mut [Outgoing { peer, bytes: &[1], done: 0 }], &mut []).unwrap();
    }
    job.fabric.finalize(false, LONG).unwrap();
}
