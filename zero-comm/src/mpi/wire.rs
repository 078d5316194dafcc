//! Short messages, as the ranks of one MPI job exchange them.

use std::collections::VecDeque;

use zero_core::Rank;

use super::error::MpiError;
use super::memory::{Piece, Pool};
use super::raw::{Channel, Flight, Tag};
use crate::reading::ReadRequest;

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
    Read(Read),
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
pub(super) struct Read {
    /// That of the answer.
    pub(super) tag: Tag,
    pub(super) request: ReadRequest,
}

impl Message {
    pub(super) fn encode(self) -> Vec<u8> {
        match self {
            Self::Hello(Hello { group, purpose, tag }) => encode([0, tag as u64, group, purpose]),
            Self::Read(Read { tag, request }) => [&encode([1, tag as u64])[..], &request.encode()].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(2 * size_of::<u64>())?;
        let [kind, tag] = decode(head)?;
        let tag = Tag::try_from(tag).ok().filter(|tag| *tag >= tags::FIRST_ANSWER)?;
        match kind {
            0 => decode(rest).map(|[group, purpose]| Self::Hello(Hello { group, purpose, tag })),
            1 => {
                let request = ReadRequest::decode(rest.try_into().ok()?);
                Some(Self::Read(Read { tag, request }))
            }
            _ => None,
        }
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
    use crate::WindowKey;
    use crate::flight::GroupId;

    #[test]
    fn messages_come_back_as_they_were() {
        let hello = Message::Hello(Hello { group: u64::MAX, purpose: 1, tag: Tag::MAX });
        let request = ReadRequest {
            group: GroupId::WORLD.child(1, 1),
            key: WindowKey::new(2),
            offset: u64::MAX,
            length: 3,
        };
        for message in [hello, Message::Read(Read { tag: tags::FIRST_ANSWER, request })] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let tag = tags::FIRST_ANSWER as u64;
        for words in
            [&[2, tag, 0, 0][..], &[0, tag - 1, 0, 0], &[0, u64::MAX, 0, 0], &[0, tag, 0], &[1, tag, 0], &[]]
        {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(Message::decode(&bytes), None, "{words:?}");
        }
    }
}
