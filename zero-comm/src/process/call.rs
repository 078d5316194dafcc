//! How members come together for an operation.

use std::sync::Mutex;

use zero_core::{DType, Rank};

use super::communicator::ProcessCommunicator;
use super::group::Direction;
use super::plane::{Cast, Plane};
use super::posted::{self, EAGER_BYTES};
use super::wait::{Operation, Wait};
use crate::failure::Failure;
use crate::flight::{FlightState, Lane};
use crate::reduce::TooNarrow;
use crate::request::Request;
use crate::{CommError, Communicator, OpKind, ReduceOp, lock};

/// An operation of a group, as it is called.
pub(super) struct Called<'a> {
    pub(super) request: Request,
    pub(super) label: &'a str,
    /// Sent along with the call.
    pub(super) data: &'a [u8],
}

impl ProcessCommunicator {
    /// Meets all other members. `eager` sees the data that all sent along, by position; `bulk` then moves
    /// the rest.
    pub(super) fn meet(
        &self,
        called: Called<'_>,
        eager: impl FnOnce(&[&[u8]]) -> Sent<()>,
        bulk: impl FnOnce(&dyn Plane, &mut Wait<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let group = &*self.group;
        let (operation, label) = (called.request.kind(), called.label);
        let _turn = lock(&group.turn);
        self.standing().check(operation, label)?;
        let lane = Lane::Collective(group.id);
        self.perform(&*group.plane, called, (lane, &group.expected, &group.members), eager, bulk)
    }

    fn perform(
        &self,
        plane: &dyn Plane,
        Called { request, label, data }: Called<'_>,
        (lane, expected, members): (Lane, &[(Rank, Lane)], &[Rank]),
        eager: impl FnOnce(&[&[u8]]) -> Sent<()>,
        bulk: impl FnOnce(&dyn Plane, &mut Wait<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (kind, elements) = (request.kind(), request.elements());
        let head = posted::encode(&request, label);
        let most = plane.post_bytes() - EAGER_BYTES;
        if head.len() > most {
            let reason =
                format!("label and counts take {} bytes, but at most {most} can be sent", head.len());
            return Err(self.refuse(kind, label, reason));
        }
        let recorder = self.standing().recorder();
        let ticket = recorder.begin(lane, kind, elements, label);
        let operation = Operation { kind, label, sequence: ticket.sequence, expected };
        let mut wait = Wait::new(self.standing(), operation, self.deadline());
        let mut disagreement = None;
        let mut eager = Some(eager);
        // A rank that has finished already is found out before anything is posted: what is posted for an
        // operation that never happens would be taken for a part of the next.
        let met = wait.check(Vec::new).and_then(|()| {
            plane.post(&[&head, data], &mut wait, &mut |posts| {
                disagreement = posted::disagree(posts, members);
                if let Some(eager) = eager.take().filter(|_| disagreement.is_none()) {
                    disagreement = eager(posts).err().map(|Garbled(position)| Failure::Aborted {
                        rank: members[position],
                        reason: "what it sent for an operation is not what it announced".to_owned(),
                    });
                }
            })
        });
        let outcome = met.and_then(|()| match disagreement {
            Some(failure) => Err(self.standing().fail(failure).error(kind, label)),
            None => {
                recorder.note(ticket, FlightState::Moving);
                bulk(plane, &mut wait)
            }
        });
        recorder.note(ticket, if outcome.is_ok() { FlightState::Done } else { FlightState::Failed });
        outcome
    }

    /// Exchanges a message with the member at `peer`, which comes with the other side of it.
    pub(super) fn message(
        &self,
        direction: Direction,
        peer: usize,
        request: Request,
        label: &str,
        cast: Cast<'_>,
    ) -> Result<(), CommError> {
        let group = &*self.group;
        let kind = request.kind();
        self.standing().check(kind, label)?;
        let (own, other) = (group.rank(), group.members[peer]);
        let (lane, theirs, members) = match direction {
            Direction::Out => (Lane::Send(group.id, other), Lane::Receive(group.id, own), [own, other]),
            Direction::In => (Lane::Receive(group.id, other), Lane::Send(group.id, own), [other, own]),
        };
        let expected = [(other, theirs)];
        let messages = {
            // The first message of two ranks on different hosts needs a connection.
            let sequence = self.standing().recorder().begun_in(lane).unwrap_or(0) + 1;
            let operation = Operation { kind, label, sequence, expected: &expected };
            let mut wait = Wait::new(self.standing(), operation, self.deadline());
            group.messages(direction, peer, &mut wait)?
        };
        let _turn = lock(&messages.turn);
        let length = cast.len();
        let is_eager = length <= EAGER_BYTES;
        let (data, cast) = match cast {
            Cast::Give(bytes) if is_eager => (bytes, None),
            cast => (&[][..], Some(cast)),
        };
        let called = Called { request, label, data };
        let cast = &Mutex::new(cast);
        self.perform(
            &*messages.plane,
            called,
            (lane, &expected, &members),
            |posts| {
                if let Some(Cast::Take(into)) = lock(cast).as_mut().filter(|_| is_eager) {
                    into.copy_from_slice(sent_by(posts, 0, into.len())?);
                }
                Ok(())
            },
            |plane, wait| {
                if let Some(cast) = lock(cast).take().filter(|_| !is_eager) {
                    plane.broadcast(0, cast, wait)?;
                }
                // The sender learns that all has come.
                plane.post(&[], wait, &mut |_| ())
            },
        )
    }

    /// The outcome of a reduction on all ranks: integers may not fit on some.
    pub(super) fn settle(
        plane: &dyn Plane,
        outcome: Result<(), TooNarrow>,
        (request, op, dtype, label): (OpKind, ReduceOp, DType, &str),
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        if op != ReduceOp::Sum || !dtype.is_integer() {
            return Ok(());
        }
        let mut fits = true;
        plane.post(&[&[u8::from(outcome.is_ok())]], wait, &mut |posts| {
            fits = posts.iter().all(|post| *post == [1]);
        })?;
        if fits { Ok(()) } else { Err(Self::overflow(request, label, dtype)) }
    }
}

/// The member at this position sent something else than it announced.
pub(super) struct Garbled(pub(super) usize);

/// What members sent along with their calls, if it is what they announced.
pub(super) type Sent<T> = Result<T, Garbled>;

/// The data that the member at `position` sent along: `length` bytes.
pub(super) fn sent_by<'a>(posts: &[&'a [u8]], position: usize, length: usize) -> Sent<&'a [u8]> {
    let data = posts.get(position).map_or(&[][..], |post| posted::data(post));
    if data.len() == length { Ok(data) } else { Err(Garbled(position)) }
}

/// The data that all members sent along: `length` bytes each.
pub(super) fn sent<'a>(posts: &[&'a [u8]], length: usize) -> Sent<Vec<&'a [u8]>> {
    (0..posts.len()).map(|position| sent_by(posts, position, length)).collect()
}
