//! A safetensors file that is written from its beginning to its end.

use std::io;

use crate::error::CheckpointError;
use crate::memory::Memory;
use crate::storage::WriteFile;

/// Appends through a buffer, so that the medium gets large aligned writes.
pub(crate) struct Appender<'b> {
    file: Box<dyn WriteFile>,
    buffer: &'b mut Memory,
    filled: usize,
    failed: Box<dyn Fn(io::Error) -> CheckpointError + 'b>,
}

impl<'b> Appender<'b> {
    pub(crate) fn new(
        file: Box<dyn WriteFile>,
        buffer: &'b mut Memory,
        failed: impl Fn(io::Error) -> CheckpointError + 'b,
    ) -> Self {
        Self { file, buffer, filled: 0, failed: Box::new(failed) }
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(rest.len().min(self.buffer.len() - self.filled));
            self.buffer[self.filled..self.filled + part.len()].copy_from_slice(part);
            self.filled += part.len();
            rest = later;
            if self.filled == self.buffer.len() {
                self.flush()?;
            }
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<(), CheckpointError> {
        self.flush()?;
        self.file.finish().map_err(&self.failed)
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        let filled = std::mem::take(&mut self.filled);
        self.file.write(&self.buffer[..filled]).map_err(&self.failed)
    }
}
