//! What is read from the network, for whoever fuzzes it. Not part of the API.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use super::coordinator::{Action, World};
use super::frame::{self, FrameError, MAX_FROM_RANK, MAX_TO_RANK};
use super::handshake::Handshake;
use super::message::{FromRank, Hello, ToRank};
use super::token::Token;

/// The longest message, in bytes.
pub const MAX_FRAME: usize = MAX_TO_RANK;

const SIZE: usize = 3;

/// Reads `bytes` as a rank reads the coordinator's, and returns how many messages they were.
pub fn listen(bytes: &[u8]) -> usize {
    let mut messages = 0;
    let _ = each::<ToRank>(bytes, MAX_TO_RANK, |message| {
        messages += 1;
        match message {
            ToRank::Flight(report) => drop(report.to_string()),
            ToRank::Refused(refusal) => drop(refusal.to_string()),
            ToRank::Verdict(failure) => drop(failure.to_string()),
            _ => {}
        }
    });
    messages
}

/// Reads `bytes` as the coordinator reads those of a rank of a running world, and returns how many messages
/// they were.
pub fn coordinate(bytes: &[u8]) -> usize {
    let Some(size) = WorldSize::new(SIZE) else { return 0 };
    let mut now = Instant::now();
    let deadline = Duration::from_secs(60);
    let mut world = World::new(size, None, deadline, now);
    let mut messages = 0;
    for rank in size.ranks() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let (build, host) = (String::new(), String::new());
        world.join(
            rank.index(),
            address,
            Hello { rank, size, build, host, data: None, segment: None, pid: 1, deadline },
            now,
        );
    }
    let _ = each::<FromRank>(bytes, MAX_FROM_RANK, |message| {
        let _ = world.hear(Rank::new(messages % SIZE), message, now);
        messages += 1;
        now += Duration::from_millis(100);
        world.pass(now);
        for action in world.actions() {
            if let Action::Send(_, message) = action {
                let _ = frame::encode(&message, MAX_TO_RANK);
            }
        }
    });
    messages
}

/// Reads `bytes` as whoever accepts reads a handshake, and returns whether they were one.
pub fn shake_hands(bytes: &[u8]) -> bool {
    let token = "a token that is known to all".parse::<Token>();
    let Some(mut handshake) = token.ok().and_then(|token| Handshake::accept(&token, b"hello").ok()) else {
        return false;
    };
    let mut left = bytes;
    while let Some((bytes, rest)) = left.split_at_checked(handshake.wants()) {
        match handshake.take(bytes) {
            Ok(None) => left = rest,
            Ok(Some(_)) => return true,
            Err(_) => return false,
        }
    }
    false
}

/// Reads `bytes` in pieces, as they come from a network.
fn each<T: serde::de::DeserializeOwned>(
    bytes: &[u8],
    limit: usize,
    mut take: impl FnMut(T),
) -> Result<(), FrameError> {
    let mut input = Vec::new();
    for piece in bytes.chunks(1009) {
        input.extend_from_slice(piece);
        while let Some(message) = frame::decode(&mut input, limit)? {
            take(message);
        }
    }
    Ok(())
}
