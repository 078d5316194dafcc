//! Rows from one buffer to another, of another type or added up.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::arithmetic::{Fusion, mul_add};
use super::buffer::{Buffer, argument};
use super::error::{KernelError, Role};
use super::launch::{self, first_turn};
use super::table::{self, Cut, Table, row_of};
use super::words::{Format, get, get_bits, get_shared, pack, set_bits, set_shared, unpack};

/// What a move does with what it finds at its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Onto {
    /// Overwrites it.
    Put,
    /// Adds to it.
    Add,
}

/// Elements to move, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveRow {
    /// Where they begin in the source.
    pub from: usize,
    /// Where they go in the destination.
    pub to: usize,
    /// How many there are. There may be none.
    pub len: usize,
}

/// Moves rows from one buffer to another, times `factor`.
///
/// Types may differ: numbers are read to `f32`, worked on there, and rounded once to the nearest even of the destination's
/// type. [`Onto::Add`] rounds the product together with the sum. What is put without change of type, times 1, is moved bit by
/// bit. Both may be parts of the same memory, but no row may write what another reads or writes.
///
/// All rows share a launch; elements that don't fill a vector at the same place of both buffers share a second one.
///
/// # Errors
///
/// [`KernelError`] says which row, buffer or number does not fit; nothing has been launched then.
pub fn move_rows(
    client: &Client,
    from: &Buffer,
    to: &Buffer,
    rows: &[MoveRow],
    factor: f32,
    onto: Onto,
) -> Result<(), KernelError> {
    if !factor.is_finite() {
        return Err(KernelError::Factor { factor });
    }
    let mut extents = Vec::with_capacity(rows.len() * 2);
    for (index, row) in rows.iter().enumerate() {
        for (role, buffer, start) in [(Role::From, from, row.from), (Role::To, to, row.to)] {
            buffer.check_row(role, index, start, row.len)?;
            extents.push(buffer.extent(role, index, start, row.len, role == Role::To));
        }
    }
    table::check_apart(extents)?;
    let (source, target) = (from.bind(client, Role::From)?, to.bind(client, Role::To)?);
    let width = launch::width(client);
    let (mut vectors, mut singles) = (Table::default(), Table::default());
    for row in rows {
        let (from, to) = (row.from + source.shift, row.to + target.shift);
        let cut = Cut::new(row.len, width, [from, to]);
        let push = |table: &mut Table<FIELDS>, len: usize, at: usize, unit: usize| {
            let starts = [from, to].map(|start| ((start + at) / unit) as u32);
            table.push(len, [0, len as u32, starts[0], starts[1]]);
        };
        push(&mut vectors, cut.vectors, cut.head, width);
        push(&mut singles, cut.head, 0, 1);
        push(&mut singles, cut.tail, cut.tail_at(width), 1);
    }
    let plan = Plan {
        from: source.format,
        to: target.format,
        plane: launch::plane(client),
        scaled: factor != 1.0,
        added: onto == Onto::Add,
        // Only a sum of a product depends on it.
        fusion: match onto {
            Onto::Add if factor != 1.0 => Fusion::of(client)?,
            _ => Fusion::Fused,
        },
    };
    let dim = launch::cube(client);
    let units = dim.num_elems();
    let lay = |table: &Table<FIELDS>| {
        let turns = launch::turns(client, table.total(), units, TURNS);
        let rows = table.lay((units * turns) as usize);
        Ok((turns, launch::cubes(client, rows.parts)?, rows))
    };
    let laid = (lay(&vectors)?, lay(&singles)?);
    // SAFETY: units touch what the rows of a table name, which are within the buffers.
    unsafe {
        if !vectors.is_empty() {
            let (turns, count, rows) = laid.0;
            move_vectors::launch_unchecked(
                client,
                count,
                dim,
                width,
                source.format.words(width),
                target.format.words(width),
                argument(&rows.upload(client)),
                source.argument(),
                target.argument(),
                factor,
                rows.rows,
                rows.parts as u32,
                turns,
                plan,
            );
        }
        if !singles.is_empty() {
            let (turns, count, rows) = laid.1;
            move_singles::launch_unchecked(
                client,
                count,
                dim,
                argument(&rows.upload(client)),
                source.argument(),
                target.argument(),
                factor,
                rows.rows,
                rows.parts as u32,
                turns,
                plan,
            );
        }
    }
    Ok(())
}

/// The most vectors that a unit moves.
const TURNS: u32 = 16;

/// Where a row's cubes begin, its length, where it begins in the source and in the destination.
const FIELDS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    from: Format,
    to: Format,
    plane: u32,
    scaled: bool,
    added: bool,
    fusion: Fusion,
}

impl Plan {
    /// Whether numbers need not be looked at.
    const fn is_copy(self) -> bool {
        self.from as u8 == self.to as u8 && !self.scaled && !self.added
    }
}

/// A cube moves vectors of one row, a unit one in each turn.
#[cube(launch_unchecked)]
fn move_vectors<N: Size, F: Size, T: Size>(
    table: &[u32],
    from: &[Vector<u32, F>],
    to: &mut [Vector<u32, T>],
    factor: f32,
    rows: u32,
    cubes: u32,
    turns: u32,
    #[comptime] plan: Plan,
) {
    let cube = CUBE_POS as u32;
    if cube >= cubes {
        terminate!();
    }
    let row = rows + row_of(table, rows, cube) * comptime!(FIELDS as u32);
    let len = table[(row + 1) as usize];
    let start = table[(row + 2) as usize];
    let target = table[(row + 3) as usize];
    let mut at = first_turn(cube - table[row as usize], turns, plan.plane);
    for _ in 0..turns {
        if at < len {
            let from_at = (start + at) as usize;
            let to_at = (target + at) as usize;
            if comptime!(plan.is_copy()) {
                // The same vector, which only the plan knows.
                to[to_at] = Vector::<u32, T>::reinterpret(from[from_at]);
            } else {
                let mut old = Vector::<f32, N>::new(0.0);
                if comptime!(plan.added) {
                    old = unpack::<N, T>(to[to_at], plan.to);
                }
                let moved = onto::<N>(unpack::<N, F>(from[from_at], plan.from), old, factor, plan);
                to[to_at] = pack::<N, T>(moved, plan.to);
            }
        }
        at += plan.plane;
    }
}

/// A cube moves elements of one row, a unit one in each turn. Two may share a word of 16-bit elements, hence those are
/// changed atomically.
#[cube(launch_unchecked)]
fn move_singles(
    table: &[u32],
    from: &[u32],
    to: &[Atomic<u32>],
    factor: f32,
    rows: u32,
    cubes: u32,
    turns: u32,
    #[comptime] plan: Plan,
) {
    let cube = CUBE_POS as u32;
    if cube >= cubes {
        terminate!();
    }
    let row = rows + row_of(table, rows, cube) * comptime!(FIELDS as u32);
    let len = table[(row + 1) as usize];
    let start = table[(row + 2) as usize];
    let target = table[(row + 3) as usize];
    let mut at = first_turn(cube - table[row as usize], turns, plan.plane);
    for _ in 0..turns {
        if at < len {
            let from_at = start + at;
            let to_at = target + at;
            if comptime!(plan.is_copy()) {
                set_bits(to, to_at, get_bits(from, from_at, plan.from), plan.to);
            } else {
                let mut old = Vector::<f32, Const<1>>::new(0.0);
                if comptime!(plan.added) {
                    old = Vector::new(get_shared(to, to_at, plan.to));
                }
                let number = Vector::<f32, Const<1>>::new(get(from, from_at, plan.from));
                let moved = onto::<Const<1>>(number, old, factor, plan);
                set_shared(to, to_at, moved.extract(0usize), plan.to);
            }
        }
        at += plan.plane;
    }
}

#[cube]
fn onto<N: Size>(
    number: Vector<f32, N>,
    old: Vector<f32, N>,
    factor: f32,
    #[comptime] plan: Plan,
) -> Vector<f32, N> {
    if comptime!(plan.added && plan.scaled) {
        mul_add(number, Vector::new(factor), old, plan.fusion)
    } else if comptime!(plan.added) {
        number + old
    } else if comptime!(plan.scaled) {
        number * Vector::new(factor)
    } else {
        number
    }
}
