//! Short messages, as the ranks of one MPI job exchange them.

use std::collections::VecDeque;

use zero_core::Rank;

use super::error::MpiError;
use super::memory::{Piece, Pool};
use super::raw::{Channel, Flight, Tag};

/// Which tag is for what.
pub(super) mod tags {
    use super::Tag;

    /// For a [`Message`](super::Message).
    pub(in super::super) const MESSAGE: Tag = 1;
    /// The first of those for answers to reads.
    pub(in super::super) const FIRST_ANSWER: Tag = 16;
    /// How many reads of one rank can be under way.
    pub(in super::super) const ANSWERS: Tag = 1024;
    /// The first of those for links.
    pub(in super::super) const FIRST_LINK: Tag = FIRST_ANSWER + ANSWERS;
}

/// The bytes of some numbers.
pub(super) fn encode<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The numbers behind some bytes, if there are exactly as many.
pub(super) fn decode<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    if bytes.len() != N * size_of::<u64>() {
        return None;
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
        *word = u64::from_le_bytes(bytes.try_into().ok()?);
    }
    Some(words)
}

/// What one rank tells another besides the bytes of streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Hello(Hello),
    Read(Request),
}

/// Says which tag a new link has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) group: u64,
    pub(super) purpose: u64,
    pub(super) tag: Tag,
}

/// Asks for bytes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// That of the answer.
    pub(super) tag: Tag,
    pub(super) group: u64,
    pub(super) key: u64,
    /// In bytes, as the length.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Message {
    pub(super) fn encode(self) -> Vec<u8> {
        encode(match self {
            Self::Hello(Hello { group, purpose, tag }) => [0, tag as u64, group, purpose, 0, 0],
            Self::Read(Request { tag, group, key, offset, len }) => [1, tag as u64, group, key, offset, len],
        })
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [kind, tag, group, key, offset, len] = decode(bytes)?;
        let tag = Tag::try_from(tag).ok().filter(|tag| *tag >= tags::FIRST_ANSWER)?;
        match kind {
            0 => Some(Self::Hello(Hello { group, purpose: key, tag })),
            1 => Some(Self::Read(Request { tag, group, key, offset, len })),
            _ => None,
        }
    }
}

/// What an answer to a read begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) found: Found,
    /// How many bytes the window has.
    pub(super) available: u64,
}

/// What there is to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The bytes, which follow.
    Bytes,
    /// No such window.
    Missing,
    /// A window that is too short.
    OutOfBounds,
    /// A window whose region panicked.
    Panicked,
}

impl Answer {
    pub(super) const LEN: usize = 2 * size_of::<u64>();

    const FOUND: [Found; 4] = [Found::Bytes, Found::Missing, Found::OutOfBounds, Found::Panicked];

    pub(super) fn encode(self) -> Vec<u8> {
        encode([self.found as u64, self.available])
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let [found, available] = decode(bytes)?;
        let found = *Self::FOUND.get(usize::try_from(found).ok()?)?;
        Some(Self { found, available })
    }
}

/// Takes in the messages of all ranks, each sender's in order.
#[derive(Default)]
pub(super) struct Mailbox(VecDeque<(Rank, Flight<Piece>)>);

impl Mailbox {
    /// The next message, if one has come.
    pub(super) fn take(
        &mut self,
        channel: &Channel,
        pool: &Pool,
    ) -> Result<Option<(Rank, Message)>, MpiError> {
        if let Some(arrival) = channel.probe(None, tags::MESSAGE)? {
            let from = arrival.from;
            self.0.push_back((from, channel.receive(arrival, pool)?));
        }
        let Some((from, flight)) = self.0.front_mut() else { return Ok(None) };
        let (peer, Some(piece)) = (*from, flight.landed()?) else { return Ok(None) };
        self.0.pop_front();
        let message = Message::decode(piece.bytes());
        Ok(Some((peer, message.ok_or(MpiError::Malformed { peer, what: "an unknown message" })?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_answers_come_back_as_they_were() {
        let hello = Message::Hello(Hello { group: u64::MAX, purpose: 1, tag: Tag::MAX });
        let read =
            Message::Read(Request { tag: tags::FIRST_ANSWER, group: 1, key: 2, offset: u64::MAX, len: 3 });
        for message in [hello, read] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        for found in Answer::FOUND {
            let answer = Answer { found, available: 5 };
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
            assert_eq!(answer.encode().len(), Answer::LEN);
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let tag = tags::FIRST_ANSWER as u64;
        assert_eq!(Message::decode(&encode([2, tag, 0, 0, 0, 0])), None);
        assert_eq!(Message::decode(&encode([0, tag - 1, 0, 0, 0, 0])), None);
        assert_eq!(Message::decode(&encode([0, u64::MAX, 0, 0, 0, 0])), None);
        assert_eq!(Message::decode(&encode([0, tag, 0, 0, 0])), None);
        assert_eq!(Answer::decode(&encode([4, 0])), None);
    }
}
