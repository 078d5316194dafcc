//! One update of many tensors.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use zero_core::DType;
use zero_offload::{HostOptimizer, Update};

use super::arithmetic::Fusion;
use super::buffer::{Bound, Buffer, argument};
use super::error::{KernelError, Role};
use super::launch::{self, first_turn};
use super::rule::{self, Kind, NUMBERS, Numbers};
use super::table::{self, Cut, Laid, Table, row_of};
use super::words::{Format, get, get_shared, pack, set_shared, unpack};

/// The buffers that the rows of an update lie in. All are on the device of the client that launches.
#[derive(Clone, Debug)]
pub struct UpdateBuffers {
    /// The numbers that are updated: of f32.
    pub values: Buffer,
    /// Their gradients: of f32, bf16 or f16.
    pub gradients: Buffer,
    /// Their states, in the order of [`HostOptimizer::states`]: each of f32 or bf16. An optimizer with fewer states than
    /// there are buffers leaves the rest alone.
    pub states: Vec<Buffer>,
    /// Where the new values go in the type that layers compute in: f32, bf16 or f16.
    pub copy: Option<Buffer>,
}

/// One tensor of an update: how it is updated, and where it begins in each of the buffers, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateRow {
    /// Its optimizer.
    pub optimizer: HostOptimizer,
    /// Its learning rate, step and gradient factor.
    pub update: Update,
    /// Its elements. It may have none.
    pub len: usize,
    /// Where it begins among the values.
    pub values: usize,
    /// Where it begins among the gradients.
    pub gradients: usize,
    /// Where it begins in the buffer of each of its states.
    pub states: usize,
    /// Where it begins in the copy, if there is one.
    pub copy: usize,
}

/// Updates `rows` in place: values, states, and the copy of the values.
///
/// All rows of one rule share a launch, however many they are and whatever their hyper-parameters; elements that don't fill a
/// vector at the same place of every buffer share a second one. The launches are queued; nothing waits for them.
///
/// # Numbers
///
/// They are those of [`HostOptimizer::update`], from the same coefficients, worked out in the same order and type. Where they
/// may differ is in what devices don't promise: a GPU's quotients and roots may be a few units in the last place off, and
/// numbers below 2^-126 may count as 0. Products are rounded together with their sums; on a device whose `fma` does not do
/// that, through `f64`, which rounds twice in one of 2^29 cases; on one that has neither, products are rounded, too.
///
/// # Errors
///
/// [`KernelError`] says which row, buffer or number does not fit; nothing has been launched then.
pub fn update(client: &Client, rows: &[UpdateRow], buffers: &UpdateBuffers) -> Result<(), KernelError> {
    let bound = BoundBuffers::new(client, buffers)?;
    let width = launch::width(client);
    let mut plans: Vec<_> = Kind::ALL.into_iter().map(|kind| (kind, Tables::default())).collect();
    check(rows, buffers)?;
    for (index, row) in rows.iter().enumerate() {
        let coefficients = row
            .optimizer
            .coefficients(row.update)
            .map_err(|source| KernelError::Update { row: index, source })?;
        let (kind, numbers) = rule::numbers(&coefficients).ok_or(KernelError::Optimizer { row: index })?;
        let tables = plans.iter_mut().filter(|plan| plan.0 == kind).map(|plan| &mut plan.1);
        tables.for_each(|tables| tables.push(kind, &bound, row, numbers, width));
    }
    plans.retain(|(_, tables)| !(tables.vectors.is_empty() && tables.singles.is_empty()));
    if plans.is_empty() {
        return Ok(());
    }
    let fusion = Fusion::of(client)?;
    // All sizes before the first launch, so that an error leaves everything as it was.
    let mut launches = Vec::new();
    let dim = launch::cube(client);
    let units = dim.num_elems();
    for (kind, tables) in &plans {
        let plan = Plan {
            kind: *kind,
            fusion,
            plane: launch::plane(client),
            gradients: bound.gradients.format,
            first: bound.states.first().map_or(Format::F32, |state| state.format),
            second: bound.states.get(1).map_or(Format::F32, |state| state.format),
            copy: bound.copy.as_ref().map(|copy| copy.format),
        };
        for (table, width) in [(&tables.vectors, width), (&tables.singles, 1)] {
            if !table.is_empty() {
                let turns = launch::turns(client, table.total(), units, TURNS);
                let rows = table.lay((units * turns) as usize);
                launches.push((plan, width, turns, launch::cubes(client, rows.parts)?, rows));
            }
        }
    }
    for (plan, width, turns, count, rows) in launches {
        bound.launch(client, plan, width, turns, (count, dim), &rows);
    }
    Ok(())
}

/// The most vectors that a unit updates.
const TURNS: u32 = 16;

/// Buffers and rows, before anything is made of them.
fn check(rows: &[UpdateRow], buffers: &UpdateBuffers) -> Result<(), KernelError> {
    let mut extents = Vec::with_capacity(rows.len() * 5);
    for (index, row) in rows.iter().enumerate() {
        let needed = row.optimizer.states().len();
        let given = buffers.states.len();
        if needed > given {
            return Err(KernelError::States { row: index, needed, given });
        }
        let mut check = |role, buffer: &Buffer, start| {
            buffer.check_row(role, index, start, row.len)?;
            extents.push(buffer.extent(role, index, start, row.len, role != Role::Gradients));
            Ok(())
        };
        check(Role::Values, &buffers.values, row.values)?;
        check(Role::Gradients, &buffers.gradients, row.gradients)?;
        for (state, buffer) in buffers.states[..needed].iter().enumerate() {
            check(Role::State(state), buffer, row.states)?;
        }
        if let Some(copy) = &buffers.copy {
            check(Role::Copy, copy, row.copy)?;
        }
    }
    table::check_apart(extents)
}

/// Fields of a row's table entry: where its parts begin, its length, where it begins in the five buffers, its numbers.
const FIELDS: usize = 7 + NUMBERS;

/// The rows of one rule.
#[derive(Default)]
struct Tables {
    /// Counted in vectors.
    vectors: Table<FIELDS>,
    /// Counted in elements.
    singles: Table<FIELDS>,
}

impl Tables {
    fn push(
        &mut self,
        kind: Kind,
        buffers: &BoundBuffers,
        row: &UpdateRow,
        numbers: [u32; NUMBERS],
        width: usize,
    ) {
        let state = |index: usize| (index < kind.states()).then(|| buffers.states[index].shift + row.states);
        let starts = [
            Some(buffers.values.shift + row.values),
            Some(buffers.gradients.shift + row.gradients),
            state(0),
            state(1),
            buffers.copy.as_ref().map(|copy| copy.shift + row.copy),
        ];
        let cut = Cut::new(row.len, width, starts.into_iter().flatten());
        let push = |table: &mut Table<FIELDS>, len: usize, at: usize, unit: usize| {
            let mut fields = [0; FIELDS];
            fields[1] = len as u32;
            for (field, start) in fields[2..7].iter_mut().zip(starts) {
                *field = start.map_or(0, |start| ((start + at) / unit) as u32);
            }
            fields[7..].copy_from_slice(&numbers);
            table.push(len, fields);
        };
        push(&mut self.vectors, cut.vectors, cut.head, width);
        push(&mut self.singles, cut.head, 0, 1);
        push(&mut self.singles, cut.tail, cut.tail_at(width), 1);
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    kind: Kind,
    fusion: Fusion,
    plane: u32,
    gradients: Format,
    first: Format,
    second: Format,
    copy: Option<Format>,
}

/// The buffers as kernels see them.
struct BoundBuffers {
    values: Bound,
    gradients: Bound,
    states: Vec<Bound>,
    copy: Option<Bound>,
    /// What stands for a buffer that there is none of.
    none: Handle,
}

impl BoundBuffers {
    fn new(client: &Client, buffers: &UpdateBuffers) -> Result<Self, KernelError> {
        let of = |role, buffer: &Buffer, types: &[DType], allowed| {
            if !types.contains(&buffer.dtype()) {
                return Err(KernelError::RoleType { role, dtype: buffer.dtype(), allowed });
            }
            buffer.bind(client, role)
        };
        let values = of(Role::Values, &buffers.values, &[DType::F32], "f32")?;
        let gradients = buffers.gradients.bind(client, Role::Gradients)?;
        let states = buffers.states.iter().enumerate().map(|(state, buffer)| {
            // Squares of gradients leave the range of f16.
            of(Role::State(state), buffer, &[DType::F32, DType::BF16], "f32 or bf16")
        });
        let states = states.collect::<Result<_, _>>()?;
        let copy = buffers.copy.as_ref().map(|copy| copy.bind(client, Role::Copy)).transpose()?;
        Ok(Self { values, gradients, states, copy, none: client.empty(16) })
    }

    fn launch(
        &self,
        client: &Client,
        plan: Plan,
        width: usize,
        turns: u32,
        (count, dim): (CubeCount, CubeDim),
        rows: &Laid,
    ) {
        let table = rows.upload(client);
        let state = |index: usize| match self.states.get(index) {
            Some(state) if index < plan.kind.states() => state.argument(),
            _ => argument(&self.none),
        };
        let copy = self.copy.as_ref().map_or_else(|| argument(&self.none), Bound::argument);
        let cubes = rows.parts as u32;
        // SAFETY: units touch what the rows of the table name, which `check` found within the buffers, and nothing in the
        // buffers that stand for none.
        unsafe {
            if width > 1 {
                update_vectors::launch_unchecked(
                    client,
                    count,
                    dim,
                    width,
                    plan.gradients.words(width),
                    plan.first.words(width),
                    plan.second.words(width),
                    plan.copy.unwrap_or(Format::F32).words(width),
                    argument(&table),
                    self.values.argument(),
                    self.gradients.argument(),
                    state(0),
                    state(1),
                    copy,
                    rows.rows,
                    cubes,
                    turns,
                    plan,
                );
            } else {
                update_singles::launch_unchecked(
                    client,
                    count,
                    dim,
                    argument(&table),
                    self.values.argument(),
                    self.gradients.argument(),
                    state(0),
                    state(1),
                    copy,
                    rows.rows,
                    cubes,
                    turns,
                    plan,
                );
            }
        }
    }
}

/// A cube updates vectors of one row, a unit one in each turn.
#[cube(launch_unchecked)]
fn update_vectors<N: Size, G: Size, A: Size, B: Size, C: Size>(
    table: &[u32],
    values: &mut [Vector<u32, N>],
    gradients: &[Vector<u32, G>],
    firsts: &mut [Vector<u32, A>],
    seconds: &mut [Vector<u32, B>],
    copy: &mut [Vector<u32, C>],
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
    let values_from = table[(row + 2) as usize];
    let gradients_from = table[(row + 3) as usize];
    let firsts_from = table[(row + 4) as usize];
    let seconds_from = table[(row + 5) as usize];
    let copy_from = table[(row + 6) as usize];
    let numbers = Numbers::<N>::read(table, row + 7);
    let mut at = first_turn(cube - table[row as usize], turns, plan.plane);
    for _ in 0..turns {
        if at < len {
            let value_at = (values_from + at) as usize;
            let gradient_at = (gradients_from + at) as usize;
            let first_at = (firsts_from + at) as usize;
            let second_at = (seconds_from + at) as usize;
            let value = Vector::<f32, N>::reinterpret(values[value_at]);
            let gradient = unpack::<N, G>(gradients[gradient_at], plan.gradients);
            let mut first = Vector::<f32, N>::new(0.0);
            let mut second = Vector::<f32, N>::new(0.0);
            if comptime!(plan.kind.states() > 0) {
                first = unpack::<N, A>(firsts[first_at], plan.first);
            }
            if comptime!(plan.kind.states() > 1) {
                second = unpack::<N, B>(seconds[second_at], plan.second);
            }
            let (value, first, second) =
                rule::step::<N>(&numbers, value, gradient, first, second, plan.kind, plan.fusion);
            values[value_at] = Vector::<u32, N>::reinterpret(value);
            if comptime!(plan.kind.states() > 0) {
                firsts[first_at] = pack::<N, A>(first, plan.first);
            }
            if comptime!(plan.kind.states() > 1) {
                seconds[second_at] = pack::<N, B>(second, plan.second);
            }
            if comptime!(plan.copy.is_some()) {
                let copy_at = (copy_from + at) as usize;
                copy[copy_at] = pack::<N, C>(value, comptime!(plan.copy.unwrap_or(Format::F32)));
            }
        }
        at += plan.plane;
    }
}

/// A cube updates elements of one row, a unit one in each turn. Two may share a word of 16-bit elements, hence those are
/// changed atomically.
#[cube(launch_unchecked)]
fn update_singles(
    table: &[u32],
    values: &mut [u32],
    gradients: &[u32],
    firsts: &[Atomic<u32>],
    seconds: &[Atomic<u32>],
    copy: &[Atomic<u32>],
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
    let values_from = table[(row + 2) as usize];
    let gradients_from = table[(row + 3) as usize];
    let firsts_from = table[(row + 4) as usize];
    let seconds_from = table[(row + 5) as usize];
    let copy_from = table[(row + 6) as usize];
    let numbers = Numbers::<Const<1>>::read(table, row + 7);
    let mut at = first_turn(cube - table[row as usize], turns, plan.plane);
    for _ in 0..turns {
        if at < len {
            let value_at = (values_from + at) as usize;
            let gradient_at = gradients_from + at;
            let first_at = firsts_from + at;
            let second_at = seconds_from + at;
            let value = Vector::<f32, Const<1>>::new(f32::reinterpret(values[value_at]));
            let gradient = Vector::<f32, Const<1>>::new(get(gradients, gradient_at, plan.gradients));
            let mut first = Vector::<f32, Const<1>>::new(0.0);
            let mut second = Vector::<f32, Const<1>>::new(0.0);
            if comptime!(plan.kind.states() > 0) {
                first = Vector::new(get_shared(firsts, first_at, plan.first));
            }
            if comptime!(plan.kind.states() > 1) {
                second = Vector::new(get_shared(seconds, second_at, plan.second));
            }
            let (value, first, second) =
                rule::step::<Const<1>>(&numbers, value, gradient, first, second, plan.kind, plan.fusion);
            values[value_at] = u32::reinterpret(value.extract(0usize));
            if comptime!(plan.kind.states() > 0) {
                set_shared(firsts, first_at, first.extract(0usize), plan.first);
            }
            if comptime!(plan.kind.states() > 1) {
                set_shared(seconds, second_at, second.extract(0usize), plan.second);
            }
            if comptime!(plan.copy.is_some()) {
                let copy_at = copy_from + at;
                let format = comptime!(plan.copy.unwrap_or(Format::F32));
                set_shared(copy, copy_at, value.extract(0usize), format);
            }
        }
        at += plan.plane;
    }
}
