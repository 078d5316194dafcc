//! A safetensors file that is written from its beginning to its end.

use std::io;

use zero_core::DType;

use crate::error::CheckpointError;
use crate::memory::Memory;
use crate::storage::WriteFile;

/// A tensor of the file.
pub(crate) struct OutputTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: u64,
}

/// The header of a file with these tensors, in this order.
pub(crate) fn header(tensors: &[OutputTensor], metadata: &[(String, String)]) -> Vec<u8> {
    let json = |text: &str| serde_json::Value::from(text).to_string();
    let mut members: Vec<String> = Vec::with_capacity(tensors.len() + 1);
    let pairs: Vec<_> =
        metadata.iter().map(|(key, value)| format!("{}:{}", json(key), json(value))).collect();
    members.push(format!(r#""__metadata__":{{{}}}"#, pairs.join(",")));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes;
        members.push(format!(
            r#"{}:{{"dtype":"{}","shape":{:?},"data_offsets":[{at},{end}]}}"#,
            json(&tensor.name),
            tensor.dtype.name().to_uppercase(),
            tensor.shape
        ));
        at = end;
    }
    let mut text = format!("{{{}}}", members.join(",")).into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

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
