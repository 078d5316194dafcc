//! A process's place in a group.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_core::{DType, Rank, WorldSize};

use super::call::{Called, Garbled, sent, sent_by};
use super::group::{Direction, Group, seating};
use super::plane::{Cast, Exchange, ranges};
use super::posted::{self, EAGER_BYTES};
use super::presence::Presence;
use super::shm::ArenaError;
use super::standing::Standing;
use super::wait::{Operation, Wait};
use crate::arguments::Place;
use crate::failure::Failure;
use crate::flight::FlightRecord;
use crate::reduce;
use crate::request::Request;
use crate::windows;
use crate::{Buffer, BufferMut, CommError, Communicator, OpKind, ReduceOp, Region, WindowKey, lock};

/// A rank's place in a group of processes.
pub(crate) struct ProcessCommunicator {
    presence: Arc<Presence>,
    pub(super) group: Arc<Group>,
    deadline: Mutex<Duration>,
}

impl ProcessCommunicator {
    pub(crate) const fn new(presence: Arc<Presence>, group: Arc<Group>, deadline: Duration) -> Self {
        Self { presence, group, deadline: Mutex::new(deadline) }
    }

    pub(super) fn standing(&self) -> &Standing {
        self.group.standing()
    }

    fn place(&self) -> Place {
        Place { position: self.group.position, size: self.group.size() }
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

    /// The error for an argument of a collective operation that is wrong, unless the world has failed anyway.
    pub(super) fn refuse(&self, operation: OpKind, label: &str, reason: String) -> CommError {
        if let Err(error) = self.standing().check(operation, label) {
            return error;
        }
        let error = self.invalid(operation, label, reason);
        // Nobody may wait for this rank until the deadline.
        self.abort(&error.to_string());
        error
    }

    fn invalid(&self, operation: OpKind, label: &str, reason: String) -> CommError {
        CommError::InvalidArgument { rank: self.group.rank(), operation, label: label.to_owned(), reason }
    }

    pub(super) fn overflow(operation: OpKind, label: &str, dtype: DType) -> CommError {
        CommError::Overflow { operation, label: label.to_owned(), dtype }
    }

    /// Whether a member that is busy with a window is worth waiting for.
    fn patience<'a>(
        &'a self,
        kind: OpKind,
        label: &'a str,
        owner: Rank,
    ) -> impl Fn() -> Result<(), CommError> + 'a {
        let operation = Operation { kind, label, sequence: 0, expected: &[] };
        let wait = Wait::new(self.standing(), operation, self.deadline());
        move || wait.check(|| vec![owner])
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> Rank {
        Rank::new(self.group.position)
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

    fn all_reduce_raw(&self, mut buffer: BufferMut<'_>, op: ReduceOp, label: &str) -> Result<(), CommError> {
        let request = self.request(OpKind::AllReduce, label, |place| place.all_reduce(&buffer, op))?;
        let dtype = buffer.dtype();
        let bytes = buffer.bytes_mut();
        if bytes.len() <= EAGER_BYTES {
            let (own, mut outcome) = (bytes.to_vec(), Ok(()));
            return self
                .meet(
                    Called { request, label, data: &own },
                    |posts| {
                        outcome = reduce::into(op, dtype, &sent(posts, own.len())?, bytes);
                        Ok(())
                    },
                    |_, _| Ok(()),
                )
                .and_then(|()| outcome.map_err(|_| Self::overflow(OpKind::AllReduce, label, dtype)));
        }
        self.meet(
            Called { request, label, data: &[] },
            |_| Ok(()),
            |plane, wait| {
                let outcome = plane.all_reduce((op, dtype), bytes, wait)?;
                Self::settle(plane, outcome, (OpKind::AllReduce, op, dtype, label), wait)
            },
        )
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
        let ranges = ranges(counts, send.dtype().size());
        let (send, receive) = (send.bytes(), receive.bytes_mut());
        if ranges.iter().all(|range| range.len() <= EAGER_BYTES) {
            return self.meet(
                Called { request, label, data: send },
                |posts| {
                    for (position, range) in ranges.iter().enumerate() {
                        receive[range.clone()].copy_from_slice(sent_by(posts, position, range.len())?);
                    }
                    Ok(())
                },
                |_, _| Ok(()),
            );
        }
        self.meet(
            Called { request, label, data: &[] },
            |_| Ok(()),
            |plane, wait| plane.all_gather(send, receive, &ranges, wait),
        )
    }

    fn reduce_scatter_raw(
        &self,
        send: Buffer<'_>,
        mut receive: BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        let request = self.request(OpKind::ReduceScatter, label, |place| {
            place.reduce_scatter(&send, &receive, counts, op)
        })?;
        let dtype = send.dtype();
        let ranges = ranges(counts, dtype.size());
        let (send, receive) = (send.bytes(), receive.bytes_mut());
        let settled = (OpKind::ReduceScatter, op, dtype, label);
        if send.len() <= EAGER_BYTES {
            let own = ranges[self.group.position].clone();
            let outcome = &Mutex::new(Ok(()));
            return self.meet(
                Called { request, label, data: send },
                |posts| {
                    let all = sent(posts, send.len())?;
                    let parts: Vec<_> = all.into_iter().map(|data| &data[own.clone()]).collect();
                    *lock(outcome) = reduce::into(op, dtype, &parts, receive);
                    Ok(())
                },
                |plane, wait| Self::settle(plane, *lock(outcome), settled, wait),
            );
        }
        self.meet(
            Called { request, label, data: &[] },
            |_| Ok(()),
            |plane, wait| {
                let outcome = plane.reduce_scatter((op, dtype), send, &ranges, receive, wait)?;
                Self::settle(plane, outcome, settled, wait)
            },
        )
    }

    fn broadcast_raw(&self, mut buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError> {
        let request = self
            .request(OpKind::Broadcast, label, |place| place.broadcast(&buffer, root, &self.group.members))?;
        let (root, is_root) = (root.index(), root.index() == self.group.position);
        let bytes = buffer.bytes_mut();
        if bytes.len() <= EAGER_BYTES {
            if is_root {
                return self.meet(Called { request, label, data: bytes }, |_| Ok(()), |_, _| Ok(()));
            }
            return self.meet(
                Called { request, label, data: &[] },
                |posts| {
                    bytes.copy_from_slice(sent_by(posts, root, bytes.len())?);
                    Ok(())
                },
                |_, _| Ok(()),
            );
        }
        self.meet(
            Called { request, label, data: &[] },
            |_| Ok(()),
            |plane, wait| {
                let cast = if is_root { Cast::Give(bytes) } else { Cast::Take(bytes) };
                plane.broadcast(root, cast, wait)
            },
        )
    }

    fn all_to_all_raw(
        &self,
        send: Buffer<'_>,
        send_counts: &[usize],
        mut receive: BufferMut<'_>,
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        let request = self.request(OpKind::AllToAll, label, |place| {
            place.all_to_all(&send, send_counts, &receive, receive_counts)
        })?;
        let size = send.dtype().size();
        let (out, back) = (ranges(send_counts, size), ranges(receive_counts, size));
        let counts = &Mutex::new(Vec::new());
        self.meet(
            Called { request, label, data: &[] },
            |posts| {
                let requests = posted::requests(posts).into_iter();
                *lock(counts) = requests.map(|request| request.send_counts().to_vec()).collect();
                let is_whole = |counts: &Vec<usize>| counts.len() == posts.len();
                lock(counts).iter().position(|counts| !is_whole(counts)).map_or(Ok(()), |at| Err(Garbled(at)))
            },
            |plane, wait| {
                let counts = lock(counts);
                let lengths = |from: usize, to: usize| counts[from][to] * size;
                let (send, receive) = (send.bytes(), receive.bytes_mut());
                plane.all_to_all(Exchange { send, out: &out, receive, back: &back, lengths: &lengths }, wait)
            },
        )
    }

    fn send_raw(&self, to: Rank, buffer: Buffer<'_>, label: &str) -> Result<(), CommError> {
        let peer = self
            .place()
            .other("the receiver", to)
            .map_err(|reason| self.refuse(OpKind::Send, label, reason))?;
        let request = Request::Send { dtype: buffer.dtype(), length: buffer.len() };
        self.message(Direction::Out, peer, request, label, Cast::Give(buffer.bytes()))
    }

    fn receive_raw(&self, from: Rank, mut buffer: BufferMut<'_>, label: &str) -> Result<(), CommError> {
        let peer = self
            .place()
            .other("the sender", from)
            .map_err(|reason| self.refuse(OpKind::Receive, label, reason))?;
        let request = Request::Receive { dtype: buffer.dtype(), length: buffer.len() };
        self.message(Direction::In, peer, request, label, Cast::Take(buffer.bytes_mut()))
    }

    fn barrier(&self, label: &str) -> Result<(), CommError> {
        self.meet(Called { request: Request::Barrier, label, data: &[] }, |_| Ok(()), |_, _| Ok(()))
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let place = &Mutex::new(None);
        let mut group = None;
        self.meet(
            Called { request: Request::Split { color, key }, label, data: &[] },
            |posts| {
                *lock(place) = seating(&posted::requests(posts), self.group.position);
                Ok(())
            },
            |_, wait| {
                group = self.group.split(wait.operation().sequence, lock(place).take(), wait)?;
                Ok(())
            },
        )?;
        Ok(group.map(|group| -> Arc<dyn Communicator> {
            Arc::new(Self::new(Arc::clone(&self.presence), group, self.deadline()))
        }))
    }

    fn ranks_of_host(&self) -> Vec<Rank> {
        self.group.seats().into_iter().map(Rank::new).collect()
    }

    fn expose(&self, key: WindowKey, region: Arc<dyn Region>) -> Result<(), CommError> {
        let label = key.to_string();
        self.standing().check(OpKind::Expose, &label)?;
        if let Some(arena) = self.group.arena(self.group.position) {
            let patience = self.patience(OpKind::Expose, &label, self.group.rank());
            arena.expose(key, region.bytes(), &patience).map_err(|error| match error {
                ArenaError::Wait(error) => error,
                ArenaError::Full(reason) => self.invalid(OpKind::Expose, &label, reason),
                ArenaError::Missing | ArenaError::Bounds { .. } => {
                    self.invalid(OpKind::Expose, &label, "the window cannot be shown".to_owned())
                }
            })?;
        }
        if self.group.shows_windows() {
            self.group.windows.expose(key, region);
        }
        Ok(())
    }

    fn copies_windows(&self) -> bool {
        self.group.arena(self.group.position).is_some()
    }

    fn withdraw(&self, key: WindowKey) -> Result<(), CommError> {
        let label = key.to_string();
        self.standing().check(OpKind::Withdraw, &label)?;
        if let Some(arena) = self.group.arena(self.group.position) {
            let patience = self.patience(OpKind::Withdraw, &label, self.group.rank());
            if let Err(ArenaError::Wait(error)) = arena.withdraw(key, &patience) {
                return Err(error);
            }
        }
        self.group.windows.withdraw(key);
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
        self.standing().check(OpKind::Read, label)?;
        let position = self
            .place()
            .member("the peer", peer)
            .map_err(|reason| self.invalid(OpKind::Read, label, reason))?;
        let (peer, requested) = (self.group.members[position], into.len());
        let missing = || CommError::WindowMissing { peer, key, label: label.to_owned() };
        let bounds = |available| {
            let label = label.to_owned();
            CommError::WindowBounds { peer, key, label, offset, requested, available }
        };
        if let Some(arena) = self.group.arena(position) {
            let patience = self.patience(OpKind::Read, label, peer);
            return arena.read(key, offset, into, &patience).map_err(|error| match error {
                ArenaError::Missing => missing(),
                ArenaError::Bounds { available } => bounds(available),
                ArenaError::Full(reason) => self.invalid(OpKind::Read, label, reason),
                ArenaError::Wait(error) => error,
            });
        }
        if position == self.group.position {
            let region = self.group.windows.get(key).ok_or_else(missing)?;
            let bytes = region.bytes();
            let part = windows::part(bytes.len(), offset as u64, requested as u64);
            into.copy_from_slice(&bytes[part.ok_or_else(|| bounds(bytes.len()))?]);
            return Ok(());
        }
        let operation = Operation { kind: OpKind::Read, label, sequence: 0, expected: &[] };
        let mut wait = Wait::new(self.standing(), operation, self.deadline());
        self.group.around.fabric.read(self.group.id, peer, key, offset, into, &mut wait)
    }

    fn fence(&self, label: &str) -> Result<(), CommError> {
        self.meet(Called { request: Request::Fence, label, data: &[] }, |_| Ok(()), |_, _| Ok(()))
    }

    fn abort(&self, reason: &str) {
        let rank = self.standing().rank();
        self.standing().fail(Failure::Aborted { rank, reason: reason.to_owned() });
    }

    fn flight(&self) -> Vec<FlightRecord> {
        self.standing().recorder().records()
    }
}

impl fmt::Debug for ProcessCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessCommunicator")
            .field("rank", &self.group.position)
            .field("members", &self.group.members.iter().map(|rank| rank.index()).collect::<Vec<_>>())
            .finish()
    }
}
