//! Those ranks join that belong together, and nobody else.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use super::frame::{self, MAX_FROM_RANK};
use super::message::{FromRank, PURPOSE};
use super::strangers::{are_shown_the_door, visit};
use super::{
    Agent, Connection, Coordinator, CoordinatorOptions, Hello, JoinError, Refusal, Roster, Timed, Token,
    connect,
};
use crate::GroupId;
use crate::failure::Failure;
use crate::flight::{Begun, Lane};
use crate::process::Notice;

const PATIENCE: Duration = Duration::from_secs(60);

fn world_size(size: usize) -> WorldSize {
    WorldSize::new(size).unwrap()
}

fn coordinator(size: usize, deadline: Duration) -> Coordinator {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (size, token) = (world_size(size), Token::generate().unwrap());
    Coordinator::new(listener, CoordinatorOptions { size, token, deadline, host: None }).unwrap()
}

fn hello(rank: usize, size: usize) -> Hello {
    let (rank, size) = (Rank::new(rank), world_size(size));
    let (build, host) = ("build".to_owned(), format!("host {rank}"));
    Hello { rank, size, build, host, data: None, segment: None, pid: 1, deadline: PATIENCE }
}

fn join(coordinator: &Coordinator, hello: Hello) -> Result<(Agent, Roster), JoinError> {
    let address = coordinator.address().to_string();
    Connection::connect(&address, coordinator.token(), PATIENCE)?.join(hello, PATIENCE)
}

fn refusal(outcome: Result<(Agent, Roster), JoinError>) -> Refusal {
    match outcome {
        Err(JoinError::Refused(refusal)) => refusal,
        other => panic!("got {other:?}"),
    }
}

/// Expects that `hellos`, one for each rank, make a world that comes to its end.
fn make_a_world(coordinator: &Coordinator, hellos: Vec<Hello>) {
    thread::scope(|scope| {
        for hello in &hellos {
            let hellos = &hellos;
            scope.spawn(move || {
                let (agent, roster) = join(coordinator, hello.clone()).unwrap();
                assert_eq!(roster.hellos, *hellos);
                assert_eq!(roster.host, None);
                is_well(&agent);
            });
        }
    });
    assert_eq!(coordinator.failure(), None);
}

/// Expects that a rank's world begins and ends.
fn is_well(agent: &Agent) {
    let standing = agent.standing();
    assert!(standing.start(PATIENCE), "{standing:?}");
    standing.finish();
    standing.linger();
    assert!(standing.is_over() && standing.failure().is_none(), "{standing:?}");
}

#[test]
fn ranks_join_and_learn_of_each_other() {
    for size in 1..=5 {
        make_a_world(&coordinator(size, PATIENCE), (0..size).map(|rank| hello(rank, size)).collect());
    }
}

#[test]
fn a_rank_that_does_not_join_is_named_to_all() {
    let deadline = Duration::from_millis(300);
    let coordinator = coordinator(3, deadline);
    thread::scope(|scope| {
        let ranks = [0, 2].map(|rank| {
            scope.spawn({
                let coordinator = &coordinator;
                move || refusal(join(coordinator, hello(rank, 3)))
            })
        });
        for rank in ranks {
            let expected = Refusal::Missing { missing: vec![Rank::new(1)], after: deadline };
            assert_eq!(rank.join().unwrap(), expected);
        }
    });
    assert!(coordinator.failure().unwrap().starts_with("rank 1 did not join within 300ms"));
    assert_eq!(coordinator.blamed(), Some(Rank::new(1)));
    // Who comes later learns the same.
    assert!(matches!(refusal(join(&coordinator, hello(1, 3))), Refusal::Missing { .. }));
}

#[test]
fn a_rank_that_leaves_before_all_have_come_is_named() {
    let coordinator = coordinator(2, PATIENCE);
    let mut stream = enter(&coordinator, PURPOSE);
    say(&mut stream, &FromRank::Join(hello(1, 2)));
    drop(stream);
    let left = refusal(join(&coordinator, hello(0, 2)));
    assert!(matches!(&left, Refusal::Left { rank, .. } if rank.index() == 1), "{left}");
}

#[test]
fn a_second_process_of_a_rank_is_refused_and_the_first_is_not_disturbed() {
    let coordinator = coordinator(2, PATIENCE);
    thread::scope(|scope| {
        let (outcomes, outcome) = mpsc::channel();
        for pid in 1..=2 {
            let (outcomes, coordinator) = (outcomes.clone(), &coordinator);
            let hello = Hello { pid, ..hello(0, 2) };
            scope.spawn(move || outcomes.send(join(coordinator, hello)).unwrap());
        }
        // Whoever came first waits for rank 1.
        let second = refusal(outcome.recv().unwrap());
        assert!(matches!(second, Refusal::Taken { rank: Rank::ROOT, .. }), "{second}");
        let other = scope.spawn(|| is_well(&join(&coordinator, hello(1, 2)).unwrap().0));
        is_well(&outcome.recv().unwrap().unwrap().0);
        other.join().unwrap();
    });
}

#[test]
fn a_process_that_joins_once_more_is_told_so() {
    let coordinator = coordinator(1, PATIENCE);
    is_well(&join(&coordinator, hello(0, 1)).unwrap().0);
    assert_eq!(refusal(join(&coordinator, hello(0, 1))), Refusal::Again { rank: Rank::ROOT });
}

#[test]
fn a_coordinator_of_more_ranks_than_there_can_be_is_refused() {
    for size in [65_537, 99_999_999_999, usize::MAX] {
        let (listener, token) = (TcpListener::bind("127.0.0.1:0").unwrap(), Token::generate().unwrap());
        let size = world_size(size);
        let options = CoordinatorOptions { size, token, deadline: PATIENCE, host: None };
        let error = Coordinator::new(listener, options).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("ask for 65536 at most"), "{error}");
    }
}

#[test]
fn a_rank_of_another_world_is_refused_and_nobody_is_disturbed() {
    let coordinator = coordinator(2, PATIENCE);
    let (rank, ours) = (Rank::new(1), world_size(2));
    let size = refusal(join(&coordinator, hello(1, 3)));
    assert_eq!(size, Refusal::Size { rank, theirs: world_size(3), ours });
    let range = refusal(join(&coordinator, hello(7, 2)));
    assert_eq!(range, Refusal::Range { rank: Rank::new(7), size: ours });
    let token = Token::generate().unwrap();
    let address = coordinator.address().to_string();
    let stranger = Connection::connect(&address, &token, PATIENCE).unwrap_err();
    assert!(matches!(&stranger, JoinError::Token { address: named } if *named == address), "{stranger}");
    make_a_world(&coordinator, vec![hello(0, 2), hello(1, 2)]);
}

#[test]
fn a_rank_of_another_build_is_refused_and_nobody_is_disturbed() {
    let coordinator = coordinator(2, PATIENCE);
    let other = || Hello { build: "another build".to_owned(), ..hello(1, 2) };
    thread::scope(|scope| {
        let (outcomes, outcome) = mpsc::channel();
        for hello in [hello(0, 2), other()] {
            let (outcomes, coordinator) = (outcomes.clone(), &coordinator);
            scope.spawn(move || outcomes.send(join(coordinator, hello)).unwrap());
        }
        // Who came first says what is to be run.
        let Refusal::Build { rank, theirs, other: first, ours } = refusal(outcome.recv().unwrap()) else {
            panic!("another refusal");
        };
        assert_eq!(rank.index() + first.index(), 1);
        assert_ne!(theirs, ours);
        let fitting = Hello { build: ours, ..hello(rank.index(), 2) };
        let second = scope.spawn(|| is_well(&join(&coordinator, fitting).unwrap().0));
        is_well(&outcome.recv().unwrap().unwrap().0);
        second.join().unwrap();
    });
}

#[test]
fn strangers_are_shown_the_door_and_nobody_is_disturbed() {
    let coordinator = coordinator(3, PATIENCE);
    let strangers = visit(coordinator.address());
    make_a_world(&coordinator, (0..3).map(|rank| hello(rank, 3)).collect());
    for told in are_shown_the_door(strangers) {
        // A greeting, and whether the proof is right, is all that a stranger learns.
        assert!(told.len() <= 43 && told.get(42).is_none_or(|answer| *answer == 0), "{told:?}");
    }
}

#[test]
fn a_crowd_of_strangers_is_not_listened_to_at_once() {
    let coordinator = coordinator(2, PATIENCE);
    let crowd: Vec<_> = (0..300).map(|_| TcpStream::connect(coordinator.address()).unwrap()).collect();
    make_a_world(&coordinator, vec![hello(0, 2), hello(1, 2)]);
    are_shown_the_door(crowd);
}

/// Shakes hands with the coordinator as a process of the job.
fn enter(coordinator: &Coordinator, purpose: &[u8]) -> TcpStream {
    let stream = TcpStream::connect(coordinator.address()).unwrap();
    connect(&mut Timed::new(&stream, Instant::now() + PATIENCE), coordinator.token(), purpose).unwrap();
    stream
}

fn say(stream: &mut TcpStream, message: &FromRank) {
    stream.write_all(&frame::encode(message, MAX_FROM_RANK).unwrap()).unwrap();
}

#[test]
fn who_knows_the_token_but_not_the_language_is_shown_the_door() {
    let coordinator = coordinator(2, PATIENCE);
    let pong = frame::encode(&FromRank::Pong, MAX_FROM_RANK).unwrap();
    let too_long = (MAX_FROM_RANK as u32 + 1).to_le_bytes();
    let words: [&[u8]; 6] = [&[], &[9, 0], &too_long, &u32::MAX.to_le_bytes(), &[1, 0, 0, 0, 99], &pong];
    let mut visitors: Vec<_> = words
        .iter()
        .map(|words| {
            let mut stream = enter(&coordinator, PURPOSE);
            stream.write_all(words).unwrap();
            stream
        })
        .collect();
    visitors.push(enter(&coordinator, b"data"));
    make_a_world(&coordinator, vec![hello(0, 2), hello(1, 2)]);
    are_shown_the_door(visitors);
}

#[test]
fn a_rank_that_says_nonsense_is_lost() {
    let nonsense: [&[u8]; 3] = [&u32::MAX.to_le_bytes(), &[1, 0, 0, 0, 99], &[2, 0, 0, 0, 3, 3]];
    for words in nonsense {
        let coordinator = coordinator(2, PATIENCE);
        let mut stream = enter(&coordinator, PURPOSE);
        say(&mut stream, &FromRank::Join(hello(1, 2)));
        let (agent, _) = join(&coordinator, hello(0, 2)).unwrap();
        stream.write_all(words).unwrap();
        agent.standing().linger();
        let failure = agent.standing().failure();
        assert!(matches!(failure, Some(Failure::Lost { rank, .. }) if rank.index() == 1), "{failure:?}");
        assert_eq!(coordinator.blamed(), Some(Rank::new(1)));
    }
}

/// An address at which somebody answers `words` to whatever is said.
fn answering(words: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&words).unwrap();
        // Until the other side has had enough.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    address
}

#[test]
fn what_is_no_coordinator_of_the_job_is_found_out() {
    let call = |words: Vec<u8>| {
        let address = answering(words).to_string();
        Connection::connect(&address, &Token::generate().unwrap(), PATIENCE).unwrap_err()
    };
    let web = call(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    assert!(matches!(web, JoinError::Stranger { .. }), "{web}");
    let newer = call([&b"zerocomm"[..], &7_u16.to_le_bytes()].concat());
    assert!(matches!(newer, JoinError::Version { theirs: 7, .. }), "{newer}");
    let greeting = [&b"zerocomm"[..], &1_u16.to_le_bytes(), &[3; 32]].concat();
    let impostor = call([&greeting[..], &[1], &7_u32.to_le_bytes(), b"control", &[0; 32]].concat());
    assert!(matches!(impostor, JoinError::Impostor { .. }), "{impostor}");
    let long = call([&greeting[..], &[1], &u32::MAX.to_le_bytes()].concat());
    assert!(matches!(long, JoinError::Stranger { .. }), "{long}");
}

#[test]
fn however_many_groups_a_rank_is_in_it_can_say_that_it_has_finished() {
    let mut begun = Begun::default();
    for split in 0..100_000 {
        begun.add(Lane::Receive(GroupId::WORLD.child(split, u64::MAX), Rank::new(usize::MAX)));
    }
    let told = |begun| frame::encode(&FromRank::Notice(Notice::Finished(begun)), MAX_FROM_RANK);
    assert!(told(begun.clone()).is_err());
    assert!(told(begun.cut()).is_ok());
}
