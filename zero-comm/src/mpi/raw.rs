//! MPI's C functions, made safe. Memory that is lent to MPI is owned until MPI is done with it.

use std::ffi::{c_char, c_int};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{mem, ptr};

use ::mpi::environment::{self, Threading, Universe};
use ::mpi::ffi;
use zero_core::{Rank, WorldSize};

use super::backoff::Backoff;
use super::board::Place;
use super::error::MpiError;
use super::memory::{Piece, Pool};
use crate::Region;

/// Tells messages of one sender apart.
pub(super) type Tag = c_int;

/// What all ranks do first.
pub(super) const FIRST_MEETING: &str = "the first meeting";

/// What every MPI library allows.
const LOWEST_TAG_BOUND: Tag = 32_767;

/// Starts MPI, unless the program has. Whoever drops the universe ends MPI; there is none if it is not ours.
pub(super) fn initialise() -> Result<Option<Universe>, MpiError> {
    if environment::is_finalized() {
        return Err(MpiError::Finalised);
    }
    let (universe, provided) = match environment::initialize_with_threading(Threading::Multiple) {
        Some((universe, provided)) => (Some(universe), provided),
        None => (None, environment::threading_support()),
    };
    if provided < Threading::Multiple {
        return Err(MpiError::Threads { provided: format!("{provided:?}") });
    }
    if universe.is_some() {
        // SAFETY: reads constants of the library.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        return_errors(world)?;
    }
    Ok(universe)
}

/// A communicator of our own, of all MPI ranks: our messages are apart from all others.
pub(super) struct Channel {
    comm: ffi::MPI_Comm,
    place: Place,
}

impl Channel {
    /// All MPI ranks come together to make theirs.
    pub(super) fn open(deadline: Duration) -> Result<Self, MpiError> {
        // SAFETY: reads constants of the library.
        let (world, none) = unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_NULL) };
        let mut flight = Flight::new(vec![none]);
        let place = flight.memory.as_mut().map_or(ptr::null_mut(), Vec::as_mut_ptr);
        // SAFETY: the flight owns `place` until the request is complete.
        let code = unsafe { ffi::MPI_Comm_idup(world, place, &mut flight.request) };
        check("MPI_Comm_idup", code)?;
        let comm = flight.wait(FIRST_MEETING, deadline)?.pop().unwrap_or(none);
        return_errors(comm)?;

        let (mut rank, mut size) = (0, 0);
        // SAFETY: `comm` is a communicator, and the results are written to where they belong.
        check("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(comm, &mut rank) })?;
        // SAFETY: as above.
        check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(comm, &mut size) })?;
        let size = WorldSize::new(size as usize).unwrap_or(WorldSize::ONE);
        let place = Place { rank: Rank::new(rank as usize), size, tags_end: tags_end(world)? };
        Ok(Self { comm, place })
    }

    pub(super) const fn rank(&self) -> Rank {
        self.place.rank
    }

    pub(super) const fn place(&self) -> Place {
        self.place
    }

    /// Sends `piece`.
    pub(super) fn send(&self, to: Rank, tag: Tag, piece: Piece) -> Result<Flight<Piece>, MpiError> {
        let (bytes, len) = (piece.bytes().as_ptr(), piece.bytes().len());
        let mut flight = Flight::new(piece);
        // SAFETY: the flight owns the piece, whose bytes stay where they are, until the request is complete.
        unsafe { self.isend(bytes, len, to, tag, &mut flight.request) }?;
        Ok(flight)
    }

    /// Sends `range` of a region, from where it is.
    pub(super) fn send_region(
        &self,
        to: Rank,
        tag: Tag,
        region: &Arc<dyn Region>,
        range: Range<usize>,
    ) -> Result<Flight<Arc<dyn Region>>, MpiError> {
        let mut flight = Flight::new(Arc::clone(region));
        let Some(bytes) = region.bytes().get(range) else {
            return Err(MpiError::Malformed { peer: self.rank(), what: "a window that has become shorter" });
        };
        // SAFETY: the flight holds the region, which can't take back the bytes that it lent, until the request
        // is complete.
        unsafe { self.isend(bytes.as_ptr(), bytes.len(), to, tag, &mut flight.request) }?;
        Ok(flight)
    }

    /// # Safety
    ///
    /// The bytes must not change, move or go before the request is complete.
    unsafe fn isend(
        &self,
        bytes: *const u8,
        len: usize,
        to: Rank,
        tag: Tag,
        request: &mut ffi::MPI_Request,
    ) -> Result<(), MpiError> {
        // SAFETY: the caller vouches for the bytes; all else are handles of the library. Lengths of messages
        // and numbers of ranks fit: they are at most those of a piece and of `MPI_Comm_size`.
        let code = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            ffi::MPI_Isend(bytes.cast(), len as c_int, kind, to.index() as c_int, tag, self.comm, request)
        };
        check("MPI_Isend", code)
    }

    /// The next message with `tag`, if one has come: `from` a rank, or else from any.
    pub(super) fn probe(&self, from: Option<Rank>, tag: Tag) -> Result<Option<Arrival>, MpiError> {
        // SAFETY: reads constants of the library; a status is plain data, for which zeros are valid.
        let (any, mut message, mut status) =
            unsafe { (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_MESSAGE_NULL, mem::zeroed::<ffi::MPI_Status>()) };
        let from = from.map_or(any, |rank| rank.index() as c_int);
        let (mut found, mut len) = (0, 0);
        // SAFETY: handles of the library, and results are written to where they belong.
        let code = unsafe { ffi::MPI_Improbe(from, tag, self.comm, &mut found, &mut message, &mut status) };
        check("MPI_Improbe", code)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: the status is that of a message of bytes.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) };
        check("MPI_Get_count", code)?;
        Ok(Some(Arrival { message, from: Rank::new(status.MPI_SOURCE as usize), len: len as usize }))
    }

    /// Receives a message into a piece of its length.
    pub(super) fn receive(&self, mut arrival: Arrival, pool: &Pool) -> Result<Flight<Piece>, MpiError> {
        let mut piece = pool.take(arrival.len);
        let bytes = piece.bytes_mut().as_mut_ptr();
        let mut flight = Flight::new(piece);
        // SAFETY: the flight owns the piece, whose bytes stay where they are, until the request is complete.
        // The message is as long as the piece, and received once.
        let code = unsafe {
            let (len, kind) = (arrival.len as c_int, ffi::RSMPI_UINT8_T);
            ffi::MPI_Imrecv(bytes.cast(), len, kind, &mut arrival.message, &mut flight.request)
        };
        check("MPI_Imrecv", code)?;
        Ok(flight)
    }

    /// Gives all ranks the bytes of rank 0; there must be as many on all.
    pub(super) fn broadcast(&self, bytes: Vec<u8>) -> Result<Flight<Vec<u8>>, MpiError> {
        let len = bytes.len() as c_int;
        let mut flight = Flight::new(bytes);
        let place = flight.memory.as_mut().map_or(ptr::null_mut(), Vec::as_mut_ptr);
        // SAFETY: the flight owns the bytes until the request is complete.
        let code = unsafe {
            ffi::MPI_Ibcast(place.cast(), len, ffi::RSMPI_UINT8_T, 0, self.comm, &mut flight.request)
        };
        check("MPI_Ibcast", code)?;
        Ok(flight)
    }

    /// Ends when all ranks have called it.
    pub(super) fn barrier(&self) -> Result<Flight<Vec<u8>>, MpiError> {
        let mut flight = Flight::new(Vec::new());
        // SAFETY: a communicator, and a request to write.
        let code = unsafe { ffi::MPI_Ibarrier(self.comm, &mut flight.request) };
        check("MPI_Ibarrier", code)?;
        Ok(flight)
    }

    /// Gives the communicator back; all ranks do.
    pub(super) fn free(mut self) -> Result<(), MpiError> {
        // SAFETY: this is its last use.
        check("MPI_Comm_free", unsafe { ffi::MPI_Comm_free(&mut self.comm) })
    }
}

/// A message that has come, and that must be received.
#[must_use]
pub(super) struct Arrival {
    message: ffi::MPI_Message,
    pub(super) from: Rank,
    /// In bytes.
    pub(super) len: usize,
}

/// What MPI does with memory that it was lent.
///
/// If it is dropped before, the memory is never freed: MPI may still use it, and has no certain way to be
/// stopped.
pub(super) struct Flight<M> {
    request: ffi::MPI_Request,
    /// There for as long as MPI may use it.
    memory: Option<M>,
}

impl<M> Flight<M> {
    fn new(memory: M) -> Self {
        // SAFETY: reads a constant of the library.
        Self { request: unsafe { ffi::RSMPI_REQUEST_NULL }, memory: Some(memory) }
    }

    /// The memory, once MPI is done with it. Given out once.
    pub(super) fn landed(&mut self) -> Result<Option<M>, MpiError> {
        if self.memory.is_none() {
            return Ok(None);
        }
        let mut done = 0;
        // SAFETY: the request is one that is not complete yet, and the result is written to where it belongs.
        let code = unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", code).inspect_err(|_| mem::forget(self.memory.take()))?;
        Ok(if done == 0 { None } else { self.memory.take() })
    }

    /// Waits for the memory; `what` is what all ranks do with it.
    pub(super) fn wait(mut self, what: &'static str, deadline: Duration) -> Result<M, MpiError> {
        let (since, mut backoff) = (Instant::now(), Backoff::default());
        loop {
            if let Some(memory) = self.landed()? {
                return Ok(memory);
            }
            if since.elapsed() >= deadline {
                return Err(MpiError::Timeout { what, after: deadline });
            }
            backoff.pause();
        }
    }
}

impl<M> Drop for Flight<M> {
    fn drop(&mut self) {
        mem::forget(self.memory.take());
    }
}

/// Makes errors return to the caller instead of ending the job.
fn return_errors(comm: ffi::MPI_Comm) -> Result<(), MpiError> {
    // SAFETY: handles of the library.
    let code = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
    check("MPI_Comm_set_errhandler", code)
}

/// What all tags are below.
fn tags_end(world: ffi::MPI_Comm) -> Result<Tag, MpiError> {
    let (mut bound, mut found) = (ptr::null_mut::<Tag>(), 0);
    // SAFETY: this attribute is a pointer to an integer that lives as long as the communicator of all ranks.
    unsafe {
        let place = (&raw mut bound).cast();
        check(
            "MPI_Comm_get_attr",
            ffi::MPI_Comm_get_attr(world, ffi::MPI_TAG_UB as c_int, place, &mut found),
        )?;
        Ok(if found == 0 || bound.is_null() { LOWEST_TAG_BOUND } else { *bound })
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the text has the length that the library asks for.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let message = if told == ffi::MPI_SUCCESS as c_int {
        text.truncate(len as usize);
        String::from_utf8_lossy(&text).into_owned()
    } else {
        format!("error {code}")
    };
    Err(MpiError::Call { call, message })
}
