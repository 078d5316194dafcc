//! A group whose members share memory.

use std::ops::Range;

use zero_core::DType;

use super::plane::{Cast, Exchange, Plane, stripes};
use super::shm::Hall;
use super::wait::Wait;
use crate::reduce::TooNarrow;
use crate::{CommError, ReduceOp};

/// Members that meet in one hall; a member's position is its seat.
#[derive(Debug)]
pub(crate) struct HostPlane(Hall);

impl HostPlane {
    pub(crate) const fn new(hall: Hall) -> Self {
        Self(hall)
    }
}

impl Plane for HostPlane {
    fn post_bytes(&self) -> usize {
        self.0.post_bytes()
    }

    fn post(
        &self,
        parts: &[&[u8]],
        wait: &mut Wait<'_>,
        read: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<(), CommError> {
        self.0.post(parts, wait, |posts| {
            let posts: Vec<_> = (0..self.0.seats()).map(|seat| posts.get(seat)).collect();
            read(&posts);
        })
    }

    fn all_gather(
        &self,
        mine: &[u8],
        receive: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        self.0.all_gather(mine, receive, ranges, wait)
    }

    fn broadcast(&self, root: usize, cast: Cast<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        self.0.broadcast(root, cast, wait)
    }

    fn all_to_all(&self, exchange: Exchange<'_>, wait: &mut Wait<'_>) -> Result<(), CommError> {
        self.0.all_to_all(exchange, wait)
    }

    fn reduce_scatter(
        &self,
        how: (ReduceOp, DType),
        send: &[u8],
        ranges: &[Range<usize>],
        receive: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        self.0.reduce_scatter(how, send, ranges, receive, wait)
    }

    fn all_reduce(
        &self,
        how: (ReduceOp, DType),
        buffer: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        let ranges = stripes(buffer.len(), self.0.seats());
        let outcome = self.0.reduce_own(how, buffer, &ranges, wait)?;
        self.0.share(buffer, &ranges, wait)?;
        Ok(outcome)
    }
}
