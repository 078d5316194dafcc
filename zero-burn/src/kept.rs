//! What an optimizer keeps of a shard, as a checkpoint sees it.

use std::ops::Range;

use serde_json::{Map, Value};
use zero_checkpoint::BoxError;

use crate::ZeroError;

/// State whose tensors are read and written by pieces.
pub trait Kept {
    /// Makes ready to be read.
    fn rest(&mut self);

    /// Leaves the memory that it shares with others: it is not updated for a while.
    fn put_away(&mut self) -> Result<(), ZeroError> {
        Ok(())
    }

    /// What of it is no tensor.
    fn scalars(&self) -> Map<String, Value>;

    /// Fills `into` with bytes of a tensor, from `offset` on.
    fn read(&self, tensor: usize, offset: u64, into: &mut [u8]) -> Result<(), BoxError>;

    /// Replaces bytes of a tensor, from `offset` on.
    fn write(&mut self, tensor: usize, offset: u64, from: &[u8]) -> Result<(), BoxError>;
}

/// A part of some bytes that lie in several places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which place.
    pub(crate) place: usize,
    /// Where in it.
    pub(crate) offset: u64,
    /// Which of the bytes.
    pub(crate) bytes: Range<usize>,
}

/// Where `len` bytes from `offset` on lie, if all bytes are in places of these lengths, one after another.
pub(crate) fn pieces(
    lengths: impl IntoIterator<Item = u64>,
    offset: u64,
    len: usize,
) -> impl Iterator<Item = Piece> {
    let end = offset + len as u64;
    let mut next = 0;
    let places = lengths.into_iter().enumerate().map(move |(place, length)| {
        let start = next;
        next += length;
        (place, start..next)
    });
    places.filter_map(move |(place, here)| {
        let (from, to) = (here.start.max(offset), here.end.min(end));
        let bytes = || (from - offset) as usize..(to - offset) as usize;
        (from < to).then(|| Piece { place, offset: from - here.start, bytes: bytes() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_what_is_asked_for_once_and_in_order() {
        let lengths = [5, 0, 3, 8];
        for offset in 0..16 {
            for len in 0..=16 - offset {
                let mut next = 0;
                for piece in pieces(lengths, offset as u64, len) {
                    assert_eq!(piece.bytes.start, next);
                    let before: u64 = lengths[..piece.place].iter().sum();
                    assert_eq!(before + piece.offset, (offset + next) as u64);
                    next = piece.bytes.end;
                    assert!(piece.offset + piece.bytes.len() as u64 <= lengths[piece.place]);
                }
                assert_eq!(next, len);
            }
        }
    }
}
