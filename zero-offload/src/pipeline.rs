//! Updates of what is in a store, piece by piece: read the next, update this, write the last.

use std::collections::VecDeque;
use std::ops::Range;

use zero_core::Bytes;

use crate::circle::Circle;
use crate::memory::{Memory, PAGE};
use crate::store::{Batch, Engine, NvmeStore, Queue, Span, Staged, StoreError, new_queue};
use crate::table::{Column, Table};

/// How many tiles the buffers hold, of tables that are not cut finer than they can be: one that is updated, and
/// enough before and after it for the disk never to wait.
const TILES: usize = 8;
/// The least: one that is read, one that is updated, one that is written.
const LEAST_TILES: usize = 3;

/// Updates tables that are larger than memory, in tiles that pass through a fixed amount of it.
///
/// While one tile is updated the next ones are read and the last ones written. The buffers are allocated once, of
/// the size that is allowed, in whole pages; all else that grows with the tables is some bytes for each block.
///
/// ```
/// use zero_core::Bytes;
/// use zero_offload::{NvmeStore, Pipeline, StoreError, StoreOptions, Table};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// let mut options = StoreOptions::new(directory.path());
/// options.block = Bytes::new(4096);
/// let store = NvmeStore::open(options)?;
/// let mut tables = [Table::reserve(&store, "layers.0.weight", 5000, &[("count", 8), ("half", 2)])?];
///
/// let mut pipeline = Pipeline::new(&store, Bytes::new(64 << 10))?;
/// let mut rows = 0;
/// pipeline.update(&mut tables, |tile| {
///     for (row, count) in tile.rows.clone().zip(bytemuck::cast_slice_mut::<u8, u64>(tile.columns[0])) {
///         *count += row;
///     }
///     rows += tile.rows.end - tile.rows.start;
///     Ok::<_, StoreError>(())
/// })?;
///
/// assert_eq!(rows, 5000);
/// let mut last = [0; 8];
/// tables[0].column(0).unwrap().read(4999 * 8, &mut last)?;
/// assert_eq!(u64::from_ne_bytes(last), 4999);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pipeline {
    // Dropped first: it ends all transfers.
    queue: Queue,
    all: Span,
    /// Owns what `all` spans.
    _memory: Memory,
}

/// Some rows of one table, in memory.
#[derive(Debug)]
pub struct Tile<'a> {
    /// Which of the tables.
    pub table: usize,
    /// Which of its rows.
    pub rows: Range<u64>,
    /// These rows of each column, on page boundaries; what they hold afterwards is written.
    pub columns: Vec<&'a mut [u8]>,
}

/// An update that is on the disk beside what it replaces.
#[derive(Debug)]
#[must_use = "tables change when it is committed"]
pub struct StagedUpdate {
    tables: Vec<Table>,
    /// By table and column.
    staged: Vec<Vec<Staged>>,
}

impl StagedUpdate {
    /// The tables, changed.
    pub fn commit(self) -> Vec<Table> {
        let Self { mut tables, staged } = self;
        commit(&mut tables, staged);
        tables
    }

    /// The tables, as they were.
    pub fn discard(self) -> Vec<Table> {
        self.tables
    }
}

fn commit(tables: &mut [Table], staged: Vec<Vec<Staged>>) {
    for (table, staged) in tables.iter_mut().zip(staged) {
        for (column, staged) in table.columns_mut().iter_mut().zip(staged) {
            column.slot.commit(staged);
        }
    }
}

impl Pipeline {
    /// A pipeline with up to `budget` of buffers, in whole pages.
    ///
    /// # Errors
    ///
    /// If the memory, the threads or the ring cannot be had. What the budget does not suffice for is told by
    /// [`update`](Self::update).
    pub fn new(store: &NvmeStore, budget: Bytes) -> Result<Self, StoreError> {
        Self::with_queue(store, budget, new_queue)
    }

    /// The same over another queue, for tests.
    pub(crate) fn with_queue(
        store: &NvmeStore,
        budget: Bytes,
        make: impl FnOnce(Engine, usize, Span) -> Result<(Queue, Engine), StoreError>,
    ) -> Result<Self, StoreError> {
        let pages = usize::try_from(budget.get()).ok().and_then(|bytes| Memory::pages(bytes - bytes % PAGE));
        let mut memory = pages.ok_or(StoreError::NoMemory { wanted: budget })?;
        let all = Span::of_mut(memory.bytes_mut());
        let (queue, _) = make(store.engine(), store.inner.depth, all)?;
        Ok(Self { queue, all, _memory: memory })
    }

    /// How much memory the buffers are.
    pub fn buffers(&self) -> Bytes {
        Bytes::new(self.all.len() as u64)
    }

    /// Passes all the tables through `each`, tile by tile in order, and writes what it makes of them.
    ///
    /// Tables change as one: if anything fails, or `each` panics, all of them are what they were before.
    ///
    /// # Errors
    ///
    /// What `each` returns; [`StoreError::Budget`] before anything is read if a table needs more buffers;
    /// [`StoreError::Busy`] while a column is being read; and when reading or writing fails.
    pub fn update<E: From<StoreError>>(
        &mut self,
        tables: &mut [Table],
        each: impl FnMut(&mut Tile<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let staged = self.pass(tables, each)?;
        commit(tables, staged);
        Ok(())
    }

    /// As [`update`](Self::update), but the tables only change when the result is committed: for updates that have to
    /// succeed in several places or in none.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), and the tables as they were.
    pub fn stage<E: From<StoreError>>(
        &mut self,
        tables: Vec<Table>,
        each: impl FnMut(&mut Tile<'_>) -> Result<(), E>,
    ) -> Result<StagedUpdate, (Vec<Table>, E)> {
        match self.pass(&tables, each) {
            Ok(staged) => Ok(StagedUpdate { tables, staged }),
            Err(error) => Err((tables, error)),
        }
    }

    /// Passes all the tables through `each` and writes what comes of it beside what is there: by table and column.
    fn pass<E: From<StoreError>>(
        &mut self,
        tables: &[Table],
        mut each: impl FnMut(&mut Tile<'_>) -> Result<(), E>,
    ) -> Result<Vec<Vec<Staged>>, E> {
        let mut cuts = Vec::with_capacity(tables.len());
        for table in tables {
            table.columns().iter().try_for_each(|column| column.slot.check_not_read())?;
            cuts.push(self.cut(table)?);
        }
        let mut tiles = tables.iter().zip(cuts).enumerate().flat_map(|(table, (of, cut))| {
            let starts = (0..of.rows()).step_by(cut);
            starts.map(move |start| (table, start..of.rows().min(start.saturating_add(cut as u64))))
        });
        let mut staged: Vec<Vec<Staged>> =
            tables.iter().map(|table| table.columns().iter().map(|_| Staged::default()).collect()).collect();
        let mut circle = Circle::new(self.all.len());
        let mut next = tiles.next();
        let (mut reading, mut writing) = (VecDeque::new(), VecDeque::<Batch>::new());
        loop {
            while writing.front().is_some_and(Batch::is_done) {
                finish_oldest(&mut writing, &mut circle)?;
            }
            while let Some((table, rows)) = &next {
                let Some(memory) = circle.take(tile_bytes(&tables[*table], rows)) else { break };
                let place = Place {
                    table: *table,
                    rows: rows.clone(),
                    memory: self.all.part(memory.start, memory.len()),
                };
                reading.push_back((self.read(&tables[*table], &place), place));
                next = tiles.next();
            }
            if let Some((batch, place)) = reading.pop_front() {
                let table = &tables[place.table];
                batch.wait()?;
                place.update(table, &mut each)?;
                writing.push_back(self.write(table, &place, &mut staged[place.table]));
            } else if !writing.is_empty() {
                finish_oldest(&mut writing, &mut circle)?;
            } else {
                break;
            }
        }
        drop(tiles);
        Ok(staged)
    }

    /// How many rows of a table a tile has: blocks of all columns must end where it does.
    fn cut(&self, table: &Table) -> Result<usize, StoreError> {
        let budget = self.all.len();
        // Blocks are a power of two: the column whose width has the fewest factors of two needs the most rows.
        let rows = |column: &Column| {
            let block = column.slot.block();
            (block >> column.width.trailing_zeros().min(block.ilog2())).max(1)
        };
        let finest = table.columns().iter().map(rows).max().unwrap_or(PAGE);
        let bytes = tile_bytes(table, &(0..finest as u64));
        let least = bytes.min(tile_bytes(table, &(0..table.rows()))).saturating_mul(LEAST_TILES);
        if least > budget {
            let (table, budget, least) =
                (table.name().to_owned(), Bytes::new(budget as u64), Bytes::new(least as u64));
            return Err(StoreError::Budget { table, budget, least });
        }
        Ok(finest * (budget / TILES / bytes).max(1))
    }

    fn read(&self, table: &Table, place: &Place) -> Batch {
        let mut requests = Vec::new();
        for (Column { slot, .. }, blocks, memory) in place.parts(table) {
            // SAFETY: the tile's part of the buffers, which nobody else has while the tile is there.
            slot.zero_unwritten(blocks.clone(), unsafe { memory.bytes_mut() });
            requests.extend(slot.reads(blocks, memory));
        }
        // SAFETY: the memory is the pipeline's and nobody else's while the tile is there, which is until it is
        // written. The batch does not outlive `update`, whatever happens in it, and `update` borrows the pipeline.
        unsafe { self.queue.start(requests) }
    }

    fn write(&self, table: &Table, place: &Place, staged: &mut [Staged]) -> Batch {
        let mut requests = Vec::new();
        for ((Column { slot, .. }, blocks, memory), staged) in place.parts(table).zip(staged) {
            // SAFETY: as in `read`; the update of the tile is over.
            requests.extend(unsafe { slot.writes(blocks, memory, staged) });
        }
        // SAFETY: as in `read`.
        unsafe { self.queue.start(requests) }
    }
}

fn finish_oldest(writing: &mut VecDeque<Batch>, circle: &mut Circle) -> Result<(), StoreError> {
    if let Some(oldest) = writing.pop_front() {
        oldest.wait()?;
        // What is written first was read first, so it is the oldest piece.
        circle.give_back();
    }
    Ok(())
}

/// Bytes of the memory that rows of a table take: whole pages for each column, one at least.
fn tile_bytes(table: &Table, rows: &Range<u64>) -> usize {
    let bytes = table.columns().iter().map(|column| column_bytes(column.width, rows));
    bytes.fold(0, usize::saturating_add).max(PAGE)
}

fn column_bytes(width: usize, rows: &Range<u64>) -> usize {
    let bytes = usize::try_from(rows.end - rows.start).ok().and_then(|rows| rows.checked_mul(width));
    bytes.and_then(|bytes| bytes.checked_next_multiple_of(PAGE)).unwrap_or(usize::MAX)
}

/// Where a tile lies in the buffers.
struct Place {
    table: usize,
    rows: Range<u64>,
    memory: Span,
}

impl Place {
    /// Each column's blocks and the memory for them.
    fn parts<'a>(&self, table: &'a Table) -> impl Iterator<Item = (&'a Column, Range<usize>, Span)> {
        let mut offset = 0;
        table.columns().iter().map(move |column| {
            let (width, block) = (column.width as u64, column.slot.block() as u64);
            let blocks = self.rows.start * width / block..(self.rows.end * width).div_ceil(block);
            let bytes = column_bytes(column.width, &self.rows);
            let memory = self.memory.part(offset, bytes);
            offset += bytes;
            (column, blocks.start as usize..blocks.end as usize, memory)
        })
    }

    fn update<E>(
        &self,
        table: &Table,
        each: &mut impl FnMut(&mut Tile<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let rows = self.rows.end - self.rows.start;
        let columns = self.parts(table).map(|(column, _, memory)| {
            let memory = memory.part(0, (rows * column.width as u64) as usize);
            // SAFETY: the tile has been read, and alone has this part of the buffers; its columns lie apart.
            unsafe { memory.bytes_mut() }
        });
        each(&mut Tile { table: self.table, rows: self.rows.clone(), columns: columns.collect() })
    }
}
