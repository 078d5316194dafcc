//! The norm of gradients, and whether they are finite.

use std::fmt;
use std::ops::Range;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::buffer::{Buffer, argument};
use super::error::{KernelError, Role};
use super::launch::{self, Teams};
use super::table::{Cut, Table, row_of};
use super::words::{Format, get, unpack};

/// What was found of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// The sum of the squares of its elements; infinite if one of them is not finite.
    pub sum_of_squares: f64,
    /// Whether all of its elements are finite.
    pub is_finite: bool,
}

/// Sums of squares of rows in any number of buffers, with one read-back for all of them.
///
/// Squares are summed up in `f32` by their magnitude: what is far from 1 is scaled by a power of two into a sum of its own
/// (Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978). So nothing overflows or underflows where
/// elements are finite, but that a device may take numbers below 2^-126 for 0. A sum is of a few thousand elements, in a tree;
/// the sums of a row are added up in `f64` on the host, in order. No order depends on timing, so the same buffer on the same
/// device gives the same bits; the result is within 1e-6 of the sum, relatively.
pub struct Norms<'a> {
    client: &'a Client,
    /// The units that work on a sum together.
    team: u32,
    pending: Vec<Pending>,
}

/// A buffer whose sums are being made.
#[derive(Debug)]
struct Pending {
    /// None if there is nothing to sum.
    sums: Option<Handle>,
    /// How many sums each row has.
    rows: Vec<usize>,
}

impl fmt::Debug for Norms<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Norms").field("pending", &self.pending).finish_non_exhaustive()
    }
}

/// Vectors that a unit sums up one after another: few, so that the sum loses little.
const STRETCH: u32 = 8;

/// The most of such sums that a unit adds up.
const TURNS: u32 = 8;

/// Fields of a row's table entry: where its parts begin, how many vectors it has and where they begin, then where its single
/// elements begin and how many there are, before and behind the vectors.
const FIELDS: usize = 7;

/// The numbers a team writes.
const SUMS: usize = 4;

impl<'a> Norms<'a> {
    /// None yet.
    pub fn new(client: &'a Client) -> Self {
        Self::with_team(client, Teams::units(client, u32::MAX))
    }

    /// With so many units that work on a sum together, which the device decides otherwise: for tests.
    #[doc(hidden)]
    pub const fn with_team(client: &'a Client, team: u32) -> Self {
        Self { client, team, pending: Vec::new() }
    }

    /// Starts on these rows of a buffer, each the range of its elements.
    ///
    /// # Errors
    ///
    /// [`KernelError`] says which row or buffer does not fit; none of the rows has been added then.
    pub fn add(&mut self, buffer: &Buffer, rows: &[Range<usize>]) -> Result<(), KernelError> {
        let client = self.client;
        let bound = buffer.bind(client, Role::Summed)?;
        // At least two: 16 bits are read in pairs.
        let width = launch::width(client).max(2);
        let (teams, dim) = Teams::new(client, self.team);
        let mut table = Table::default();
        let mut vectors = Vec::with_capacity(rows.len());
        for (index, row) in rows.iter().enumerate() {
            let len = row.end.saturating_sub(row.start);
            buffer.check_row(Role::Summed, index, row.start, len)?;
            let start = row.start + bound.shift;
            let cut = Cut::new(len, width, [start]);
            let numbers = [
                0,
                cut.vectors,
                (start + cut.head) / width,
                start,
                cut.head,
                start + cut.tail_at(width),
                cut.tail,
            ];
            // A team at least for what is there.
            table.push(cut.vectors.max(usize::from(len > 0)), numbers.map(|number| number as u32));
            vectors.push(cut.vectors.max(usize::from(len > 0)));
        }
        // By the buffer alone, so that the same sums are made of the same numbers.
        let turns = launch::turns(client, table.total(), teams.units * teams.count * STRETCH, TURNS);
        let per_team = (teams.units * STRETCH * turns) as usize;
        let counts = vectors.into_iter().map(|vectors| vectors.div_ceil(per_team)).collect();
        let mut pending = Pending { sums: None, rows: counts };
        if !table.is_empty() {
            let laid = table.lay(per_team);
            let count = teams.cubes(client, laid.parts)?;
            let sums = client.empty(laid.parts as usize * SUMS * size_of::<f32>());
            let plan = Plan { format: bound.format, teams };
            // SAFETY: teams read what rows of the table name, which are within the buffer, and write their sums, for which
            // there is room.
            unsafe {
                sum_squares::launch_unchecked(
                    client,
                    count,
                    dim,
                    width,
                    bound.format.words(width),
                    argument(&laid.upload(client)),
                    bound.vectors_argument(client, bound.format.words(width)),
                    bound.argument(),
                    argument(&sums),
                    laid.rows,
                    laid.parts as u32,
                    turns,
                    plan,
                );
            }
            pending.sums = Some(sums);
        }
        self.pending.push(pending);
        Ok(())
    }

    /// Waits for all that was added, and gives the norms of each buffer's rows, in the order in which they were added.
    ///
    /// # Errors
    ///
    /// [`KernelError::Device`] if the device failed.
    pub fn read(self) -> Result<Vec<Vec<RowNorm>>, KernelError> {
        let handles: Vec<_> = self.pending.iter().filter_map(|pending| pending.sums.clone()).collect();
        let bytes = match handles.is_empty() {
            true => Vec::new(),
            false => launch::read(self.client, handles, "reading norms")?,
        };
        let mut bytes = bytes.iter();
        let norms = self.pending.iter().map(|pending| {
            let sums: Vec<f32> = match &pending.sums {
                Some(_) => bytes.next().map_or_else(Vec::new, |bytes| bytemuck::pod_collect_to_vec(bytes)),
                None => Vec::new(),
            };
            let mut sums = sums.as_chunks::<SUMS>().0.iter();
            pending.rows.iter().map(|&cubes| RowNorm::of(sums.by_ref().take(cubes))).collect()
        });
        Ok(norms.collect())
    }
}

impl RowNorm {
    /// Of the sums of its parts.
    fn of<'a>(sums: impl Iterator<Item = &'a [f32; SUMS]>) -> Self {
        let scale = f64::from(DOWN).recip().powi(2);
        let mut norm = Self { sum_of_squares: 0.0, is_finite: true };
        for &[large, middle, small, not_finite] in sums {
            norm.sum_of_squares += f64::from(large) * scale + f64::from(middle) + f64::from(small) / scale;
            norm.is_finite &= not_finite == 0.0;
        }
        if !norm.is_finite {
            norm.sum_of_squares = f64::INFINITY;
        }
        norm
    }
}

/// 2^-96 and 2^96: what large and small numbers are multiplied by.
const DOWN: f32 = f32::from_bits((127 - 96) << 23);
const UP: f32 = f32::from_bits((127 + 96) << 23);

/// The bits of 2^50, above which squares of thousands are scaled, and of 2^-45, below which they are.
const LARGE: u32 = (127 + 50) << 23;
const SMALL: u32 = (127 - 45) << 23;
const NOT_FINITE: u32 = 0xff << 23;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    format: Format,
    teams: Teams,
}

/// What a unit has summed up.
#[derive(CubeType, Clone, Copy)]
struct Sums {
    large: f32,
    middle: f32,
    small: f32,
    not_finite: f32,
}

/// A team sums up a part of a row.
#[cube(launch_unchecked)]
fn sum_squares<N: Size, M: Size>(
    table: &[u32],
    vectors: &[Vector<u32, M>],
    words: &[u32],
    result: &mut [f32],
    rows: u32,
    parts: u32,
    turns: u32,
    #[comptime] plan: Plan,
) {
    let units = comptime!(plan.teams.units);
    let part = CUBE_POS as u32 * plan.teams.count + UNIT_POS / units;
    let unit = UNIT_POS % units;
    let mut sums = Sums { large: 0.0, middle: 0.0, small: 0.0, not_finite: 0.0 };
    if part < parts {
        let row = rows + row_of(table, rows, part) * comptime!(FIELDS as u32);
        let part = part - table[row as usize];
        let len = table[(row + 1) as usize];
        let start = table[(row + 2) as usize];
        let mut at = part * turns * comptime!(units * STRETCH) + unit;
        let mut middle = Vector::<f32, N>::new(0.0);
        for _ in 0..turns {
            let mut stretch = Vector::<f32, N>::new(0.0);
            for _ in 0..STRETCH {
                if at < len {
                    let numbers = unpack::<N, M>(vectors[(start + at) as usize], plan.format);
                    stretch += add_squares::<N>(numbers, &mut sums);
                }
                at += units;
            }
            middle += stretch;
        }
        #[unroll]
        for lane in 0..N::value() {
            sums.middle += middle.extract(lane);
        }
        // The few that fill no vector go with the row's first vectors, a unit's one after another.
        if part == 0 {
            let mut at = unit;
            let head = table[(row + 4) as usize];
            let singles = head + table[(row + 6) as usize];
            while at < singles {
                let place =
                    select(at < head, table[(row + 3) as usize] + at, table[(row + 5) as usize] + at - head);
                let number = Vector::<f32, Const<1>>::new(get(words, place, plan.format));
                let square = add_squares::<Const<1>>(number, &mut sums);
                sums.middle += square.extract(0usize);
                at += units;
            }
        }
    }
    if comptime!(units > 1) {
        let all = comptime!((plan.teams.units * plan.teams.count) as usize);
        let mut large = Shared::<[f32]>::new_slice(all);
        let mut middle = Shared::<[f32]>::new_slice(all);
        let mut small = Shared::<[f32]>::new_slice(all);
        let mut not_finite = Shared::<[f32]>::new_slice(all);
        let at = UNIT_POS as usize;
        large[at] = sums.large;
        middle[at] = sums.middle;
        small[at] = sums.small;
        not_finite[at] = sums.not_finite;
        sync_cube();
        #[unroll]
        for step in 0..plan.teams.steps() {
            let half = comptime!((1u32 << plan.teams.steps()) >> (step + 1));
            // Teams need not have a power of two of units.
            if unit < half && unit + half < units {
                let other = at + comptime!(half as usize);
                large[at] += large[other];
                middle[at] += middle[other];
                small[at] += small[other];
                not_finite[at] += not_finite[other];
            }
            sync_cube();
        }
        sums.large = large[at];
        sums.middle = middle[at];
        sums.small = small[at];
        sums.not_finite = not_finite[at];
    }
    if unit == 0 && part < parts {
        let at = (part * comptime!(SUMS as u32)) as usize;
        result[at] = sums.large;
        result[at + 1] = sums.middle;
        result[at + 2] = sums.small;
        result[at + 3] = sums.not_finite;
    }
}

/// The squares of what is neither large nor small; the others are added to their sums.
#[cube]
fn add_squares<N: Size>(numbers: Vector<f32, N>, sums: &mut Sums) -> Vector<f32, N> {
    let mut near = Vector::<f32, N>::empty();
    let mut far = 0u32;
    #[unroll]
    for lane in 0..N::value() {
        let number = numbers.extract(lane);
        let magnitude = u32::reinterpret(number) & 0x7fff_ffff;
        let is_far = magnitude >= LARGE || (magnitude < SMALL && magnitude != 0);
        near.insert(lane, select(is_far, f32::new(0.0), number));
        far |= select(is_far, u32::new(1), u32::new(0));
    }
    if far != 0 {
        #[unroll]
        for lane in 0..N::value() {
            let number = numbers.extract(lane);
            let magnitude = u32::reinterpret(number) & 0x7fff_ffff;
            if magnitude >= NOT_FINITE {
                sums.not_finite = f32::new(1.0);
            } else if magnitude >= LARGE {
                let scaled = number * f32::new(DOWN);
                sums.large += scaled * scaled;
            } else if magnitude < SMALL {
                let scaled = number * f32::new(UP);
                sums.small += scaled * scaled;
            }
        }
    }
    near * near
}
