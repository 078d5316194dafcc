//! Ranks that save and load together.

use zero_core::{Rank, WorldSize};

use crate::error::CheckpointError;

/// What somebody else's code fails with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// One rank's place among those that save or load together.
///
/// Both operations are collective: every rank calls the same ones in the same order. Whoever implements them gives each a
/// deadline, and names in its error the ranks that did not come. An implementation serves one save or load at a time: one
/// that goes on beside training needs a group of its own.
pub trait Coordinator: Send + Sync {
    /// This rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world_size(&self) -> WorldSize;

    /// Gives the bytes of every rank, in rank order, to [`Rank::ROOT`]; the other ranks get `None`. Each rank brings as
    /// many as it likes.
    ///
    /// # Errors
    ///
    /// When not every rank came in time.
    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError>;

    /// Replaces `bytes`, of one length on all ranks, by those of `root`.
    ///
    /// # Errors
    ///
    /// When not every rank came in time.
    fn broadcast(&self, root: Rank, bytes: &mut [u8]) -> Result<(), BoxError>;
}

/// A world of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Coordinator for Solo {
    fn rank(&self) -> Rank {
        Rank::ROOT
    }

    fn world_size(&self) -> WorldSize {
        WorldSize::ONE
    }

    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        Ok(Some(vec![bytes.to_vec()]))
    }

    fn broadcast(&self, _root: Rank, _bytes: &mut [u8]) -> Result<(), BoxError> {
        Ok(())
    }
}

const DONE: u8 = 0;
const FAILED: u8 = 1;

/// Gives what every rank has to the root, lets the root decide, and gives its decision to all.
///
/// Every rank takes part, also one that failed: then all fail, that rank with its own error, the others with
/// [`CheckpointError::Elsewhere`]. So it is when the root's decision is an error.
pub(crate) fn consult(
    coordinator: &dyn Coordinator,
    own: Result<Vec<u8>, CheckpointError>,
    decide: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>, CheckpointError>,
) -> Result<Vec<u8>, CheckpointError> {
    let lost = |source| CheckpointError::Coordination { source };
    let (message, own_error) = match own {
        Ok(bytes) => (tagged(DONE, &bytes), None),
        Err(error) => (tagged(FAILED, in_full(&error).as_bytes()), Some(error)),
    };
    let mut decision_error = None;
    let reply = match coordinator.gather(&message).map_err(lost) {
        Ok(None) => Vec::new(),
        Err(error) => return Err(own_error.unwrap_or(error)),
        Ok(Some(messages)) => match verdict(messages, decide) {
            Ok(reply) => tagged(DONE, &reply),
            Err(Refusal::Of(rank, text)) => refusal(rank, &text),
            Err(Refusal::Own(error)) => {
                let reply = refusal(coordinator.rank(), &in_full(&error));
                decision_error = Some(error);
                reply
            }
        },
    };
    let reply = match spread(coordinator, reply) {
        Ok(reply) => reply,
        Err(error) => return Err(own_error.or(decision_error).unwrap_or(error)),
    };
    match (own_error.or(decision_error), reply.split_first()) {
        (Some(error), _) => Err(error),
        (None, Some((&DONE, bytes))) => Ok(bytes.to_vec()),
        (None, Some((&FAILED, bytes))) if bytes.len() >= 8 => {
            let (rank, text) = bytes.split_at(8);
            let rank = Rank::new(u64::from_le_bytes(rank.try_into().unwrap_or_default()) as usize);
            Err(CheckpointError::Elsewhere { rank, reason: String::from_utf8_lossy(text).into_owned() })
        }
        _ => Err(lost("the root's answer has another form than expected".into())),
    }
}

/// Tells every rank how all of them fared: `Ok` on all or on none.
pub(crate) fn agree(
    coordinator: &dyn Coordinator,
    own: Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    consult(coordinator, own.map(|()| Vec::new()), |_| Ok(Vec::new())).map(drop)
}

/// Why the root cannot answer well.
enum Refusal {
    Of(Rank, String),
    Own(CheckpointError),
}

fn verdict(
    messages: Vec<Vec<u8>>,
    decide: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>, CheckpointError>,
) -> Result<Vec<u8>, Refusal> {
    let mut all = Vec::with_capacity(messages.len());
    for (index, mut message) in messages.into_iter().enumerate() {
        if message.first() != Some(&DONE) {
            let text = String::from_utf8_lossy(message.get(1..).unwrap_or_default()).into_owned();
            return Err(Refusal::Of(Rank::new(index), text));
        }
        message.remove(0);
        all.push(message);
    }
    decide(all).map_err(Refusal::Own)
}

/// The root's bytes, of any length, on every rank.
fn spread(coordinator: &dyn Coordinator, bytes: Vec<u8>) -> Result<Vec<u8>, CheckpointError> {
    let lost = |source| CheckpointError::Coordination { source };
    let mut length = (bytes.len() as u64).to_le_bytes();
    coordinator.broadcast(Rank::ROOT, &mut length).map_err(lost)?;
    let mut bytes = bytes;
    bytes.resize(u64::from_le_bytes(length) as usize, 0);
    coordinator.broadcast(Rank::ROOT, &mut bytes).map_err(lost)?;
    Ok(bytes)
}

fn tagged(tag: u8, bytes: &[u8]) -> Vec<u8> {
    [&[tag], bytes].concat()
}

fn refusal(rank: Rank, text: &str) -> Vec<u8> {
    [&[FAILED], &(rank.index() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// An error with all its causes, for who gets to see only its text.
fn in_full(error: &CheckpointError) -> String {
    if let CheckpointError::Elsewhere { reason, .. } = error {
        return reason.clone();
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
