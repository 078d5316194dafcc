//! A thread's place in a group.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_core::{DType, Rank, WorldSize};

use super::group::Group;
use super::health::{Failure, Health};
use super::lock;
use super::meeting::Lent;
use super::presence::Presence;
use super::reduce;
use super::rendezvous::Guest;
use super::request::Request;
use crate::{Buffer, BufferMut, CommError, Communicator, OpKind, ReduceOp, Region, WindowKey};

/// A rank's place in a group of threads.
pub(super) struct LocalCommunicator {
    presence: Arc<Presence>,
    group: Arc<Group>,
    /// The rank within the group.
    position: usize,
    deadline: Mutex<Duration>,
}

impl LocalCommunicator {
    /// A place at `position` of `group`.
    pub(super) const fn new(
        presence: Arc<Presence>,
        group: Arc<Group>,
        position: usize,
        deadline: Duration,
    ) -> Self {
        Self { presence, group, position, deadline: Mutex::new(deadline) }
    }

    /// This rank at `seat` of a rendezvous.
    fn guest(&self, seat: usize) -> Guest {
        Guest { seat, deadline: self.deadline() }
    }

    fn health(&self) -> &Health {
        self.presence.health()
    }

    /// The error for an argument of a collective operation that is wrong, unless the world has failed anyway.
    fn refuse(&self, operation: OpKind, label: &str, reason: String) -> CommError {
        if let Err(error) = self.health().check(operation, label) {
            return error;
        }
        let error = self.invalid(operation, label, reason);
        // Nobody may wait for this rank until the deadline.
        self.abort(&error.to_string());
        error
    }

    fn invalid(&self, operation: OpKind, label: &str, reason: String) -> CommError {
        CommError::InvalidArgument { rank: self.presence.rank(), operation, label: label.to_owned(), reason }
    }

    /// The position of `rank` in the group.
    fn position(&self, what: &str, rank: Rank) -> Result<usize, String> {
        let size = self.group.size();
        if size.contains(rank) {
            Ok(rank.index())
        } else {
            Err(format!("{what} is {rank}, but the group has ranks 0 to {}", size.get() - 1))
        }
    }

    /// Checks that `whole` is cut into one part per rank by `counts`, and that this rank's is `part`.
    fn check_parts(
        &self,
        counts: &[usize],
        whole: (&str, usize, DType),
        part: (&str, usize, DType),
    ) -> Result<(), String> {
        self.check_counts("counts", counts, whole.0, whole.1)?;
        if part.2 != whole.2 {
            return Err(format!("{} is of {}, but {} of {}", part.0, part.2, whole.0, whole.2));
        }
        let count = counts[self.position];
        if part.1 != count {
            return Err(format!("{} has {} elements, but this rank's count is {count}", part.0, part.1));
        }
        Ok(())
    }

    fn check_counts(&self, what: &str, counts: &[usize], whole: &str, length: usize) -> Result<(), String> {
        if counts.len() != self.group.size().get() {
            return Err(format!(
                "there are {} {what}, but the group has {} ranks",
                counts.len(),
                self.group.size()
            ));
        }
        match counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count)) {
            Some(sum) if sum == length => Ok(()),
            Some(sum) => Err(format!("{whole} has {length} elements, but {what} add up to {sum}")),
            None => Err(format!("{what} add up to more than memory can hold")),
        }
    }

    fn check_op(op: ReduceOp, dtype: DType) -> Result<(), String> {
        let integers = matches!(dtype, DType::I64 | DType::I32 | DType::U8);
        if integers && op == ReduceOp::Mean {
            return Err(format!("the mean of {dtype} is not an integer; sum and divide, or use floats"));
        }
        Ok(())
    }

    fn overflow(operation: OpKind, label: &str, dtype: DType) -> CommError {
        CommError::Overflow { operation, label: label.to_owned(), dtype }
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> Rank {
        Rank::new(self.position)
    }

    fn world_size(&self) -> WorldSize {
        self.group.size()
    }

    fn deadline(&self) -> Duration {
        *lock(&self.deadline)
    }

    fn set_deadline(&self, deadline: Duration) {
        *lock(&self.deadline) = deadline;
    }

    fn all_reduce_raw(&self, buffer: BufferMut<'_>, op: ReduceOp, label: &str) -> Result<(), CommError> {
        let (dtype, length) = (buffer.dtype(), buffer.len());
        let refuse = |reason| self.refuse(OpKind::AllReduce, label, reason);
        Self::check_op(op, dtype).map_err(refuse)?;
        let request = Request::AllReduce { dtype, length, op };
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Write(buffer), |meeting| {
            // A stripe of all buffers belongs to one rank, which therefore needs no scratch memory.
            reduce::in_place(op, dtype, meeting.stripes())
                .map_err(|_| Self::overflow(OpKind::AllReduce, label, dtype))
        })
    }

    fn all_gather_raw(
        &self,
        send: Buffer<'_>,
        mut receive: BufferMut<'_>,
        counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        let dtype = send.dtype();
        self.check_parts(counts, ("receive", receive.len(), receive.dtype()), ("send", send.len(), dtype))
            .map_err(|reason| self.refuse(OpKind::AllGather, label, reason))?;
        let request = Request::AllGather { dtype, counts: counts.to_vec() };
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Read(send), |meeting| {
            let mut rest = receive.bytes_mut();
            for peer in 0..self.group.size().get() {
                let part = meeting.read(peer).unwrap_or_default();
                let (here, after) = rest.split_at_mut(part.len());
                here.copy_from_slice(part);
                rest = after;
            }
            Ok(())
        })
    }

    fn reduce_scatter_raw(
        &self,
        send: Buffer<'_>,
        mut receive: BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        let dtype = send.dtype();
        self.check_parts(counts, ("send", send.len(), dtype), ("receive", receive.len(), receive.dtype()))
            .and_then(|()| Self::check_op(op, dtype))
            .map_err(|reason| self.refuse(OpKind::ReduceScatter, label, reason))?;
        let before: usize = counts[..self.position].iter().sum();
        let part = before * dtype.size()..(before + counts[self.position]) * dtype.size();
        let request = Request::ReduceScatter { dtype, counts: counts.to_vec(), op };
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Read(send), |meeting| {
            let sources: Vec<_> = (0..self.group.size().get())
                .filter_map(|peer| meeting.read(peer))
                .map(|whole| &whole[part.clone()])
                .collect();
            reduce::into(op, dtype, &sources, receive.bytes_mut())
                .map_err(|_| Self::overflow(OpKind::ReduceScatter, label, dtype))
        })
    }

    fn broadcast_raw(&self, mut buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError> {
        let position =
            self.position("root", root).map_err(|reason| self.refuse(OpKind::Broadcast, label, reason))?;
        let (dtype, length) = (buffer.dtype(), buffer.len());
        let request = Request::Broadcast { dtype, length, root: self.group.members()[position] };
        if position == self.position {
            let lent = Lent::Read(buffer.as_buffer());
            return self.group.hall().meet(self.guest(self.position), request, label, lent, |_| Ok(()));
        }
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Nothing, |meeting| {
            buffer.bytes_mut().copy_from_slice(meeting.read(position).unwrap_or_default());
            Ok(())
        })
    }

    fn all_to_all_raw(
        &self,
        send: Buffer<'_>,
        send_counts: &[usize],
        mut receive: BufferMut<'_>,
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        let dtype = send.dtype();
        self.check_counts("send counts", send_counts, "send", send.len())
            .and_then(|()| self.check_counts("receive counts", receive_counts, "receive", receive.len()))
            .and_then(|()| match (send_counts[self.position], receive_counts[self.position]) {
                _ if receive.dtype() != dtype => {
                    Err(format!("receive is of {}, but send of {dtype}", receive.dtype()))
                }
                (out, back) if out != back => {
                    Err(format!("the rank sends itself {out} elements, but receives {back} from itself"))
                }
                _ => Ok(()),
            })
            .map_err(|reason| self.refuse(OpKind::AllToAll, label, reason))?;
        let request =
            Request::AllToAll { dtype, send: send_counts.to_vec(), receive: receive_counts.to_vec() };
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Read(send), |meeting| {
            let mut rest = receive.bytes_mut();
            for (peer, count) in receive_counts.iter().enumerate() {
                let Request::AllToAll { send: theirs, .. } = meeting.request(peer) else { continue };
                let start = theirs[..self.position].iter().sum::<usize>() * dtype.size();
                let (here, after) = rest.split_at_mut(count * dtype.size());
                here.copy_from_slice(&meeting.read(peer).unwrap_or_default()[start..][..here.len()]);
                rest = after;
            }
            Ok(())
        })
    }

    fn send_raw(&self, to: Rank, buffer: Buffer<'_>, label: &str) -> Result<(), CommError> {
        let peer = self
            .position("the receiver", to)
            .and_then(|peer| if peer == self.position { Err(SELF.to_owned()) } else { Ok(peer) })
            .map_err(|reason| self.refuse(OpKind::Send, label, reason))?;
        let request = Request::Send { dtype: buffer.dtype(), length: buffer.len() };
        self.group
            .pair(self.position, peer)
            .meet(self.guest(0), request, label, Lent::Read(buffer), |_| Ok(()))
    }

    fn receive_raw(&self, from: Rank, mut buffer: BufferMut<'_>, label: &str) -> Result<(), CommError> {
        let peer = self
            .position("the sender", from)
            .and_then(|peer| if peer == self.position { Err(SELF.to_owned()) } else { Ok(peer) })
            .map_err(|reason| self.refuse(OpKind::Recv, label, reason))?;
        let request = Request::Receive { dtype: buffer.dtype(), length: buffer.len() };
        self.group.pair(peer, self.position).meet(self.guest(1), request, label, Lent::Nothing, |meeting| {
            buffer.bytes_mut().copy_from_slice(meeting.read(0).unwrap_or_default());
            Ok(())
        })
    }

    fn barrier(&self, label: &str) -> Result<(), CommError> {
        self.group.hall().meet(self.guest(self.position), Request::Barrier, label, Lent::Nothing, |_| Ok(()))
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let mut place = None;
        let request = Request::Split { color, key };
        self.group.hall().meet(self.guest(self.position), request, label, Lent::Nothing, |meeting| {
            place = meeting.seating(|| self.group.split(meeting.requests()))[self.position].clone();
            Ok(())
        })?;
        Ok(place.map(|(group, position)| -> Arc<dyn Communicator> {
            Arc::new(Self::new(Arc::clone(&self.presence), group, position, self.deadline()))
        }))
    }

    fn expose(&self, key: WindowKey, region: Arc<dyn Region>) -> Result<(), CommError> {
        self.health().check(OpKind::Expose, &key.to_string())?;
        self.group.windows(self.position).expose(key, region);
        Ok(())
    }

    fn withdraw(&self, key: WindowKey) -> Result<(), CommError> {
        self.health().check(OpKind::Withdraw, &key.to_string())?;
        self.group.windows(self.position).withdraw(key);
        Ok(())
    }

    fn read(
        &self,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        label: &str,
    ) -> Result<(), CommError> {
        self.health().check(OpKind::Read, label)?;
        let position =
            self.position("the peer", peer).map_err(|reason| self.invalid(OpKind::Read, label, reason))?;
        let (peer, label) = (self.group.members()[position], || label.to_owned());
        let region = self.group.windows(position).get(key);
        let region = region.ok_or_else(|| CommError::WindowMissing { peer, key, label: label() })?;
        let bytes = region.bytes();
        match bytes.get(offset..).and_then(|rest| rest.get(..into.len())) {
            Some(part) => into.copy_from_slice(part),
            None => {
                let (requested, available) = (into.len(), bytes.len());
                let label = label();
                return Err(CommError::WindowBounds { peer, key, label, offset, requested, available });
            }
        }
        Ok(())
    }

    fn fence(&self, label: &str) -> Result<(), CommError> {
        self.group.hall().meet(self.guest(self.position), Request::Fence, label, Lent::Nothing, |_| Ok(()))
    }

    fn abort(&self, reason: &str) {
        self.health().fail(Failure::Aborted { rank: self.presence.rank(), reason: reason.to_owned() });
    }
}

const SELF: &str = "a rank cannot send to itself; copy the data";

impl fmt::Debug for LocalCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalCommunicator")
            .field("rank", &self.position)
            .field("members", &self.group.members().iter().map(|rank| rank.index()).collect::<Vec<_>>())
            .finish()
    }
}
