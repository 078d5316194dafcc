//! Chunks of files, read ahead by threads of their own and handed over in order.

use std::ops::Range;
use std::sync::mpsc;
use std::thread;

use zero_core::{Bytes, DType};

use crate::error::CheckpointError;
use crate::load::checkpoint::Checkpoint;
use crate::manifest::TensorRecord;
use crate::memory::Memory;

/// The most threads that read: what keeps a fast disk busy.
const READERS: u64 = 8;
/// How many buffers there are, if they hold a chunk each: one being read into and one handed over, for each of them.
const BUFFERS: u64 = 2 * READERS;
/// The most that is read at once.
const BLOCK: u64 = 2 << 20;

/// Elements that lie together in a file and go to one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) file: usize,
    /// In the file, in bytes.
    pub(crate) bytes: Range<u64>,
    pub(crate) dtype: DType,
    /// Who wants it.
    pub(crate) target: usize,
    /// The first element, counted from the target's first.
    pub(crate) first: usize,
}

impl Segment {
    /// The segments that hold the elements `range` of a tensor, in element order.
    pub(crate) fn of(
        tensor: &TensorRecord,
        range: &Range<usize>,
        target: usize,
    ) -> impl Iterator<Item = Self> {
        let size = tensor.dtype.size() as u64;
        let first = tensor.pieces.partition_point(|piece| piece.end <= range.start);
        let pieces = tensor.pieces[first..].iter().take_while(|piece| piece.start < range.end);
        pieces.filter(|_| !range.is_empty()).map(move |piece| {
            let (start, end) = (piece.start.max(range.start), piece.end.min(range.end));
            let offset = piece.offset + (start - piece.start) as u64 * size;
            Self {
                file: piece.file,
                bytes: offset..offset + (end - start) as u64 * size,
                dtype: tensor.dtype,
                target,
                first: start - range.start,
            }
        })
    }
}

/// Chunks of a file that are read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) file: usize,
    pub(crate) chunks: Range<usize>,
}

impl Block {
    /// The bytes of the file that it is.
    pub(crate) fn bytes(&self, checkpoint: &Checkpoint) -> Range<u64> {
        let manifest = checkpoint.manifest();
        let start = self.chunks.start as u64 * manifest.chunk_bytes;
        let end = self.chunks.end as u64 * manifest.chunk_bytes;
        start..end.min(manifest.files[self.file].bytes)
    }

    /// Cuts runs of chunks into blocks of at most `bytes`.
    pub(crate) fn cut(runs: impl IntoIterator<Item = Self>, bytes: usize, chunk: u64) -> Vec<Self> {
        let most = (bytes as u64 / chunk).max(1) as usize;
        let cut = |run: Self| {
            let starts = run.chunks.clone().step_by(most);
            starts.map(move |start| Self { file: run.file, chunks: start..run.chunks.end.min(start + most) })
        };
        runs.into_iter().flat_map(cut).collect()
    }

    /// The chunks that segments touch, in their order; chunks that follow each other are one run.
    pub(crate) fn touched(segments: &[Segment], chunk: u64) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for segment in segments {
            let chunks = (segment.bytes.start / chunk) as usize..segment.bytes.end.div_ceil(chunk) as usize;
            match runs.last_mut() {
                Some(last)
                    if last.file == segment.file
                        && last.chunks.start <= chunks.start
                        && chunks.start <= last.chunks.end =>
                {
                    last.chunks.end = last.chunks.end.max(chunks.end);
                }
                _ => runs.push(Self { file: segment.file, chunks }),
            }
        }
        runs
    }
}

/// The memory that reading takes, in parts of one length.
pub(crate) struct Buffers {
    memory: Memory,
    each: usize,
}

impl Buffers {
    /// At most `budget` bytes, for chunks of this length.
    pub(crate) fn new(budget: Bytes, chunk: u64) -> Result<Self, CheckpointError> {
        let least = Bytes::new(2 * chunk);
        if budget.get() < least.get() {
            return Err(CheckpointError::BufferTooSmall { bytes: budget, least });
        }
        let each = (budget.get() / BUFFERS).clamp(chunk, BLOCK.max(chunk)) / chunk * chunk;
        let bytes = (budget.get() / each).min(BUFFERS) * each;
        let memory = Memory::zeroed(bytes as usize).ok_or(CheckpointError::NoMemory { bytes })?;
        Ok(Self { memory, each: each as usize })
    }

    /// The length of each, in bytes.
    pub(crate) fn each(&self) -> usize {
        self.each
    }

    /// Two of them: there are at least as many.
    pub(crate) fn two(&mut self) -> (&mut [u8], &mut [u8]) {
        let (first, rest) = self.memory.split_at_mut(self.each);
        (first, &mut rest[..self.each])
    }
}

/// Reads blocks, checks them and hands them over in order. None is longer than a buffer.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    blocks: &[Block],
    buffers: &mut Buffers,
    mut take: impl FnMut(&Block, &[u8]) -> Result<(), CheckpointError>,
) -> Result<u64, CheckpointError> {
    let readers = (buffers.memory.len() / buffers.each).div_ceil(2).min(blocks.len().max(1));
    let mut bytes_read = 0;
    thread::scope(|scope| {
        let mut lanes = Vec::new();
        let mut channels = Vec::new();
        for _ in 0..readers {
            let (full, ready) = mpsc::channel();
            let (empty, to_fill) = mpsc::channel::<&mut [u8]>();
            lanes.push((ready, empty));
            channels.push((full, to_fill));
        }
        for (index, buffer) in buffers.memory.chunks_exact_mut(buffers.each).enumerate() {
            // The other end is here.
            let _ = lanes[index % readers].1.send(buffer);
        }
        for (lane, (full, to_fill)) in channels.into_iter().enumerate() {
            scope.spawn(move || {
                for block in blocks.iter().skip(lane).step_by(readers) {
                    // Nobody waits for a reader any more when something has failed.
                    let Ok(buffer) = to_fill.recv() else { return };
                    let range = block.bytes(checkpoint);
                    let len = (range.end - range.start) as usize;
                    let done = checkpoint.read_chunks(block.file, block.chunks.start, &mut buffer[..len]);
                    if full.send((buffer, len, done)).is_err() {
                        return;
                    }
                }
            });
        }
        for (index, block) in blocks.iter().enumerate() {
            let (ready, empty) = &lanes[index % readers];
            let Ok((buffer, len, done)) = ready.recv() else { return Err(CheckpointError::WorkerGone) };
            done?;
            take(block, &buffer[..len])?;
            bytes_read += len as u64;
            let _ = empty.send(buffer);
        }
        Ok(bytes_read)
    })
}

#[cfg(test)]
mod tests {
    use zero_core::DType;

    use super::{Block, Segment};

    fn segment(file: usize, bytes: std::ops::Range<u64>) -> Segment {
        Segment { file, bytes, dtype: DType::U8, target: 0, first: 0 }
    }

    #[test]
    fn touched_chunks_that_follow_each_other_are_one_run() {
        let segments =
            [segment(0, 5..9), segment(0, 9..10), segment(0, 31..33), segment(1, 0..10), segment(1, 10..20)];
        let run = |file, chunks| Block { file, chunks };
        let runs = Block::touched(&segments, 10);
        assert_eq!(runs, [run(0, 0..1), run(0, 3..4), run(1, 0..2)]);
        assert_eq!(Block::cut(runs, 10, 10), [run(0, 0..1), run(0, 3..4), run(1, 0..1), run(1, 1..2)]);
    }
}
