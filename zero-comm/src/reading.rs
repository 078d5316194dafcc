//! How a rank asks for a part of another's window, and how it is answered.
//!
//! A request is 32 bytes: group, window, offset and length, all little-endian. The answer is 16 bytes, what
//! became of it and how many bytes the window has, and then the bytes that were asked for.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use zero_core::Rank;

use crate::flight::GroupId;
use crate::process::Wait;
use crate::windows::{self, Windows};
use crate::{CommError, Region, WindowKey};

/// Asks for bytes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadRequest {
    pub(crate) group: GroupId,
    pub(crate) key: WindowKey,
    /// In bytes, as the length.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// What an answer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadAnswer {
    /// The bytes follow.
    Bytes,
    /// There is no such window.
    Missing,
    /// The window has only so many bytes.
    Bounds(u64),
    /// The window's region panicked.
    Panicked,
}

/// What was asked for.
pub(crate) struct Part {
    pub(crate) region: Arc<dyn Region>,
    pub(crate) range: Range<usize>,
}

impl ReadRequest {
    pub(crate) const BYTES: usize = 4 * size_of::<u64>();

    pub(crate) fn new(group: GroupId, key: WindowKey, offset: usize, into: &[u8]) -> Self {
        Self { group, key, offset: offset as u64, length: into.len() as u64 }
    }

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        bytes_of([self.group.get(), self.key.get(), self.offset, self.length])
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let [group, key, offset, length] = words_of(bytes);
        Self { group: GroupId::from_wire(group), key: WindowKey::new(key), offset, length }
    }

    /// Finds what is asked for in what this rank shows to the group, or says what is wrong.
    pub(crate) fn find(&self, windows: Option<&Windows>) -> Result<Part, ReadAnswer> {
        let region = windows.and_then(|windows| windows.get(self.key)).ok_or(ReadAnswer::Missing)?;
        // A region is the user's own code. That it is whole after a panic is its own affair.
        let length = catch_unwind(AssertUnwindSafe(|| region.bytes().len()));
        let available = length.map_err(|_| ReadAnswer::Panicked)?;
        let range = windows::part(available, self.offset, self.length);
        let range = range.ok_or(ReadAnswer::Bounds(available as u64))?;
        Ok(Part { region, range })
    }
}

impl Part {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.region.bytes()[self.range.clone()]
    }
}

impl ReadAnswer {
    pub(crate) const BYTES: usize = 2 * size_of::<u64>();

    pub(crate) fn encode(self) -> [u8; Self::BYTES] {
        bytes_of(match self {
            Self::Bytes => [0, 0],
            Self::Missing => [1, 0],
            Self::Bounds(available) => [2, available],
            Self::Panicked => [3, 0],
        })
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [found, available] = words_of(bytes);
        match found {
            0 => Some(Self::Bytes),
            1 => Some(Self::Missing),
            2 => Some(Self::Bounds(available)),
            3 => Some(Self::Panicked),
            _ => None,
        }
    }

    /// What `peer`'s answer to `request` is for the reader who waits; an error unless the bytes follow.
    pub(crate) fn check(self, peer: Rank, request: &ReadRequest, wait: &Wait<'_>) -> Result<(), CommError> {
        let (key, label) = (request.key, || wait.operation().label.to_owned());
        match self {
            Self::Bytes => Ok(()),
            Self::Missing => Err(CommError::WindowMissing { peer, key, label: label() }),
            Self::Bounds(available) => Err(CommError::WindowBounds {
                peer,
                key,
                label: label(),
                // These were `usize` when the reader asked.
                offset: request.offset as usize,
                requested: request.length as usize,
                available: usize::try_from(available).unwrap_or(usize::MAX),
            }),
            Self::Panicked => Err(wait.broken(peer, &format!("the region of its {key} panicked"))),
        }
    }
}

/// The bytes of some numbers.
fn bytes_of<const WORDS: usize, const BYTES: usize>(words: [u64; WORDS]) -> [u8; BYTES] {
    const { assert!(BYTES == WORDS * size_of::<u64>()) };
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The numbers behind some bytes.
fn words_of<const WORDS: usize, const BYTES: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    const { assert!(BYTES == WORDS * size_of::<u64>()) };
    let mut words = [0; WORDS];
    for (word, part) in words.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
        let mut whole = [0; size_of::<u64>()];
        whole.copy_from_slice(part);
        *word = u64::from_le_bytes(whole);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(key: u64, offset: u64, length: u64) -> ReadRequest {
        ReadRequest { group: GroupId::WORLD.child(1, 2), key: WindowKey::new(key), offset, length }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let request = request(u64::MAX, 3, 4);
        assert_eq!(ReadRequest::decode(&request.encode()), request);
        for answer in [ReadAnswer::Bytes, ReadAnswer::Missing, ReadAnswer::Bounds(7), ReadAnswer::Panicked] {
            assert_eq!(ReadAnswer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(ReadAnswer::decode(&bytes_of([4, 0])), None);
    }

    struct Panicking;

    impl Region for Panicking {
        fn bytes(&self) -> &[u8] {
            std::panic::resume_unwind(Box::new("the region"))
        }
    }

    #[test]
    fn what_is_asked_for_is_found_or_it_is_said_why_not() {
        let windows = Windows::default();
        windows.expose(WindowKey::new(1), Arc::new(vec![1, 2, 3]));
        windows.expose(WindowKey::new(2), Arc::new(Panicking));
        let find = |key, offset, length| {
            let found = request(key, offset, length).find(Some(&windows));
            found.map(|part| part.bytes().to_vec())
        };
        assert_eq!(find(1, 1, 2), Ok(vec![2, 3]));
        assert_eq!(find(1, 1, 3), Err(ReadAnswer::Bounds(3)));
        assert_eq!(find(0, 0, 0), Err(ReadAnswer::Missing));
        assert_eq!(find(2, 0, 0), Err(ReadAnswer::Panicked));
        assert_eq!(request(1, 0, 0).find(None).err(), Some(ReadAnswer::Missing));
    }
}
