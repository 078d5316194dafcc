//! Ranks agree before they do what has to be the same on all of them.

use zero_comm::{Communicator, CommunicatorExt};
use zero_core::Rank;

use crate::ZeroError;
use crate::error::During;

/// Compares what this rank is about to do, in lines, with what rank 0 is, and names the first difference. A rank that
/// differs fails the communicator, for the others wait for its part in what follows.
pub(crate) fn agree(comm: &dyn Communicator, mine: &[String]) -> Result<(), ZeroError> {
    compare(comm, mine).inspect_err(|error| comm.abort(&error.to_string()))
}

fn compare(comm: &dyn Communicator, mine: &[String]) -> Result<(), ZeroError> {
    let roots = comm
        .broadcast_bytes(mine.join("\n").into_bytes(), Rank::ROOT, "configuration and parameters")
        .during(|| String::from("comparing model and configuration between ranks"))?;
    let roots = String::from_utf8_lossy(&roots).into_owned();
    let roots: Vec<&str> = roots.lines().collect();
    let mine = mine.join("\n");
    let mine: Vec<&str> = mine.lines().collect();
    let line = |lines: &[&str], at: usize| lines.get(at).map_or("nothing more", |line| line).to_owned();
    match (0..mine.len().max(roots.len())).find(|&at| mine.get(at) != roots.get(at)) {
        // So that those who agree hear of one who does not before they go on.
        None => comm
            .barrier("all ranks agree")
            .during(|| String::from("comparing model and configuration between ranks")),
        Some(at) => Err(ZeroError::RanksDiffer {
            rank: comm.rank(),
            here: line(&mine, at),
            on_root: line(&roots, at),
        }),
    }
}
