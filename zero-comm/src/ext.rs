//! What every communicator has by what it must have.

use zero_core::{Rank, WorldSize};

use crate::{CommError, Communicator, Element, OpKind, ReduceOp, WindowKey};

/// The operations of a [`Communicator`] on typed slices, and two that every rank does by itself; every communicator has them.
///
/// They add no semantics: order, labels, deadlines and errors are those of the operations they call. All
/// lengths and counts are in elements.
pub trait CommunicatorExt: Communicator {
    /// Replaces `buffer`, of one length on all ranks, by the element-wise reduction over all ranks.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_reduce_raw`].
    fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp, label: &str) -> Result<(), CommError> {
        self.all_reduce_raw(buffer.into(), op, label)
    }

    /// The reduction over all ranks of one value each.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_reduce_raw`].
    fn all_reduce_value<T: Element>(&self, value: T, op: ReduceOp, label: &str) -> Result<T, CommError> {
        let mut buffer = [value];
        self.all_reduce(&mut buffer, op, label)?;
        let [reduced] = buffer;
        Ok(reduced)
    }

    /// Concatenates equal parts: `receive` has world size times as many elements as `send`.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather_raw`].
    fn all_gather<T: Element>(&self, send: &[T], receive: &mut [T], label: &str) -> Result<(), CommError> {
        self.all_gather_uneven(send, receive, &equal(self.world_size(), send.len()), label)
    }

    /// Concatenates parts of `counts[r]` elements from rank `r`; `counts` is equal on all ranks.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather_raw`].
    fn all_gather_uneven<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        self.all_gather_raw(send.into(), receive.into(), counts, label)
    }

    /// One value of each rank, in rank order.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather_raw`].
    fn all_gather_value<T: Element>(&self, value: T, label: &str) -> Result<Vec<T>, CommError> {
        let mut values = vec![value; self.world_size().get()];
        self.all_gather(&[value], &mut values, label)?;
        Ok(values)
    }

    /// The bytes of each rank, in rank order; each rank brings as many as it likes.
    ///
    /// Two collective operations: the lengths, then the contents.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_gather_raw`].
    fn all_gather_bytes(&self, bytes: &[u8], label: &str) -> Result<Vec<Vec<u8>>, CommError> {
        let counts: Vec<_> = self
            .all_gather_value(bytes.len() as i64, label)?
            .into_iter()
            .map(|count| count as usize)
            .collect();
        let mut all = vec![0; counts.iter().sum()];
        self.all_gather_uneven(bytes, &mut all, &counts, label)?;
        let mut rest = all.as_slice();
        let part = |count: &usize| {
            let (part, after) = rest.split_at(*count);
            rest = after;
            part.to_vec()
        };
        Ok(counts.iter().map(part).collect())
    }

    /// Reduces equal parts: `send` has world size times as many elements as `receive`.
    ///
    /// # Errors
    ///
    /// See [`Communicator::reduce_scatter_raw`].
    fn reduce_scatter<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        let counts = equal(self.world_size(), receive.len());
        self.reduce_scatter_uneven(send, receive, &counts, op, label)
    }

    /// Reduces parts of `counts[r]` elements for rank `r`; `counts` is equal on all ranks.
    ///
    /// # Errors
    ///
    /// See [`Communicator::reduce_scatter_raw`].
    fn reduce_scatter_uneven<T: Element>(
        &self,
        send: &[T],
        receive: &mut [T],
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        self.reduce_scatter_raw(send.into(), receive.into(), counts, op, label)
    }

    /// Replaces `buffer`, of one length on all ranks, by the `root`'s.
    ///
    /// # Errors
    ///
    /// See [`Communicator::broadcast_raw`].
    fn broadcast<T: Element>(&self, buffer: &mut [T], root: Rank, label: &str) -> Result<(), CommError> {
        self.broadcast_raw(buffer.into(), root, label)
    }

    /// The `root`'s bytes, whose number only the root needs to know. What other ranks pass is ignored.
    ///
    /// Two collective operations: the length, then the content.
    ///
    /// # Errors
    ///
    /// See [`Communicator::broadcast_raw`]; [`CommError::Aborted`] on all ranks if the root passes `None`.
    fn broadcast_bytes(
        &self,
        bytes: impl Into<Option<Vec<u8>>>,
        root: Rank,
        label: &str,
    ) -> Result<Vec<u8>, CommError> {
        let mine = if self.rank() == root { bytes.into() } else { None };
        if self.rank() == root && mine.is_none() {
            // The broadcast below then returns the abort as its error.
            self.abort(&format!("the root of broadcast_bytes {label:?} has no bytes; pass Some"));
        }
        let mut length = [mine.as_ref().map_or(0, |bytes| bytes.len() as i64)];
        self.broadcast(&mut length, root, label)?;
        let mut bytes = mine.unwrap_or_else(|| vec![0; length[0] as usize]);
        self.broadcast(&mut bytes, root, label)?;
        Ok(bytes)
    }

    /// Exchanges equal parts: the `r`-th of world size parts of `send` goes to rank `r`, and the `r`-th part
    /// of `receive` comes from it. Both have one length, a multiple of the world size.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_to_all_raw`].
    fn all_to_all<T: Element>(&self, send: &[T], receive: &mut [T], label: &str) -> Result<(), CommError> {
        let world = self.world_size();
        let counts = |length: usize| equal(world, length / world.get());
        let (send_counts, receive_counts) = (counts(send.len()), counts(receive.len()));
        self.all_to_all_uneven(send, &send_counts, receive, &receive_counts, label)
    }

    /// Exchanges parts: `send_counts[r]` elements go to rank `r`, `receive_counts[r]` come from it.
    ///
    /// # Errors
    ///
    /// See [`Communicator::all_to_all_raw`].
    fn all_to_all_uneven<T: Element>(
        &self,
        send: &[T],
        send_counts: &[usize],
        receive: &mut [T],
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        self.all_to_all_raw(send.into(), send_counts, receive.into(), receive_counts, label)
    }

    /// Gives `buffer` to rank `to`, and returns when that rank has received it.
    ///
    /// # Errors
    ///
    /// See [`Communicator::send_raw`].
    fn send<T: Element>(&self, to: Rank, buffer: &[T], label: &str) -> Result<(), CommError> {
        self.send_raw(to, buffer.into(), label)
    }

    /// Takes the next message of rank `from` into `buffer`, which has exactly its type and length.
    ///
    /// # Errors
    ///
    /// See [`Communicator::receive_raw`].
    fn receive<T: Element>(&self, from: Rank, buffer: &mut [T], label: &str) -> Result<(), CommError> {
        self.receive_raw(from, buffer.into(), label)
    }

    /// Whether all goes well, for who waits for something else than a rank. Waits for nobody and changes nothing.
    ///
    /// # Errors
    ///
    /// What `operation` gets if the world has failed: the first failure.
    fn check(&self, operation: OpKind, label: &str) -> Result<(), CommError> {
        // A read of an own window that nobody shows needs nobody, yet fails with the world.
        match self.read(self.rank(), WindowKey::new(u64::MAX), 0, &mut [], label) {
            Ok(()) | Err(CommError::WindowMissing { .. }) => Ok(()),
            Err(error) => Err(error.of(operation, label)),
        }
    }

    /// Fails the world for `reason`, if it has not failed already, since the others wait for this rank's part in an
    /// operation that it cannot do. Returns what the operation gets for it: the first failure.
    #[must_use = "it is the error of the operation"]
    fn give_up(&self, operation: OpKind, label: &str, reason: &str) -> CommError {
        self.abort(reason);
        let (rank, reason) = (self.rank(), reason.to_owned());
        let own = CommError::Aborted { rank, reason, operation, label: label.to_owned() };
        self.check(operation, label).err().unwrap_or(own)
    }
}

impl<C: Communicator + ?Sized> CommunicatorExt for C {}

fn equal(world: WorldSize, count: usize) -> Vec<usize> {
    vec![count; world.get()]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::LocalWorld;

    #[test]
    fn the_first_to_give_up_is_named_by_all() {
        let [first, second] = LocalWorld::new(WorldSize::new(2).unwrap()).communicators().try_into().unwrap();
        assert_eq!(first.check(OpKind::Barrier, "ours"), Ok(()));
        first.expose(WindowKey::new(0), Arc::new(vec![1])).unwrap();
        assert_eq!(first.check(OpKind::Barrier, "ours"), Ok(()));
        let aborted = |operation| {
            let (rank, reason, label) = (second.rank(), "enough".to_owned(), "ours".to_owned());
            CommError::Aborted { rank, reason, operation, label }
        };
        assert_eq!(second.give_up(OpKind::Read, "ours", "enough"), aborted(OpKind::Read));
        assert_eq!(first.check(OpKind::Barrier, "ours"), Err(aborted(OpKind::Barrier)));
        assert_eq!(first.give_up(OpKind::Send, "ours", "more than enough"), aborted(OpKind::Send));
    }
}
