//! What a world decides.

use std::net::Ipv4Addr;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

fn join(world: &mut World, rank: usize, deadline: Duration, now: Instant) -> bool {
    let (build, host) = (String::new(), String::new());
    let (rank, size) = (Rank::new(rank), world.size);
    let hello = Hello { rank, size, build, host, data: None, segment: None, pid: 1, deadline };
    world.join(rank.index(), (Ipv4Addr::LOCALHOST, 1).into(), hello, now)
}

fn awaited(size: usize, now: Instant) -> World {
    World::new(WorldSize::new(size).unwrap(), None, 5 * MINUTE, now)
}

/// A world of which all ranks have joined.
fn joined(size: usize) -> World {
    let now = Instant::now();
    let mut world = awaited(size, now);
    assert!((0..size).all(|rank| join(&mut world, rank, MINUTE, now)));
    world
}

fn starts(world: &mut World) -> bool {
    world.actions().iter().any(|action| matches!(action, Action::Send(_, ToRank::Go)))
}

#[test]
fn a_world_starts_when_each_rank_is_ready() {
    let (mut world, now) = (joined(3), Instant::now());
    for (rank, last) in [(2, false), (0, false), (1, true)] {
        world.hear(Rank::new(rank), FromRank::Notice(Notice::Ready), now).unwrap();
        assert_eq!(starts(&mut world), last);
    }
}

#[test]
fn a_rank_that_is_ready_twice_is_not_two() {
    let (mut world, now) = (joined(2), Instant::now());
    world.hear(Rank::ROOT, FromRank::Notice(Notice::Ready), now).unwrap();
    world.hear(Rank::ROOT, FromRank::Notice(Notice::Ready), now).unwrap_err();
    assert!(!starts(&mut world));
}

#[test]
fn a_group_that_all_members_have_dropped_is_forgotten_by_them() {
    let (mut world, now) = (joined(3), Instant::now());
    world.actions();
    let mut leave = |rank, group| {
        let left = Notice::Left { group, members: 2 };
        world.hear(Rank::new(rank), FromRank::Notice(left), now).unwrap();
        world.actions()
    };
    let (first, second) = (GroupId::WORLD.child(1, 0), GroupId::WORLD.child(2, 0));
    assert_eq!(leave(2, first), []);
    assert_eq!(leave(2, first), []);
    assert_eq!(leave(0, second), []);
    assert_eq!(leave(0, first), [Action::Send(vec![0, 2], ToRank::Forget(first))]);
    assert_eq!(leave(1, second), [Action::Send(vec![0, 1], ToRank::Forget(second))]);
}

#[test]
fn who_waits_shortest_decides_when_all_must_have_come() {
    let start = Instant::now();
    let mut world = awaited(3, start);
    assert_eq!(world.next(), Some(start + 5 * MINUTE));
    join(&mut world, 0, Duration::MAX, start);
    join(&mut world, 2, MINUTE, start + MINUTE);
    assert_eq!(world.next(), Some(start + 2 * MINUTE));
    world.pass(start + 2 * MINUTE);
    assert!(world.failure().unwrap().starts_with("rank 1 did not join within 60s"));
    assert_eq!(world.lost(), [(Rank::new(1), "did not join within 60s".to_owned())]);
}

#[test]
fn processes_that_want_no_world_are_not_lost() {
    let start = Instant::now();
    let mut world = awaited(2, start);
    world.note_end(Rank::new(1), "exit code 0".to_owned());
    assert_eq!(world.failure(), None);
    world.pass(start + 5 * MINUTE);
    assert!(world.failure().is_some());
    assert_eq!(world.lost(), []);
}

#[test]
fn nobody_waits_for_a_rank_whose_process_has_ended() {
    let now = Instant::now();
    let end = |world: &mut World| world.note_end(Rank::new(1), "exit code 0".to_owned());
    let came = |world: &mut World| join(world, 0, MINUTE, now);
    let (mut early, mut late) = (awaited(2, now), awaited(2, now));
    end(&mut early);
    came(&mut early);
    came(&mut late);
    end(&mut late);
    for world in [early, late] {
        let failure = world.failure().unwrap();
        assert!(failure.starts_with("rank 1 ended before it joined its world: exit code 0"), "{failure}");
        assert_eq!(world.lost()[0].0, Rank::new(1));
    }
}

#[test]
fn the_end_of_a_process_whose_rank_has_come_says_nothing() {
    let (mut world, now) = (awaited(2, Instant::now()), Instant::now());
    world.note_end(Rank::new(1), "exit code 0".to_owned());
    // What it started has gone on.
    join(&mut world, 1, MINUTE, now);
    world.note_end(Rank::new(1), "exit code 0".to_owned());
    assert!(join(&mut world, 0, MINUTE, now) && world.has_begun());
}

#[test]
fn the_longest_deadline_decides_how_long_a_rank_may_be_silent() {
    for (deadlines, silence) in [([1, 2], 10), ([30, 20], 30), ([5, 60], 60)] {
        let now = Instant::now();
        let mut world = awaited(2, now);
        for (rank, deadline) in deadlines.into_iter().enumerate() {
            join(&mut world, rank, Duration::from_secs(deadline), now);
        }
        let told = world.actions().into_iter().find_map(|action| match action {
            Action::Send(_, ToRank::Start { silence, .. }) => Some(silence),
            _ => None,
        });
        assert_eq!(told, Some(Duration::from_secs(silence)));
        // Only rank 0 is heard of.
        for beat in 0..=BEATS {
            assert_eq!(world.failure(), None, "{beat}");
            world.hear(Rank::ROOT, FromRank::Pong, now).unwrap();
            world.pass(now + (beat + 1) * Duration::from_secs(silence) / BEATS);
        }
        assert_eq!(world.lost(), [(Rank::new(1), format!("not heard of for {silence}s"))]);
    }
}
