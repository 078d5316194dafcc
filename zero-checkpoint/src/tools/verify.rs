//! Whether a checkpoint is what was saved, to the last byte.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::error::CheckpointError;
use crate::load::Checkpoint;
use crate::manifest::{Manifest, tensor_name};
use crate::memory::Memory;
use crate::tools::Progress;
use crate::weights::MAX_HEADER;

/// Something that is wrong with a checkpoint.
#[derive(Debug)]
#[non_exhaustive]
pub enum Problem {
    /// A file, or a part of it, is not what was saved.
    Damage(CheckpointError),
    /// A file's own header does not say what the manifest says.
    Header {
        /// The file.
        file: String,
        /// The tensor, or `header`.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damage(error) => error.fmt(f),
            Self::Header { file, tensor, reason } => write!(f, "`{tensor}` in {file}: {reason}"),
        }
    }
}

/// Reads all files of a checkpoint and names all that is wrong: every chunk against its hash, every file against its length,
/// every header against the manifest. That the manifest covers each tensor exactly once was checked when it was opened.
///
/// # Errors
///
/// [`CheckpointError::NoMemory`]; everything else is a [`Problem`].
pub fn verify(checkpoint: &Checkpoint, progress: Progress<'_>) -> Result<Vec<Problem>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let bytes = manifest.chunk_bytes;
    let mut memory = Memory::zeroed(bytes as usize).ok_or(CheckpointError::NoMemory { bytes })?;
    let mut problems = Vec::new();
    for (index, record) in manifest.files.iter().enumerate() {
        if let Err(error) = checkpoint.file(index) {
            problems.push(Problem::Damage(error));
            continue;
        }
        let before = problems.len();
        for chunk in 0..record.chunks.len() {
            let length = (record.bytes - chunk as u64 * bytes).min(bytes) as usize;
            if let Err(error) = checkpoint.read_chunks(index, chunk, &mut memory[..length]) {
                problems.push(Problem::Damage(error));
            }
            progress(length as u64);
        }
        // What a damaged header says is of no interest.
        if problems.len() == before {
            problems.extend(check_header(checkpoint, index));
        }
    }
    Ok(problems)
}

/// A tensor as a header tells it.
#[derive(Debug, PartialEq)]
struct Told {
    dtype: String,
    shape: Vec<usize>,
    offset: u64,
}

fn check_header(checkpoint: &Checkpoint, index: usize) -> Vec<Problem> {
    let file = &checkpoint.manifest().files[index].name;
    let problem = |tensor: &str, reason: String| Problem::Header {
        file: file.clone(),
        tensor: tensor.to_owned(),
        reason,
    };
    let mut found = match read_header(checkpoint, index) {
        Ok(found) => found,
        Err(reason) => return vec![problem("header", reason)],
    };
    let mut problems = Vec::new();
    for (name, expected) in expected(checkpoint.manifest(), index) {
        match found.remove(&name) {
            None => problems.push(problem(&name, "is in the manifest, but not in the file".to_owned())),
            Some(told) if told != expected => {
                problems.push(problem(&name, format!("the manifest says {expected:?}, the file {told:?}")));
            }
            Some(_) => {}
        }
    }
    let unknown =
        found.keys().map(|name| problem(name, "is in the file, but not in the manifest".to_owned()));
    problems.extend(unknown);
    problems
}

fn read_header(checkpoint: &Checkpoint, index: usize) -> Result<BTreeMap<String, Told>, String> {
    let record = &checkpoint.manifest().files[index];
    let file = checkpoint.file(index).map_err(|error| error.to_string())?;
    let mut prefix = [0; 8];
    file.read(0, &mut prefix).map_err(|error| error.to_string())?;
    let length = u64::from_le_bytes(prefix);
    // Both bound what is allocated.
    if length > MAX_HEADER {
        return Err(format!("it claims {length} bytes, of {MAX_HEADER} allowed"));
    }
    let data = 8 + length;
    if data > record.bytes {
        return Err("it is longer than the file".to_owned());
    }
    let mut header = vec![0; length as usize];
    file.read(8, &mut header).map_err(|error| error.to_string())?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let tensors = metadata.tensors().into_iter().map(|(name, info)| {
        let offset = data.checked_add(info.data_offsets.0 as u64);
        let offset = offset.ok_or_else(|| format!("it has `{name}` where no file reaches"))?;
        Ok((name, Told { dtype: dtype_name(info.dtype), shape: info.shape.clone(), offset }))
    });
    tensors.collect()
}

fn dtype_name(dtype: Dtype) -> String {
    dtype.to_string().to_lowercase()
}

/// What a file holds by the manifest.
fn expected(manifest: &Manifest, index: usize) -> Vec<(String, Told)> {
    let mut expected = Vec::new();
    for parameter in &manifest.parameters {
        for (state, tensor) in parameter.tensors() {
            for piece in tensor.pieces.iter().filter(|piece| piece.file == index) {
                let (range, numel) = (piece.range(), parameter.numel());
                let name = tensor_name(&parameter.name, state, &range, numel);
                let shape = if range.len() == numel { parameter.shape.clone() } else { vec![range.len()] };
                let dtype = tensor.dtype.name().to_owned();
                expected.push((name, Told { dtype, shape, offset: piece.offset }));
            }
        }
    }
    expected
}
