//! The memory of ranks that have met. The only file that turns pointers of other ranks into slices.

use std::slice;
use std::sync::{Arc, OnceLock};

use super::group::Seating;
use crate::request::Request;
use crate::{Buffer, BufferMut};

/// What a rank lends to the others for one operation.
pub(super) enum Lent<'a> {
    Nothing,
    /// The others may read it.
    Read(Buffer<'a>),
    /// Each rank may read and write its own stripe of it.
    Write(BufferMut<'a>),
}

/// One rank's side of a meeting.
pub(super) struct Seat {
    pub(super) request: Request,
    pub(super) label: String,
    memory: Memory,
}

impl Seat {
    /// Forgets how long the memory is lent; who makes a [`Meeting`] of seats answers for that.
    pub(super) fn new(request: Request, label: &str, lent: Lent<'_>) -> Self {
        Self { request, label: label.to_owned(), memory: Memory::new(lent) }
    }
}

/// Lent memory without its lifetime.
enum Memory {
    Nothing,
    Read { start: *const u8, length: usize },
    Write { start: *mut u8, length: usize },
}

// SAFETY: it is an address until `Meeting` makes a slice of it, and what it points to are plain numbers,
// which any thread may read and write.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared `Memory` gives nothing but the address.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(lent: Lent<'_>) -> Self {
        match lent {
            Lent::Nothing => Self::Nothing,
            Lent::Read(buffer) => Self::Read { start: buffer.bytes().as_ptr(), length: buffer.bytes().len() },
            Lent::Write(mut buffer) => {
                let bytes = buffer.bytes_mut();
                Self::Write { start: bytes.as_mut_ptr(), length: bytes.len() }
            }
        }
    }
}

/// All sides of a meeting, in rank order.
pub(super) struct Table {
    seats: Vec<Seat>,
    seating: OnceLock<Seating>,
}

impl Table {
    pub(super) fn new(seats: Vec<Seat>) -> Arc<Self> {
        Arc::new(Self { seats, seating: OnceLock::new() })
    }
}

/// One rank's presence in a meeting: while it lasts, no rank takes its memory back.
pub(super) struct Meeting<'a> {
    table: &'a Table,
    seat: usize,
}

impl<'a> Meeting<'a> {
    /// The presence of the rank in `seat`.
    ///
    /// # Safety
    ///
    /// While the value lives, the borrows that made the memory of all seats must last, the ranks that lent
    /// memory must not access what they lent for writing, nor write what they lent for reading, except
    /// through their own `Meeting`, and there must be no other `Meeting` of this table and seat.
    pub(super) const unsafe fn new(table: &'a Table, seat: usize) -> Self {
        Self { table, seat }
    }

    /// What the rank in `seat` came for.
    pub(super) fn request(&self, seat: usize) -> &Request {
        &self.table.seats[seat].request
    }

    /// What all ranks came for, in rank order.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.table.seats.iter().map(|seat| &seat.request)
    }

    /// What the rank in `seat` lent to be read; `None` if it lent nothing to be read.
    pub(super) fn read(&self, seat: usize) -> Option<&[u8]> {
        match self.table.seats[seat].memory {
            // SAFETY: the pointer and length come from a slice whose borrow outlasts `self` and which
            // nobody writes meanwhile, by the contract of `new`.
            Memory::Read { start, length } => Some(unsafe { slice::from_raw_parts(start, length) }),
            Memory::Nothing | Memory::Write { .. } => None,
        }
    }

    /// This rank's stripe of every buffer lent to be written, in rank order.
    ///
    /// Buffers of equal length have equal stripes. A stripe begins and ends at an element and, within its
    /// buffer, at a multiple of a cache line.
    pub(super) fn stripes(&mut self) -> Vec<&mut [u8]> {
        let (seat, ranks) = (self.seat, self.table.seats.len());
        let stripe = |memory: &Memory| match *memory {
            Memory::Write { start, length } => {
                let (begin, end) = (stripe_begin(length, ranks, seat), stripe_begin(length, ranks, seat + 1));
                // SAFETY: the range lies within a slice whose borrow outlasts `self`. Ranges of different
                // seats are disjoint because `stripe_begin` does not decrease with the seat, no other
                // `Meeting` has this seat, and `&mut self` keeps this one from giving the range out twice.
                Some(unsafe { slice::from_raw_parts_mut(start.add(begin), end - begin) })
            }
            Memory::Nothing | Memory::Read { .. } => None,
        };
        self.table.seats.iter().filter_map(|seat| stripe(&seat.memory)).collect()
    }

    /// The groups this meeting makes; the first rank to ask makes them for all.
    pub(super) fn seating(&self, make: impl FnOnce() -> Seating) -> &Seating {
        self.table.seating.get_or_init(make)
    }
}

/// The first byte of the stripe of `seat` in a buffer of `length` bytes; `length` for all seats past the end.
fn stripe_begin(length: usize, ranks: usize, seat: usize) -> usize {
    const LINE: usize = 64;
    length.div_ceil(ranks).next_multiple_of(LINE).saturating_mul(seat).min(length)
}

#[cfg(test)]
mod tests {
    use super::stripe_begin;

    #[test]
    fn stripes_cover_a_buffer_without_overlap() {
        for length in (0..2000).step_by(8) {
            for ranks in 1..9 {
                assert_eq!(stripe_begin(length, ranks, 0), 0);
                assert_eq!(stripe_begin(length, ranks, ranks), length);
                for seat in 0..ranks {
                    assert!(stripe_begin(length, ranks, seat) <= stripe_begin(length, ranks, seat + 1));
                }
            }
        }
    }
}
