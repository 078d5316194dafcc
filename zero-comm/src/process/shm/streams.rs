//! Bulk data between ranks of one host, through the rings of their hall.

use std::ops::Range;
use std::sync::atomic::Ordering;

use zero_core::DType;

use super::hall::{Hall, Progress};
use super::route::Kind;
use super::shape::WRITTEN;
use super::streaming;
use crate::process::plane::{Cast, Exchange, cut};
use crate::process::wait::Wait;
use crate::reduce::{self, TooNarrow};
use crate::{CommError, ReduceOp, lock};

/// What an operation receives goes past the caches if it is more than they would keep anyway.
const STREAMED_BYTES: usize = 4 << 20;

/// A chunk to write.
struct Chunk<'a> {
    bytes: &'a [u8],
    /// Whom to wake; all if `None`.
    reader: Option<usize>,
}

/// A chunk to read.
struct Sink<'a> {
    /// The how manieth chunk of the writer's stream it is.
    index: u64,
    bytes: &'a mut [u8],
}

impl Hall {
    /// Puts `mine` where `ranges` says for this seat, in everybody's `receive`.
    ///
    /// `ranges` has one range of `receive` per seat and is equal on all; `mine` is as long as this seat's.
    pub(crate) fn all_gather(
        &self,
        mine: &[u8],
        receive: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let size = self.shape.chunk_bytes;
        let totals: Vec<_> = ranges.iter().map(|range| range.len().div_ceil(size) as u64).collect();
        let chunks = mine.chunks(size).map(|bytes| Chunk { bytes, reader: None }).collect();
        let mut own = None;
        let mut sinks: Vec<Vec<Sink<'_>>> = ranges.iter().map(|_| Vec::new()).collect();
        for (seat, part) in cut(receive, ranges) {
            if seat == self.seat {
                own = Some(part);
            } else {
                sinks[seat] = indexed(part.chunks_mut(size));
            }
        }
        self.stream(chunks, own, sinks, &totals, wait)
    }

    /// Puts each seat's range of its `buffer` into everybody's.
    pub(crate) fn share(
        &self,
        buffer: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let size = self.shape.chunk_bytes;
        let totals: Vec<_> = ranges.iter().map(|range| range.len().div_ceil(size) as u64).collect();
        let mut chunks = Vec::new();
        let mut sinks: Vec<Vec<Sink<'_>>> = ranges.iter().map(|_| Vec::new()).collect();
        for (seat, part) in cut(buffer, ranges) {
            if seat == self.seat {
                chunks = part.chunks(size).map(|bytes| Chunk { bytes, reader: None }).collect();
            } else {
                sinks[seat] = indexed(part.chunks_mut(size));
            }
        }
        self.stream(chunks, None, sinks, &totals, wait)
    }

    /// Gives `root`'s bytes to all.
    pub(crate) fn broadcast(
        &self,
        root: usize,
        cast: Cast<'_>,
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let size = self.shape.chunk_bytes;
        let mut totals = vec![0; self.shape.seats];
        totals[root] = cast.len().div_ceil(size) as u64;
        let mut sinks: Vec<Vec<Sink<'_>>> = totals.iter().map(|_| Vec::new()).collect();
        let mut chunks = Vec::new();
        match cast {
            Cast::Give(bytes) => {
                chunks = bytes.chunks(size).map(|bytes| Chunk { bytes, reader: None }).collect();
            }
            Cast::Take(bytes) => sinks[root] = indexed(bytes.chunks_mut(size)),
        }
        self.stream(chunks, None, sinks, &totals, wait)
    }

    /// Gives each seat its range of `send`.
    pub(crate) fn all_to_all(
        &self,
        Exchange { send, out, receive, back, lengths }: Exchange<'_>,
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let size = self.shape.chunk_bytes;
        let chunks = self
            .dealt(self.seat, |reader| lengths(self.seat, reader))
            .map(|(reader, block)| Chunk {
                bytes: &send[out[reader].clone()][block_range(block, size, out[reader].len())],
                reader: Some(reader),
            })
            .collect();
        let mut totals = vec![0; self.shape.seats];
        let mut sinks: Vec<Vec<Sink<'_>>> = Vec::new();
        for (writer, part) in cut(receive, back) {
            if writer == self.seat {
                part.copy_from_slice(&send[out[writer].clone()]);
                totals[writer] = self.dealt(writer, |reader| lengths(writer, reader)).count() as u64;
                sinks.push(Vec::new());
                continue;
            }
            let mut blocks = part.chunks_mut(size);
            let mut mine = Vec::new();
            for (index, (reader, _)) in self.dealt(writer, |reader| lengths(writer, reader)).enumerate() {
                totals[writer] = index as u64 + 1;
                if reader == self.seat {
                    mine.extend(blocks.next().map(|bytes| Sink { index: index as u64, bytes }));
                }
            }
            sinks.push(mine);
        }
        self.stream(chunks, None, sinks, &totals, wait)
    }

    /// Reduces `send` over all seats, in their order, and gives each seat its range of the result.
    pub(crate) fn reduce_scatter(
        &self,
        (op, dtype): (ReduceOp, DType),
        send: &[u8],
        ranges: &[Range<usize>],
        receive: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        let own = &send[ranges[self.seat].clone()];
        let mut outcome = Ok(());
        self.reduce(send, ranges, wait, |_, block, sources| {
            let sources: Vec<_> =
                sources.iter().map(|source| source.unwrap_or(&own[block.clone()])).collect();
            outcome = outcome.and(reduce::into(op, dtype, &sources, &mut receive[block]));
            Ok(())
        })?;
        Ok(outcome)
    }

    /// Replaces this seat's range of `buffer` by the reduction over all seats, in their order.
    pub(crate) fn reduce_own(
        &self,
        (op, dtype): (ReduceOp, DType),
        buffer: &mut [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
    ) -> Result<Result<(), TooNarrow>, CommError> {
        let mine = ranges[self.seat].clone();
        let (before, rest) = buffer.split_at_mut(mine.start);
        let (own, after) = rest.split_at_mut(mine.len());
        // The own range is not sent, so the parts beside it are all there is to send.
        let part = |range: &Range<usize>| {
            if range.start < mine.start {
                &before[range.clone()]
            } else {
                &after[range.start - mine.end..range.end - mine.end]
            }
        };
        let sends = |seat: usize| if seat == self.seat { &[][..] } else { part(&ranges[seat]) };
        let mut outcome = Ok(());
        self.reduce_parts(&sends, ranges, wait, |_, block, sources| {
            outcome = outcome.and(reduce::into_own(op, dtype, sources, &mut own[block]));
            Ok(())
        })?;
        Ok(outcome)
    }

    /// Lets `act` of the first seat see each block of `send`, with what each seat has for it, in order of
    /// seats; `None` for the first itself. Blocks come in order.
    pub(crate) fn collect(
        &self,
        send: &[u8],
        wait: &mut Wait<'_>,
        act: impl FnMut(&mut Wait<'_>, Range<usize>, &[Option<&[u8]>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut ranges = vec![send.len()..send.len(); self.shape.seats];
        ranges[0] = 0..send.len();
        self.reduce(send, &ranges, wait, act)
    }

    fn reduce(
        &self,
        send: &[u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
        act: impl FnMut(&mut Wait<'_>, Range<usize>, &[Option<&[u8]>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.reduce_parts(&|seat| &send[ranges[seat].clone()], ranges, wait, act)
    }

    /// Sends every other seat its part, and lets `act` see each block of this seat's range, with what each
    /// seat has for it; `None` for this one.
    fn reduce_parts<'a>(
        &self,
        part: &dyn Fn(usize) -> &'a [u8],
        ranges: &[Range<usize>],
        wait: &mut Wait<'_>,
        mut act: impl FnMut(&mut Wait<'_>, Range<usize>, &[Option<&[u8]>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut progress = lock(&self.progress);
        let size = self.shape.chunk_bytes;
        let length =
            |writer: usize| move |reader: usize| if reader == writer { 0 } else { ranges[reader].len() };
        let mut chunks = self.dealt(self.seat, length(self.seat)).map(|(reader, block)| Chunk {
            bytes: &part(reader)[block_range(block, size, ranges[reader].len())],
            reader: Some(reader),
        });
        let mut waiting = chunks.next();
        let mut written = progress.chunks[self.seat];
        // Where the chunks for this seat are in each writer's stream.
        let mut totals = vec![0; self.shape.seats];
        let mut places: Vec<Vec<u64>> = Vec::with_capacity(self.shape.seats);
        for (writer, total) in totals.iter_mut().enumerate() {
            let mut mine = Vec::new();
            for (index, (reader, _)) in self.dealt(writer, length(writer)).enumerate() {
                *total += 1;
                if reader == self.seat {
                    mine.push(progress.chunks[writer] + index as u64);
                }
            }
            places.push(mine);
        }
        let trip = self.depart(&mut progress, Kind { reduces: true, chunks: totals.iter().sum() });
        let whole = ranges[self.seat].len();
        let blocks = whole.div_ceil(size);
        let mut block = 0;
        self.pass_over(&places, 0, &progress, &totals);
        let there = |writer: usize, block: usize| {
            self.counter(writer, WRITTEN).load(Ordering::Acquire) > places[writer][block]
        };
        while waiting.is_some() || block < blocks {
            let mut moved = false;
            if let Some(chunk) = waiting.take_if(|_| self.has_space(written)) {
                self.write(written, chunk.bytes, chunk.reader);
                written += 1;
                waiting = chunks.next();
                moved = true;
            }
            if block < blocks && self.others().all(|writer| there(writer, block)) {
                let range = block_range(block, size, whole);
                let sources: Vec<_> = (0..self.shape.seats)
                    .map(|writer| {
                        // SAFETY: the writer has filled the chunk and leaves it alone until it is passed over.
                        (writer != self.seat)
                            .then(|| unsafe { self.chunk(writer, places[writer][block], range.len()) })
                    })
                    .collect();
                act(wait, range, &sources)?;
                block += 1;
                self.pass_over(&places, block, &progress, &totals);
                moved = true;
            }
            if moved {
                wait.progressed();
                continue;
            }
            self.wait(
                wait,
                || {
                    (waiting.is_some() && self.has_space(written))
                        || (block < blocks && self.others().all(|writer| there(writer, block)))
                },
                || {
                    let missing = |seat: &usize| {
                        (waiting.is_some() && !self.has_read(*seat, written))
                            || (block < blocks && !there(*seat, block))
                    };
                    self.others().filter(missing).collect()
                },
            )?;
        }
        progress.end(&totals, trip);
        Ok(())
    }

    /// Tells every writer that this seat needs nothing before its `block`-th own chunk.
    fn pass_over(&self, places: &[Vec<u64>], block: usize, progress: &Progress, totals: &[u64]) {
        for writer in self.others() {
            let next = places[writer].get(block).copied();
            self.set_read(writer, next.unwrap_or(progress.chunks[writer] + totals[writer]));
        }
    }

    /// Writes `chunks` to this seat's ring, copies them to `own` too, and fills the sinks, which are by
    /// writer; `totals` is how many chunks each seat writes.
    fn stream(
        &self,
        chunks: Vec<Chunk<'_>>,
        own: Option<&mut [u8]>,
        sinks: Vec<Vec<Sink<'_>>>,
        totals: &[u64],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError> {
        let mut progress = lock(&self.progress);
        let received: usize = sinks.iter().flatten().map(|sink| sink.bytes.len()).sum();
        let copy = if received >= STREAMED_BYTES { streaming::copy } else { <[u8]>::copy_from_slice };
        let trip = self.depart(&mut progress, Kind { reduces: false, chunks: totals.iter().sum() });
        let bases = progress.chunks.clone();
        let mut written = bases[self.seat];
        let mut chunks = chunks.into_iter();
        let mut waiting = chunks.next();
        let mut own = own.map(|own| own.chunks_mut(self.shape.chunk_bytes));
        let mut sinks: Vec<_> = sinks.into_iter().map(|sinks| sinks.into_iter().peekable()).collect();
        for writer in self.others() {
            let first = sinks[writer].peek().map_or(totals[writer], |sink| sink.index);
            self.set_read(writer, bases[writer] + first);
        }
        loop {
            let mut moved = false;
            if let Some(chunk) = waiting.take_if(|_| self.has_space(written)) {
                self.write(written, chunk.bytes, chunk.reader);
                if let Some(own) = own.as_mut().and_then(Iterator::next) {
                    copy(own, chunk.bytes);
                }
                written += 1;
                waiting = chunks.next();
                moved = true;
            }
            for writer in self.others() {
                let sinks = &mut sinks[writer];
                let available = self.counter(writer, WRITTEN).load(Ordering::Acquire);
                if let Some(sink) = sinks.next_if(|sink| bases[writer] + sink.index < available) {
                    let index = bases[writer] + sink.index;
                    // SAFETY: the writer has filled the chunk and leaves it alone until `set_read`.
                    copy(sink.bytes, unsafe { self.chunk(writer, index, sink.bytes.len()) });
                    let next = sinks.peek().map_or(totals[writer], |sink| sink.index);
                    self.set_read(writer, bases[writer] + next);
                    moved = true;
                }
            }
            if moved {
                wait.progressed();
                continue;
            }
            let wanted: Vec<Option<u64>> = sinks
                .iter_mut()
                .zip(&bases)
                .map(|(sinks, base)| sinks.peek().map(|sink| base + sink.index))
                .collect();
            if waiting.is_none() && wanted.iter().all(Option::is_none) {
                break;
            }
            let there = |seat: usize| {
                wanted[seat].map(|index| self.counter(seat, WRITTEN).load(Ordering::Acquire) > index)
            };
            self.wait(
                wait,
                || {
                    (waiting.is_some() && self.has_space(written))
                        || self.others().any(|seat| there(seat) == Some(true))
                },
                || {
                    let missing = |seat: &usize| {
                        there(*seat) == Some(false) || (waiting.is_some() && !self.has_read(*seat, written))
                    };
                    self.others().filter(missing).collect()
                },
            )?;
        }
        progress.end(totals, trip);
        Ok(())
    }

    /// Which chunks `writer` writes when it has `length(reader)` bytes for each reader: (reader, block) in
    /// turn, beginning with the seat after its own, so that not all write to one seat at once.
    fn dealt(
        &self,
        writer: usize,
        length: impl Fn(usize) -> usize + Copy,
    ) -> impl Iterator<Item = (usize, usize)> {
        let (seats, size) = (self.shape.seats, self.shape.chunk_bytes);
        let readers = move || (1..seats).map(move |step| (writer + step) % seats);
        let most = readers().map(|reader| length(reader).div_ceil(size)).max().unwrap_or(0);
        (0..most).flat_map(move |block| {
            readers().filter(move |reader| block * size < length(*reader)).map(move |reader| (reader, block))
        })
    }
}

fn block_range(block: usize, size: usize, length: usize) -> Range<usize> {
    block * size..length.min((block + 1) * size)
}

fn indexed<'a>(blocks: impl Iterator<Item = &'a mut [u8]>) -> Vec<Sink<'a>> {
    blocks.enumerate().map(|(index, bytes)| Sink { index: index as u64, bytes }).collect()
}
