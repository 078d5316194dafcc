//! Where ranks of one host meet, in memory that they share.
//!
//! # Layout
//!
//! Each rank has a *seat*: a bell that the others ring to wake it, counters, two places for what it *posts*,
//! and a *ring* of chunks through which it streams bulk data. A rank writes to its own seat only, except for
//! bells.
//!
//! # Posts
//!
//! In each round every rank posts some bytes and then reads what all others posted. Two places, used in
//! turn, are enough: a rank begins round `n + 2` when all have posted in round `n + 1`, and they did that
//! after they had read round `n`.
//!
//! # Rings
//!
//! A ring has one writer, and every other seat reads it. `written` counts the chunks that the writer has
//! filled; for each reader, `read` counts the chunks that it does not need any more. Chunk `i` may be
//! overwritten by chunk `i + CHUNKS` when all readers have `read > i`. A reader may pass over chunks that are
//! not meant for it before they are written. All seats know from the operation's arguments how many chunks
//! each seat writes for it, so counters never need to be reset.

use std::hint;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::Timespec;
use rustix::thread::futex;
use zero_core::Rank;

use super::route::{Kind, Route, Routes, Trip};
use super::segment::Segment;
use super::shape::{ASLEEP, BELL, LENGTHS, LINE, POSTED, ROUTE, Shape, WRITTEN};
use super::streaming;
use crate::process::wait::Wait;
use crate::{CommError, lock};

/// How often a rank looks before it lets others have its core, if there is a core for every rank.
const SPINS: u32 = 200;

/// How long a rank looks before it sleeps, and lets others have its core between looks: longer than falling
/// asleep and being woken takes, which on virtual machines is a tenth of a millisecond.
const LOOK: Duration = Duration::from_micros(200);

/// The seat that chooses a route for all.
const FIRST: usize = 0;

/// What the word `ROUTE` is then.
const THROUGH_MEMORY: u32 = 1;

/// One rank's seat in a hall.
#[derive(Debug)]
pub(crate) struct Hall {
    segment: Arc<Segment>,
    /// Where in the segment the hall is.
    base: usize,
    pub(super) shape: Shape,
    pub(super) seat: usize,
    /// The rank in the world of each seat.
    ranks: Vec<Rank>,
    spins: u32,
    pub(super) progress: Mutex<Progress>,
}

/// How far a rank has come. Also the right to act for it.
#[derive(Debug)]
pub(super) struct Progress {
    /// Rounds of posts.
    round: u64,
    /// By writer: the number of chunks of all operations so far.
    pub(super) chunks: Vec<u64>,
    /// The first seat's choice is followed by all.
    routes: Routes,
}

impl Progress {
    /// Notes that each seat has written this many chunks in an operation that is over.
    pub(super) fn end(&mut self, chunks: &[u64], trip: Trip) {
        for (count, more) in self.chunks.iter_mut().zip(chunks) {
            *count += more;
        }
        self.routes.arrive(trip);
    }
}

impl Hall {
    /// The seat at `base` of `segment`, whose memory must be zero when the first rank takes its seat.
    pub(crate) fn new(
        segment: Arc<Segment>,
        base: usize,
        shape: Shape,
        seat: usize,
        ranks: Vec<Rank>,
    ) -> Self {
        debug_assert_eq!(ranks.len(), shape.seats);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            segment,
            base,
            shape,
            seat,
            spins: if ranks.len() <= cores { SPINS } else { 0 },
            progress: Mutex::new(Progress {
                round: 0,
                chunks: vec![0; ranks.len()],
                routes: Routes::default(),
            }),
            ranks,
        }
    }

    pub(crate) const fn seats(&self) -> usize {
        self.shape.seats
    }

    pub(crate) const fn seat(&self) -> usize {
        self.seat
    }

    /// How many chunks this seat has written, since it began.
    #[cfg(test)]
    pub(crate) fn written(&self) -> u64 {
        self.counter(self.seat, WRITTEN).load(Ordering::Relaxed)
    }

    /// How much a seat can post at once.
    pub(crate) const fn post_bytes(&self) -> usize {
        self.shape.post_bytes
    }

    /// Posts the concatenation of `parts`, waits until all have posted, and lets `read` look at all posts.
    pub(crate) fn post<T>(
        &self,
        parts: &[&[u8]],
        wait: &mut Wait<'_>,
        read: impl FnOnce(&Posts<'_>) -> T,
    ) -> Result<T, CommError> {
        let mut progress = lock(&self.progress);
        let round = progress.round + 1;
        let place = (round % 2) as usize;
        let length: usize = parts.iter().map(|part| part.len()).sum();
        assert!(length <= self.shape.post_bytes, "a post of {length} bytes");
        let mut start = self.base + self.shape.post(self.seat, place);
        for part in parts {
            // SAFETY: others read this place in the round before the last, which they have left, and again
            // when `posted` says so.
            unsafe { self.segment.bytes_mut(start, part.len()) }.copy_from_slice(part);
            start += part.len();
        }
        self.counter(self.seat, LENGTHS + place * LINE).store(length as u64, Ordering::Relaxed);
        self.counter(self.seat, POSTED).store(round, Ordering::Release);
        self.others().for_each(|seat| self.wake(seat));
        let absent = |seat: &usize| self.counter(*seat, POSTED).load(Ordering::Acquire) < round;
        self.wait(
            wait,
            || !self.others().any(|seat| absent(&seat)),
            || self.others().filter(absent).collect(),
        )?;
        progress.round = round;
        wait.progressed();
        Ok(read(&Posts { hall: self, place, progress }))
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.seat;
        (0..self.shape.seats).filter(move |seat| *seat != own)
    }

    pub(super) fn counter(&self, seat: usize, which: usize) -> &AtomicU64 {
        self.segment.u64(self.base + self.shape.counter(seat) + which)
    }

    fn word(&self, seat: usize, which: usize) -> &AtomicU32 {
        self.segment.u32(self.base + self.shape.counter(seat) + which)
    }

    /// Whether `reader` has no need any more of the chunk that the `index`-th of this seat overwrites.
    pub(super) fn has_read(&self, reader: usize, index: u64) -> bool {
        let read = self.segment.u64(self.base + self.shape.read(reader, self.seat)).load(Ordering::Acquire);
        read + self.shape.chunks as u64 > index
    }

    pub(super) fn has_space(&self, index: u64) -> bool {
        self.others().all(|reader| self.has_read(reader, index))
    }

    pub(super) fn set_read(&self, writer: usize, count: u64) {
        self.segment.u64(self.base + self.shape.read(self.seat, writer)).store(count, Ordering::Release);
        self.wake(writer);
    }

    /// Fills this seat's chunk `index`, for which there must be space, and wakes the `reader`, or all.
    pub(super) fn write(&self, index: u64, bytes: &[u8], reader: Option<usize>) {
        let start = self.chunk_start(self.seat, index);
        // SAFETY: every reader has passed over what was in this place, and reads it again only when
        // `written` says so.
        let place = unsafe { self.segment.bytes_mut(start, bytes.len()) };
        match self.word(FIRST, ROUTE).load(Ordering::Relaxed) {
            THROUGH_MEMORY => streaming::copy(place, bytes),
            _ => place.copy_from_slice(bytes),
        }
        self.counter(self.seat, WRITTEN).store(index + 1, Ordering::Release);
        match reader {
            Some(reader) => self.wake(reader),
            None => self.others().for_each(|reader| self.wake(reader)),
        }
    }

    /// Begins to write the chunks of an operation. The first seat chooses how all write from now on; they may
    /// see it a little later.
    pub(super) fn depart(&self, progress: &mut Progress, kind: Kind) -> Trip {
        let trip = progress.routes.depart(kind);
        if self.seat == FIRST {
            let route = if trip.route == Route::Memory { THROUGH_MEMORY } else { 0 };
            self.word(FIRST, ROUTE).store(route, Ordering::Relaxed);
        }
        trip
    }

    /// # Safety
    ///
    /// The chunk must be written, and this seat must not have passed over it.
    pub(super) unsafe fn chunk(&self, writer: usize, index: u64, length: usize) -> &[u8] {
        // SAFETY: the caller's.
        unsafe { self.segment.bytes(self.chunk_start(writer, index), length) }
    }

    fn chunk_start(&self, seat: usize, index: u64) -> usize {
        let place = (index % self.shape.chunks as u64) as usize;
        self.base + self.shape.ring(seat) + place * self.shape.chunk_bytes
    }

    /// Wakes the rank in `seat` if it sleeps. What it is to see must be stored before.
    fn wake(&self, seat: usize) {
        // Either this sees that the other is asleep, or the other sees, before it sleeps, what was stored.
        fence(Ordering::SeqCst);
        let asleep = self.word(seat, ASLEEP);
        if asleep.load(Ordering::Relaxed) == 1 && asleep.swap(0, Ordering::Relaxed) == 1 {
            let bell = self.word(seat, BELL);
            bell.fetch_add(1, Ordering::Release);
            // It fails only for an address that is no word.
            let _ = futex::wake(bell, futex::Flags::empty(), 1);
        }
    }

    /// Waits until `ready`; `missing` says for whom.
    pub(super) fn wait(
        &self,
        wait: &mut Wait<'_>,
        ready: impl Fn() -> bool,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        for _ in 0..self.spins {
            if ready() {
                return Ok(());
            }
            hint::spin_loop();
        }
        let begin = Instant::now();
        while begin.elapsed() < LOOK {
            if ready() {
                return Ok(());
            }
            thread::yield_now();
        }
        let (bell, asleep) = (self.word(self.seat, BELL), self.word(self.seat, ASLEEP));
        loop {
            let rung = bell.load(Ordering::Acquire);
            asleep.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready() {
                asleep.store(0, Ordering::Relaxed);
                return Ok(());
            }
            sleep(bell, rung, wait.slice());
            asleep.store(0, Ordering::Relaxed);
            if ready() {
                return Ok(());
            }
            wait.check(|| missing().into_iter().map(|seat| self.ranks[seat]).collect())?;
        }
    }
}

/// What all seats have posted in one round.
pub(crate) struct Posts<'a> {
    hall: &'a Hall,
    place: usize,
    #[expect(dead_code, reason = "held: no rank goes on to the next round while it looks at posts")]
    progress: MutexGuard<'a, Progress>,
}

impl Posts<'_> {
    /// What the rank in `seat` posted. It begins at a page.
    pub(crate) fn get(&self, seat: usize) -> &[u8] {
        let length = self.hall.counter(seat, LENGTHS + self.place * LINE).load(Ordering::Relaxed);
        let start = self.hall.base + self.hall.shape.post(seat, self.place);
        let length = (length as usize).min(self.hall.shape.post_bytes);
        // SAFETY: the seat has posted, and writes to this place again only in the round after the next,
        // which needs this seat to have begun the next.
        unsafe { self.hall.segment.bytes(start, length) }
    }
}

/// Sleeps until the bell is rung, for at most `limit`.
fn sleep(bell: &AtomicU32, rung: u32, limit: Duration) {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // Whether woken, timed out, interrupted or rung before: the caller looks.
    let _ = futex::wait(bell, futex::Flags::empty(), rung, Some(&limit));
}
