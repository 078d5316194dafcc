//! A thread's place in a group.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_core::{DType, Rank, WorldSize};

use super::group::Group;
use super::health::Health;
use super::meeting::{Lent, Meeting};
use super::presence::Presence;
use super::rendezvous::{Guest, Rendezvous};
use crate::arguments::Place;
use crate::failure::Failure;
use crate::flight::{FlightRecord, FlightState, Lane};
use crate::lock;
use crate::reduce;
use crate::request::Request;
use crate::windows;
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

    /// Meets all members.
    fn meet(
        &self,
        request: Request,
        label: &str,
        lent: Lent<'_>,
        act: impl FnOnce(&mut Meeting<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let lane = Lane::Collective(self.group.id());
        self.meet_at(self.group.hall(), self.position, lane, request, label, lent, act)
    }

    /// Meets whom this rank finds at `rendezvous`, in its `seat` there.
    #[expect(clippy::too_many_arguments, reason = "those of a meeting and where it is")]
    fn meet_at(
        &self,
        rendezvous: &Rendezvous,
        seat: usize,
        lane: Lane,
        request: Request,
        label: &str,
        lent: Lent<'_>,
        act: impl FnOnce(&mut Meeting<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let recorder = self.presence.recorder();
        let ticket = recorder.begin(lane, request.kind(), request.elements(), label);
        let guest = Guest { seat, deadline: self.deadline() };
        let outcome = rendezvous.meet(guest, request, label, lent, |meeting| {
            recorder.note(ticket, FlightState::Moving);
            act(meeting)
        });
        recorder.note(ticket, if outcome.is_ok() { FlightState::Done } else { FlightState::Failed });
        outcome
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

    /// The request that `checked` arguments make, or the error for wrong ones.
    fn request(
        &self,
        operation: OpKind,
        label: &str,
        checked: impl FnOnce(Place) -> Result<Request, String>,
    ) -> Result<Request, CommError> {
        checked(self.place()).map_err(|reason| self.refuse(operation, label, reason))
    }

    fn place(&self) -> Place {
        Place { position: self.position, size: self.group.size() }
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
        let dtype = buffer.dtype();
        let request = self.request(OpKind::AllReduce, label, |place| place.all_reduce(&buffer, op))?;
        self.meet(request, label, Lent::Write(buffer), |meeting| {
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
        let request =
            self.request(OpKind::AllGather, label, |place| place.all_gather(&send, &receive, counts))?;
        self.meet(request, label, Lent::Read(send), |meeting| {
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
        let request = self.request(OpKind::ReduceScatter, label, |place| {
            place.reduce_scatter(&send, &receive, counts, op)
        })?;
        let before: usize = counts[..self.position].iter().sum();
        let part = before * dtype.size()..(before + counts[self.position]) * dtype.size();
        self.meet(request, label, Lent::Read(send), |meeting| {
            let sources: Vec<_> = (0..self.group.size().get())
                .filter_map(|peer| meeting.read(peer))
                .map(|whole| &whole[part.clone()])
                .collect();
            reduce::into(op, dtype, &sources, receive.bytes_mut())
                .map_err(|_| Self::overflow(OpKind::ReduceScatter, label, dtype))
        })
    }

    fn broadcast_raw(&self, mut buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError> {
        let request = self.request(OpKind::Broadcast, label, |place| {
            place.broadcast(&buffer, root, self.group.members())
        })?;
        let position = root.index();
        if position == self.position {
            let lent = Lent::Read(buffer.as_buffer());
            return self.meet(request, label, lent, |_| Ok(()));
        }
        self.meet(request, label, Lent::Nothing, |meeting| {
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
        let request = self.request(OpKind::AllToAll, label, |place| {
            place.all_to_all(&send, send_counts, &receive, receive_counts)
        })?;
        self.meet(request, label, Lent::Read(send), |meeting| {
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
            .place()
            .other("the receiver", to)
            .map_err(|reason| self.refuse(OpKind::Send, label, reason))?;
        let request = Request::Send { dtype: buffer.dtype(), length: buffer.len() };
        let lane = Lane::Send(self.group.id(), self.group.members()[peer]);
        let pair = self.group.pair(self.position, peer);
        self.meet_at(&pair, 0, lane, request, label, Lent::Read(buffer), |_| Ok(()))
    }

    fn receive_raw(&self, from: Rank, mut buffer: BufferMut<'_>, label: &str) -> Result<(), CommError> {
        let peer = self
            .place()
            .other("the sender", from)
            .map_err(|reason| self.refuse(OpKind::Receive, label, reason))?;
        let request = Request::Receive { dtype: buffer.dtype(), length: buffer.len() };
        let lane = Lane::Receive(self.group.id(), self.group.members()[peer]);
        let pair = self.group.pair(peer, self.position);
        self.meet_at(&pair, 1, lane, request, label, Lent::Nothing, |meeting| {
            buffer.bytes_mut().copy_from_slice(meeting.read(0).unwrap_or_default());
            Ok(())
        })
    }

    fn barrier(&self, label: &str) -> Result<(), CommError> {
        self.meet(Request::Barrier, label, Lent::Nothing, |_| Ok(()))
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let mut place = None;
        let request = Request::Split { color, key };
        self.meet(request, label, Lent::Nothing, |meeting| {
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
        let position = self
            .place()
            .member("the peer", peer)
            .map_err(|reason| self.invalid(OpKind::Read, label, reason))?;
        let (peer, label) = (self.group.members()[position], || label.to_owned());
        let region = self.group.windows(position).get(key);
        let region = region.ok_or_else(|| CommError::WindowMissing { peer, key, label: label() })?;
        let bytes = region.bytes();
        match windows::part(bytes.len(), offset as u64, into.len() as u64) {
            Some(part) => into.copy_from_slice(&bytes[part]),
            None => {
                let (requested, available) = (into.len(), bytes.len());
                let label = label();
                return Err(CommError::WindowBounds { peer, key, label, offset, requested, available });
            }
        }
        Ok(())
    }

    fn fence(&self, label: &str) -> Result<(), CommError> {
        self.meet(Request::Fence, label, Lent::Nothing, |_| Ok(()))
    }

    fn flight(&self) -> Vec<FlightRecord> {
        self.presence.recorder().records()
    }

    fn abort(&self, reason: &str) {
        self.health().fail(Failure::Aborted { rank: self.presence.rank(), reason: reason.to_owned() });
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        self.presence.recorder().leave(self.group.id());
    }
}

impl fmt::Debug for LocalCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalCommunicator")
            .field("rank", &self.position)
            .field("members", &self.group.members().iter().map(|rank| rank.index()).collect::<Vec<_>>())
            .finish()
    }
}
