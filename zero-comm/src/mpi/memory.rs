//! Memory that is lent to MPI.

use std::fmt;
use std::sync::Mutex;

use crate::lock;

/// The longest message of a stream. Transfers are cut, so that copying one piece overlaps with the others' way.
pub(super) const PIECE: usize = 512 << 10;

/// Up to here a piece is memory of its own: cheap to come by, and most messages are short.
pub(super) const SHORT: usize = 16 << 10;

/// How many pieces of full length are kept for reuse: 32 MiB. MPI libraries remember the memory they know.
const KEPT: usize = 64;

/// Bytes on their way.
pub(super) struct Piece {
    /// A vector and no box: it may move while MPI holds its address.
    memory: Vec<u8>,
    len: usize,
}

impl Piece {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({})", self.len)
    }
}

/// Pieces for reuse.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    /// A piece of `len` bytes, of any values.
    pub(super) fn take(&self, len: usize) -> Piece {
        let memory = if (SHORT + 1..=PIECE).contains(&len) {
            let kept = lock(&self.0).pop();
            kept.unwrap_or_else(|| vec![0; PIECE])
        } else {
            vec![0; len]
        };
        Piece { memory, len }
    }

    /// A piece that holds `bytes`.
    pub(super) fn copy_of(&self, bytes: &[u8]) -> Piece {
        let mut piece = self.take(bytes.len());
        piece.bytes_mut().copy_from_slice(bytes);
        piece
    }

    /// Takes a piece back.
    pub(super) fn give(&self, piece: Piece) {
        if piece.memory.len() == PIECE {
            let mut kept = lock(&self.0);
            if kept.len() < KEPT {
                kept.push(piece.memory);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_the_length_asked_for_and_long_ones_are_used_again() {
        let pool = Pool::default();
        for len in [0, 1, SHORT, SHORT + 1, PIECE, PIECE + 1] {
            let mut piece = pool.take(len);
            assert_eq!(piece.bytes().len(), len);
            assert_eq!(piece.bytes_mut().len(), len);
            pool.give(piece);
        }
        assert_eq!(lock(&pool.0).len(), 1);
        let pieces: Vec<_> = (0..KEPT + 5).map(|_| pool.take(PIECE)).collect();
        pieces.into_iter().for_each(|piece| pool.give(piece));
        assert_eq!(lock(&pool.0).len(), KEPT);
    }
}
