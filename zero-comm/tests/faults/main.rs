//! Ranks that are processes, and what the others learn when one is killed, stopped, fails or errs.

mod child;
mod network;
mod ranks;

use std::time::{Duration, Instant};

use child::Scenario;
use ranks::{Leader, Ranks, Worlds};
use rustix::process::Signal;
use serde_json::json;
use zero_comm::{CommError, LossCause, OpKind};
use zero_core::Rank;

/// On which host each rank is.
const TOGETHER: &[usize] = &[0, 0, 0];
const APART: &[usize] = &[0, 1, 2];
const MIXED: &[usize] = &[0, 0, 1];
const DISTRIBUTIONS: [&[usize]; 4] = [TOGETHER, APART, MIXED, &[0, 1, 1]];

/// Within what time the loss of a process is known everywhere.
const PROMPT: Duration = Duration::from_secs(2);

/// What the operations of most worlds here wait, so that nothing is found out by a deadline.
const PATIENT: Duration = Duration::from_secs(60);

/// How long operations wait that are to time out.
const IMPATIENT: Duration = Duration::from_secs(1);

fn ranks_but(size: usize, victim: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |rank| *rank != victim)
}

/// Kills `victim`, and expects that all others learn of it.
fn is_mourned(mut ranks: Ranks, victim: usize) {
    ranks.are_ready();
    ranks.go_on();
    let start = Instant::now();
    ranks.signal(victim, Signal::KILL);
    for rank in ranks_but(ranks.len(), victim) {
        let error = ranks.error(rank);
        let waited = start.elapsed();
        let CommError::PeerLost { rank: lost, cause, .. } = &error else { panic!("got {error:?}") };
        assert_eq!(lost.index(), victim, "{error}");
        assert!(matches!(cause, LossCause::Died(_)), "{error}");
        assert!(waited < PROMPT, "rank {rank} learned of it after {waited:?}");
        assert_eq!(
            ranks.words(rank),
            json!({
                "rank": rank, "kind": "stopped", "message": error.to_string(), "because_of": victim
            })
        );
    }
    ranks.leave_nothing();
}

/// Stops `victim`, and expects that all others name it at the deadline.
fn is_missed(mut ranks: Ranks, victim: usize) {
    ranks.are_ready();
    ranks.signal(victim, Signal::STOP);
    ranks.go_on();
    for rank in ranks_but(ranks.len(), victim) {
        let error = ranks.error(rank);
        let named = match &error {
            CommError::Timeout { missing, .. } => missing.clone(),
            CommError::PeerLost { rank, .. } => vec![*rank],
            _ => panic!("got {error:?}"),
        };
        assert_eq!(named, [Rank::new(victim)], "on rank {rank}: {error}");
    }
    ranks.signal(victim, Signal::KILL);
    ranks.leave_nothing();
}

#[test]
fn a_rank_that_is_killed_is_named_by_those_who_wait() {
    for hosts in DISTRIBUTIONS {
        for victim in 1..3 {
            is_mourned(Worlds::new(hosts, PATIENT).start(Scenario::Wait { victim }), victim);
        }
    }
}

#[test]
fn a_rank_that_is_killed_while_data_moves_is_named() {
    for hosts in DISTRIBUTIONS {
        is_mourned(Worlds::new(hosts, PATIENT).start(Scenario::Move), 1);
    }
    for hosts in [[0, 0, 1, 1, 2], [0, 1, 0, 1, 0]] {
        is_mourned(Worlds::new(&hosts, PATIENT).start(Scenario::Move), 4);
    }
}

#[test]
fn a_rank_that_is_killed_while_others_receive_or_read_from_it_is_named() {
    for hosts in DISTRIBUTIONS {
        for scenario in [Scenario::Send { victim: 1 }, Scenario::Read { victim: 1 }] {
            is_mourned(Worlds::new(hosts, PATIENT).start(scenario), 1);
        }
    }
}

#[test]
fn a_rank_that_is_stopped_while_others_receive_or_read_from_it_is_named() {
    for hosts in DISTRIBUTIONS {
        is_missed(Worlds::new(hosts, IMPATIENT).start(Scenario::Send { victim: 1 }), 1);
    }
    // The memory of a rank on the same host can be read whatever the rank does.
    is_missed(Worlds::new(APART, IMPATIENT).start(Scenario::Read { victim: 1 }), 1);
}

#[test]
fn the_rank_that_hosts_the_coordinator_is_named_if_it_is_killed() {
    for hosts in DISTRIBUTIONS {
        for scenario in [Scenario::Wait { victim: 0 }, Scenario::Move] {
            is_mourned(Worlds::new(hosts, PATIENT).led_by(Leader::RankZero).start(scenario), 0);
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_named_at_the_deadline() {
    for hosts in DISTRIBUTIONS {
        for victim in [0, 2] {
            is_missed(Worlds::new(hosts, IMPATIENT).start(Scenario::Wait { victim }), victim);
        }
        is_missed(Worlds::new(hosts, IMPATIENT).start(Scenario::Move), 1);
    }
}

#[test]
fn the_rank_that_hosts_the_coordinator_is_named_if_it_is_stopped() {
    for hosts in DISTRIBUTIONS {
        let worlds = Worlds::new(hosts, IMPATIENT).led_by(Leader::RankZero);
        is_missed(worlds.start(Scenario::Wait { victim: 0 }), 0);
        let worlds = Worlds::new(hosts, IMPATIENT).led_by(Leader::RankZero);
        is_missed(worlds.start(Scenario::Move), 0);
    }
}

#[test]
fn a_launcher_that_is_killed_is_missed_by_all() {
    for hosts in [TOGETHER, APART, MIXED] {
        for scenario in [Scenario::Wait { victim: 2 }, Scenario::Move] {
            let mut ranks = Worlds::new(hosts, PATIENT).led_by(Leader::Process).start(scenario);
            ranks.are_ready();
            ranks.go_on();
            let start = Instant::now();
            ranks.kill_leader();
            // Whom the others wait for does nothing that could fail.
            let waiting = if scenario == Scenario::Move { 3 } else { 2 };
            for rank in 0..waiting {
                let error = ranks.error(rank);
                assert!(matches!(error, CommError::CoordinatorLost { .. }), "{error}");
                assert!(start.elapsed() < PROMPT, "rank {rank} learned of it after {:?}", start.elapsed());
            }
            if waiting < 3 {
                ranks.signal(2, Signal::KILL);
            }
            ranks.leave_nothing();
        }
    }
}

#[test]
fn what_a_rank_says_at_its_end_is_heard_by_all() {
    let causes = [
        (Scenario::Panic { victim: 1 }, LossCause::Panicked("no more paper".into()), Some("panic")),
        (Scenario::Fail { victim: 1 }, LossCause::Failed("the disk is full".into()), Some("error")),
        (Scenario::Exit { victim: 1 }, LossCause::Died("its process ended without a word".into()), None),
    ];
    for hosts in [TOGETHER, APART, MIXED] {
        for (scenario, expected, kind) in &causes {
            let mut ranks = Worlds::new(hosts, PATIENT).start(*scenario);
            for rank in [0, 2] {
                let error = ranks.error(rank);
                let CommError::PeerLost { rank: lost, cause, .. } = &error else { panic!("got {error:?}") };
                assert_eq!((lost.index(), cause), (1, expected));
                assert_eq!(ranks.words(rank)["because_of"], json!(1));
            }
            ranks.have_ended();
            match (kind, expected) {
                (Some(kind), LossCause::Panicked(message) | LossCause::Failed(message)) => assert_eq!(
                    ranks.words(1),
                    json!({ "rank": 1, "kind": kind, "message": message, "because_of": null })
                ),
                _ => assert_eq!(ranks.exit_code(1), Some(3)),
            }
            ranks.leave_nothing();
        }
    }
}

#[test]
fn calls_that_do_not_fit_are_named_before_anything_moves() {
    let scenarios = [Scenario::OtherOperation, Scenario::OtherType, Scenario::OtherLength];
    for hosts in DISTRIBUTIONS {
        for scenario in scenarios {
            let mut ranks = Worlds::new(hosts, PATIENT).start(scenario);
            let errors: Vec<_> = (0..3).map(|rank| ranks.error(rank)).collect();
            let CommError::Mismatch { first, second } = &errors[0] else { panic!("got {:?}", errors[0]) };
            assert_eq!((first.rank.index(), second.rank.index()), (0, 2));
            assert_eq!(first.operation, OpKind::AllReduce);
            assert_ne!((first.operation, &first.arguments), (second.operation, &second.arguments));
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            // Each has checked that its buffer is what it was.
            ranks.have_ended();
            assert!((0..3).all(|rank| ranks.exit_code(rank) == Some(0)));
            ranks.leave_nothing();
        }
    }
}

#[test]
fn a_rank_without_files_says_so_at_once() {
    for hosts in DISTRIBUTIONS {
        for victim in 0..3 {
            let mut ranks = Worlds::new(hosts, PATIENT).start(Scenario::LackFiles { victim });
            for rank in 0..3 {
                let error = ranks.error(rank);
                let CommError::Aborted { rank: who, reason, .. } = &error else { panic!("got {error:?}") };
                assert_eq!(who.index(), victim, "{error}");
                assert!(reason.ends_with("raise the limit of open files (`ulimit -n`)"), "{error}");
            }
            ranks.leave_nothing();
        }
    }
}

#[test]
fn a_rank_that_has_no_files_to_join_with_says_so_at_once() {
    for hosts in [TOGETHER, APART] {
        for files in 1..=4 {
            for leader in [Leader::Test, Leader::RankZero] {
                let victim = if leader == Leader::RankZero { 0 } else { 1 };
                let scenario = Scenario::JoinWithout { victim, files };
                let mut ranks = Worlds::new(hosts, PATIENT).led_by(leader).start(scenario);
                let words = ranks.words(victim);
                let message = words["message"].as_str().unwrap();
                assert!(
                    message.contains("raise the limit of open files (`ulimit -n`)"),
                    "{files}: {message}"
                );
            }
        }
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_not_the_end_of_the_process() {
    let limited = ["sh", "-c", "ulimit -f 1000000; exec \"$0\" \"$@\""].map(str::to_owned).to_vec();
    let prefixes = vec![limited, Vec::new(), Vec::new()];
    let mut ranks = Worlds::new(TOGETHER, PATIENT).with_prefixes(prefixes).start(Scenario::Move);
    for rank in 0..3 {
        let words = ranks.words(rank);
        let message = words["message"].as_str().unwrap();
        assert!(message.contains("rank 0 aborted the world"), "{message}");
        assert!(
            message.contains("`ulimit -f unlimited`") && message.contains("ZERO_SHARED_MEMORY=off"),
            "{message}"
        );
        assert_eq!(words["because_of"], if rank == 0 { json!(null) } else { json!(0) });
    }
    ranks.leave_nothing();
}
