//! Several buffers in one transfer.

use std::ops::Range;

use super::stats::Counters;
use crate::{CommError, Communicator, CommunicatorExt, Element, ReduceOp};

/// One gather of a set: parts of `counts[r]` elements from rank `r`, one after the other.
///
/// What stands at [`CommunicatorExt::all_gather_uneven`] holds for it.
#[derive(Clone, Debug)]
pub struct Gather<S, R> {
    /// This rank's part.
    pub send: S,
    /// Where all parts go.
    pub receive: R,
    /// The number of elements of each rank's part, equal on all ranks.
    pub counts: Vec<usize>,
}

/// What a gather sends, where it receives, and its counts.
type Part<'a, T> = (&'a [T], &'a mut [T], &'a [usize]);

impl<S, R> Gather<S, R> {
    pub(super) fn part<T>(&mut self) -> Part<'_, T>
    where
        S: AsRef<[T]>,
        R: AsMut<[T]>,
    {
        (self.send.as_ref(), self.receive.as_mut(), &self.counts)
    }
}

/// How a set of buffers travels.
#[derive(Clone, Copy)]
pub(super) struct Carrier<'a> {
    pub(super) comm: &'a dyn Communicator,
    /// The most that a shared transfer carries.
    pub(super) transfer_bytes: usize,
    pub(super) counters: &'a Counters,
    pub(super) label: &'a str,
}

impl Carrier<'_> {
    /// Reduces each of `buffers` over all ranks.
    pub(super) fn all_reduce<T: Element>(
        self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let bytes: Vec<_> = buffers.iter().map(|buffer| size_of_val(&**buffer)).collect();
        for range in transfers(&bytes, self.transfer_bytes) {
            let together = &mut buffers[range];
            if let [alone] = together {
                self.comm.all_reduce(alone, op, self.label)?;
                continue;
            }
            let mut packed = together.concat();
            let label = self.shared(together.len(), together.iter().map(|buffer| buffer.len()));
            self.comm.all_reduce(&mut packed, op, &label)?;
            let mut rest = packed.as_slice();
            for buffer in together {
                let (part, after) = rest.split_at(buffer.len());
                buffer.copy_from_slice(part);
                rest = after;
            }
        }
        Ok(())
    }

    /// Does each of the gathers of which `parts` are.
    pub(super) fn all_gather<T: Element>(self, parts: &mut [Part<'_, T>]) -> Result<(), CommError> {
        let (rank, size) = (self.comm.rank().index(), self.comm.world_size().get());
        for (send, receive, counts) in parts.iter_mut() {
            let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
            if sum != Some(receive.len()) || counts.len() != size || counts[rank] != send.len() {
                // Alone, so that the backend says what is wrong with it, to the other ranks too.
                self.comm.all_gather_uneven(send, receive, counts, self.label)?;
            }
        }
        let bytes: Vec<_> = parts.iter().map(|(_, receive, _)| size_of_val(&**receive)).collect();
        for range in transfers(&bytes, self.transfer_bytes) {
            let together = &mut parts[range];
            if let [(send, receive, counts)] = together {
                self.comm.all_gather_uneven(send, receive, counts, self.label)?;
                continue;
            }
            let counts: Vec<usize> =
                (0..size).map(|peer| together.iter().map(|(_, _, counts)| counts[peer]).sum()).collect();
            let send = together.iter().map(|(send, _, _)| *send).collect::<Vec<_>>().concat();
            let mut packed = vec![T::zeroed(); counts.iter().sum()];
            let lengths = together.iter().flat_map(|(_, _, counts)| *counts).copied();
            let label = self.shared(together.len(), lengths);
            self.comm.all_gather_uneven(&send, &mut packed, &counts, &label)?;
            // Packed are all parts of rank 0, then all of rank 1, ...
            let mut rest = packed.as_slice();
            let mut filled = vec![0; together.len()];
            for peer in 0..size {
                for ((_, receive, counts), filled) in together.iter_mut().zip(&mut filled) {
                    let (part, after) = rest.split_at(counts[peer]);
                    receive[*filled..][..part.len()].copy_from_slice(part);
                    *filled += part.len();
                    rest = after;
                }
            }
        }
        Ok(())
    }

    /// Notes a shared transfer, and labels it so that ranks which cut it by other `lengths` do not agree.
    fn shared(self, buffers: usize, lengths: impl Iterator<Item = usize>) -> String {
        self.counters.shared(buffers);
        // FNV-1a, a number at a time.
        let digest = lengths.fold(0xCBF2_9CE4_8422_2325, |digest: u64, length| {
            (digest ^ length as u64).wrapping_mul(0x0100_0000_01B3)
        });
        format!("{} ({buffers} buffers cut as {digest:016x})", self.label)
    }
}

/// Neighbours that share a transfer: as many as `limit` bytes hold. What is larger goes alone.
fn transfers(bytes: &[usize], limit: usize) -> Vec<Range<usize>> {
    let mut transfers: Vec<Range<usize>> = Vec::new();
    let mut load = 0_usize;
    for (index, bytes) in bytes.iter().enumerate() {
        load = load.saturating_add(*bytes);
        match transfers.last_mut() {
            Some(last) if load <= limit => last.end = index + 1,
            _ => {
                transfers.push(index..index + 1);
                load = *bytes;
            }
        }
    }
    transfers
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::transfers;

    #[test]
    fn neighbours_share_what_a_transfer_holds() {
        assert!(transfers(&[], 10).is_empty());
        assert_eq!(transfers(&[4, 6, 1, 0, 9], 10), [0..2, 2..5]);
        assert_eq!(transfers(&[3, 11, 0, 3], 10), [0..1, 1..2, 2..4]);
        assert_eq!(transfers(&[0, 0, 1, 1], 0), [0..2, 2..3, 3..4]);
        assert_eq!(transfers(&[usize::MAX, usize::MAX, 1], usize::MAX), std::slice::from_ref(&(0..3)));
    }

    proptest! {
        #[test]
        fn every_buffer_is_in_one_transfer_and_none_carries_too_much(
            bytes in prop::collection::vec(0_usize..20, 0..50),
            limit in 0_usize..40,
        ) {
            let transfers = transfers(&bytes, limit);
            prop_assert!(transfers.iter().cloned().flatten().eq(0..bytes.len()));
            let load = |range: &std::ops::Range<usize>| bytes[range.clone()].iter().sum::<usize>();
            for range in &transfers {
                prop_assert!(range.len() == 1 || load(range) <= limit);
            }
            // And none could have taken the next one's first.
            for pair in transfers.windows(2) {
                prop_assert!(load(&pair[0]) + bytes[pair[1].start] > limit);
            }
        }
    }
}
