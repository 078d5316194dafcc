//! Where in shared memory the parts of a hall are.

pub(super) const LINE: usize = 64;
/// A seat's counters, each on a cache line of its own.
pub(super) const BELL: usize = 0;
pub(super) const ASLEEP: usize = LINE;
pub(super) const POSTED: usize = 2 * LINE;
pub(super) const WRITTEN: usize = 3 * LINE;
pub(super) const LENGTHS: usize = 4 * LINE;
pub(super) const ROUTE: usize = 6 * LINE;
const COUNTERS: usize = 7 * LINE;

/// The measures of a hall.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) seats: usize,
    /// How much a seat can post at once.
    pub(crate) post_bytes: usize,
    pub(crate) chunk_bytes: usize,
    pub(crate) chunks: usize,
}

impl Shape {
    /// How much memory the hall takes, a multiple of the page size for multiples in the shape.
    pub(crate) const fn bytes(&self) -> usize {
        self.ring(self.seats).next_multiple_of(4096)
    }

    pub(super) const fn counter(&self, seat: usize) -> usize {
        seat * COUNTERS
    }

    /// Where `reader` counts the chunks of `writer`.
    pub(super) const fn read(&self, reader: usize, writer: usize) -> usize {
        self.counter(self.seats) + (reader * self.seats + writer) * LINE
    }

    pub(super) const fn post(&self, seat: usize, place: usize) -> usize {
        self.read(self.seats, 0).next_multiple_of(4096) + (seat * 2 + place) * self.post_bytes
    }

    pub(super) const fn ring(&self, seat: usize) -> usize {
        self.post(self.seats, 0) + seat * self.chunks * self.chunk_bytes
    }
}
