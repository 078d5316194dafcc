//! A checkpoint's bytes in any order, through the memory of one chunk.

use std::ops::Range;

use crate::error::CheckpointError;
use crate::load::{Checkpoint, Segment};
use crate::manifest::TensorRecord;
use crate::memory::Memory;

/// Reads and checks chunks as they are needed, and keeps the last one: in file order, each is read once.
pub(crate) struct VerifiedReader<'c> {
    checkpoint: &'c Checkpoint,
    memory: Memory,
    loaded: Option<(usize, usize)>,
    /// Bytes read so far.
    pub(crate) bytes_read: u64,
}

impl<'c> VerifiedReader<'c> {
    pub(crate) fn new(checkpoint: &'c Checkpoint) -> Result<Self, CheckpointError> {
        let bytes = checkpoint.manifest().chunk_bytes;
        let memory = Memory::zeroed(bytes as usize).ok_or(CheckpointError::NoMemory { bytes })?;
        Ok(Self { checkpoint, memory, loaded: None, bytes_read: 0 })
    }

    /// Fills `into` with the elements `range` of a tensor.
    pub(crate) fn read(
        &mut self,
        tensor: &TensorRecord,
        range: Range<usize>,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let mut rest = into;
        for segment in Segment::of(tensor, &range, 0) {
            let (part, later) = rest.split_at_mut((segment.bytes.end - segment.bytes.start) as usize);
            self.read_bytes(segment.file, segment.bytes.start, part)?;
            rest = later;
        }
        Ok(())
    }

    fn read_bytes(&mut self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), CheckpointError> {
        let chunk_bytes = self.checkpoint.manifest().chunk_bytes;
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let chunk = (at / chunk_bytes) as usize;
            let within = (at % chunk_bytes) as usize;
            let content = self.chunk(file, chunk)?;
            let length = (into.len() - done).min(content.len() - within);
            into[done..done + length].copy_from_slice(&content[within..within + length]);
            done += length;
        }
        Ok(())
    }

    fn chunk(&mut self, file: usize, chunk: usize) -> Result<&[u8], CheckpointError> {
        let manifest = self.checkpoint.manifest();
        let start = chunk as u64 * manifest.chunk_bytes;
        let length = (manifest.files[file].bytes - start).min(manifest.chunk_bytes) as usize;
        if self.loaded != Some((file, chunk)) {
            self.loaded = None;
            self.checkpoint.read_chunks(file, chunk, &mut self.memory[..length])?;
            self.loaded = Some((file, chunk));
            self.bytes_read += length as u64;
        }
        Ok(&self.memory[..length])
    }
}
