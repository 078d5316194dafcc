//! Rows of a launch: many tensors that lie in few buffers.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::error::{KernelError, Role};

/// The rows of a launch: how much there is to do for each, and `FIELDS` words that say what.
pub(super) struct Table<const FIELDS: usize> {
    rows: Vec<(usize, [u32; FIELDS])>,
}

impl<const FIELDS: usize> Default for Table<FIELDS> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<const FIELDS: usize> Table<FIELDS> {
    /// Adds a row with so much to do, if it is anything.
    ///
    /// The first field is left to where its parts begin.
    pub(super) fn push(&mut self, work: usize, fields: [u32; FIELDS]) {
        if work > 0 {
            self.rows.push((work, fields));
        }
    }

    /// What there is to do.
    pub(super) fn total(&self) -> usize {
        self.rows.iter().map(|row| row.0).sum()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The rows cut into parts of at most so much: where each row's parts end, counted over all rows, then the fields of each.
    pub(super) fn lay(&self, per_part: usize) -> Laid {
        let mut parts = 0u64;
        let mut words = vec![0; self.rows.len()];
        for (row, &(work, mut fields)) in self.rows.iter().enumerate() {
            // More parts than u32 counts are refused before they are launched.
            fields[0] = parts as u32;
            parts += work.div_ceil(per_part) as u64;
            words[row] = parts as u32;
            words.extend_from_slice(&fields);
        }
        Laid { words, rows: self.rows.len() as u32, parts }
    }
}

/// A table as a launch takes it.
pub(super) struct Laid {
    words: Vec<u32>,
    pub(super) rows: u32,
    pub(super) parts: u64,
}

impl Laid {
    pub(super) fn upload(&self, client: &Client) -> Handle {
        client.create_from_slice(bytemuck::cast_slice(&self.words))
    }
}

/// The row that a part belongs to: the first of which the parts end behind it.
#[cube]
pub(super) fn row_of(table: &[u32], rows: u32, part: u32) -> u32 {
    let mut low = 0u32;
    let mut left = rows;
    while left > 0 {
        let half = left >> 1;
        if table[(low + half) as usize] <= part {
            low += half + 1;
            left -= half + 1;
        } else {
            left = half;
        }
    }
    low
}

/// A row cut into what can be worked on by whole vectors in every buffer, and what is before and behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Numbers before the first vector.
    pub(super) head: usize,
    /// Vectors.
    pub(super) vectors: usize,
    /// Numbers behind the last vector.
    pub(super) tail: usize,
}

impl Cut {
    /// Of a row that begins at these elements of the buffers.
    pub(super) fn new(len: usize, width: usize, starts: impl IntoIterator<Item = usize>) -> Self {
        let mut starts = starts.into_iter().map(|start| start % width);
        let first = starts.next().unwrap_or(0);
        if width == 1 || starts.any(|start| start != first) {
            return Self { head: len, vectors: 0, tail: 0 };
        }
        let head = ((width - first) % width).min(len);
        Self { head, vectors: (len - head) / width, tail: (len - head) % width }
    }

    /// Where the tail begins, in elements of the row.
    pub(super) const fn tail_at(self, width: usize) -> usize {
        self.head + self.vectors * width
    }
}

/// Where a row lies in the device's memory: bytes of an allocation that `M` tells from others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent<M> {
    pub(super) memory: M,
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) row: usize,
    pub(super) role: Role,
    pub(super) written: bool,
}

/// That nothing which is written is also written or read by another, whatever buffers it belongs to.
pub(super) fn check_apart<M: Ord + Copy>(
    extents: impl IntoIterator<Item = Extent<M>>,
) -> Result<(), KernelError> {
    let mut extents: Vec<_> = extents.into_iter().filter(|extent| extent.begin < extent.end).collect();
    extents.sort_unstable_by_key(|extent| (extent.memory, extent.begin));
    // Those that reach farthest of what has been seen: of all, and of what is written.
    let (mut any, mut written): (Option<Extent<M>>, Option<Extent<M>>) = (None, None);
    for extent in extents {
        let before = if extent.written { &any } else { &written };
        if let Some(before) = before
            && before.memory == extent.memory
            && extent.begin < before.end
        {
            let (row, role, other_row, other_role) = (before.row, before.role, extent.row, extent.role);
            return Err(KernelError::Overlap { row, role, other_row, other_role });
        }
        let farthest = |seen: Option<Extent<M>>| match seen {
            Some(seen) if seen.memory == extent.memory && seen.end >= extent.end => seen,
            _ => extent,
        };
        any = Some(farthest(any));
        if extent.written {
            written = Some(farthest(written));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Cut, Extent, check_apart};
    use crate::kernels::{KernelError, Role};

    #[test]
    fn a_row_is_cut_where_all_buffers_are_at_vectors() {
        assert_eq!(Cut::new(10, 4, [4, 8]), Cut { head: 0, vectors: 2, tail: 2 });
        assert_eq!(Cut::new(10, 4, [3, 7]), Cut { head: 1, vectors: 2, tail: 1 });
        assert_eq!(Cut::new(10, 4, [3, 4]), Cut { head: 10, vectors: 0, tail: 0 });
        assert_eq!(Cut::new(2, 4, [1]), Cut { head: 2, vectors: 0, tail: 0 });
        assert_eq!(Cut::new(10, 1, [3, 4]), Cut { head: 10, vectors: 0, tail: 0 });
        assert_eq!(Cut::new(10, 4, [3]).tail_at(4), 9);
    }

    fn extent(row: usize, begin: u64, end: u64, role: Role) -> Extent<u8> {
        Extent { memory: 0, begin, end, row, role, written: role == Role::To }
    }

    #[test]
    fn rows_that_touch_are_apart_and_empty_rows_are_nowhere() {
        let rows = [extent(0, 4, 8, Role::To), extent(1, 0, 4, Role::To), extent(2, 2, 2, Role::To)];
        assert_eq!(check_apart(rows), Ok(()));
        let elsewhere = Extent { memory: 1, ..extent(3, 0, 8, Role::To) };
        assert_eq!(check_apart(rows.into_iter().chain([elsewhere])), Ok(()));
    }

    #[test]
    fn what_is_only_read_may_be_read_twice_but_not_written() {
        let read = [extent(0, 0, 8, Role::From), extent(1, 4, 6, Role::From)];
        assert_eq!(check_apart(read), Ok(()));
        // The one that reaches farthest is not the one right before.
        let error = check_apart(read.into_iter().chain([extent(2, 7, 9, Role::To)])).unwrap_err();
        let expected = KernelError::Overlap { row: 0, role: Role::From, other_row: 2, other_role: Role::To };
        assert_eq!(error, expected);
        let error = check_apart([extent(0, 0, 8, Role::To), extent(1, 2, 3, Role::From)]).unwrap_err();
        assert!(matches!(error, KernelError::Overlap { row: 0, other_row: 1, .. }), "{error}");
    }
}
