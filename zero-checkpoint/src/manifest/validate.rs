//! Whether a manifest makes sense.

use std::collections::BTreeSet;

use crate::digest::Digest;
use crate::manifest::{FileRecord, Manifest, ParameterRecord, TensorRecord};

/// Bounds of a chunk's length: a hash for fewer bytes is not worth its own, and a chunk is read as a whole.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 4096..=1 << 30;

/// Whether a name is one of a file in the same folder, and not hidden: letters, digits, `.`, `_` and `-`.
fn is_plain_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(allowed)
}

/// Whether a state's name leaves no doubt where it begins in the name of a tensor.
pub(crate) fn is_state_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

impl Manifest {
    /// What is wrong, if anything.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let chunk = self.chunk_bytes;
        if !CHUNK_BYTES.contains(&chunk) || !chunk.is_power_of_two() {
            return Err(format!("chunks of {chunk} bytes are no power of two from 4096 to 2^30"));
        }
        self.validate_facts()?;
        let mut names = BTreeSet::new();
        for file in &self.files {
            validate_file(file, chunk)?;
            if !names.insert(&file.name) {
                return Err(format!("file `{}` is there twice", file.name));
            }
        }
        let mut spans: Vec<Vec<(u64, u64)>> = vec![Vec::new(); self.files.len()];
        for parameter in &self.parameters {
            self.validate_parameter(parameter, &mut spans)?;
        }
        for (file, spans) in self.files.iter().zip(&mut spans) {
            spans.sort_unstable();
            if let Some(pair) = spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
                return Err(format!("two pieces overlap at byte {} of file `{}`", pair[1].0, file.name));
            }
        }
        Ok(())
    }

    /// What is wrong with what can be told before anything is written, if anything.
    pub(crate) fn validate_facts(&self) -> Result<(), String> {
        self.validate_mesh()?;
        let mut groups = BTreeSet::new();
        for group in &self.groups {
            if !groups.insert(group.name.as_str()) {
                return Err(format!("group `{}` is there twice", group.name));
            }
        }
        let mut paths = BTreeSet::new();
        let mut total: usize = 0;
        for parameter in &self.parameters {
            let name = &parameter.name;
            for path in parameter.paths() {
                if path.is_empty() {
                    return Err(format!("parameter `{name}` has an empty path"));
                }
                if !paths.insert(path) {
                    return Err(format!("the path `{path}` is there twice"));
                }
            }
            if let Some(group) = parameter.group.as_deref().filter(|group| !groups.contains(group)) {
                return Err(format!("parameter `{name}` is in a group `{group}` that is not there"));
            }
            let numel = numel(&parameter.shape).ok_or_else(|| format!("parameter `{name}` is too large"))?;
            total = total.checked_add(numel).ok_or("all parameters together are too large")?;
        }
        Ok(())
    }

    fn validate_mesh(&self) -> Result<(), String> {
        let ranks = self.mesh.iter().try_fold(1, |product: usize, axis| product.checked_mul(axis.size));
        if ranks != Some(self.world_size()) || self.world_size() == 0 {
            return Err(format!("its mesh is not one of {} ranks", self.world_size()));
        }
        Ok(())
    }

    fn validate_parameter(
        &self,
        parameter: &ParameterRecord,
        spans: &mut [Vec<(u64, u64)>],
    ) -> Result<(), String> {
        let numel = parameter.numel();
        if let Some(state) = parameter.states.keys().find(|state| !is_state_name(state)) {
            return Err(format!("parameter `{}` has a state named `{state}`", parameter.name));
        }
        for (state, tensor) in parameter.tensors() {
            let what = || match state {
                None => format!("parameter `{}`", parameter.name),
                Some(state) => format!("state `{state}` of parameter `{}`", parameter.name),
            };
            self.validate_tensor(tensor, numel, spans).map_err(|reason| format!("{}: {reason}", what()))?;
        }
        Ok(())
    }

    fn validate_tensor(
        &self,
        tensor: &TensorRecord,
        numel: usize,
        spans: &mut [Vec<(u64, u64)>],
    ) -> Result<(), String> {
        let mut next = 0;
        for piece in &tensor.pieces {
            if piece.start != next || piece.end <= piece.start || piece.end > numel {
                return Err(format!(
                    "the piece {}..{} does not follow {next} of {numel} elements",
                    piece.start, piece.end
                ));
            }
            next = piece.end;
            let file = self
                .files
                .get(piece.file)
                .ok_or_else(|| format!("a piece is in file {}, of {}", piece.file, self.files.len()))?;
            let length = (piece.range().len() as u64).checked_mul(tensor.dtype.size() as u64);
            let end = length.and_then(|length| piece.offset.checked_add(length));
            let Some(end) = end.filter(|&end| end <= file.bytes) else {
                return Err(format!(
                    "the piece {}..{} lies outside of `{}`",
                    piece.start, piece.end, file.name
                ));
            };
            if piece.offset % tensor.dtype.size() as u64 != 0 {
                return Err(format!(
                    "the piece {}..{} begins within an element of `{}`",
                    piece.start, piece.end, file.name
                ));
            }
            spans[piece.file].push((piece.offset, end));
        }
        if next == numel { Ok(()) } else { Err(format!("its pieces end at {next} of {numel} elements")) }
    }
}

fn validate_file(file: &FileRecord, chunk: u64) -> Result<(), String> {
    if !is_plain_name(&file.name) {
        return Err(format!("`{}` is no name of a file in the checkpoint", file.name.escape_default()));
    }
    let (chunks, needed) = (file.chunks.len() as u64, file.bytes.div_ceil(chunk));
    if chunks != needed {
        return Err(format!("file `{}` has {chunks} hashes for {needed} chunks", file.name));
    }
    if file.hash != Digest::of_chunks(&file.chunks) {
        return Err(format!("the hash of file `{}` is not that of its chunks", file.name));
    }
    Ok(())
}

/// The number of elements of a shape. One empty dim makes it zero, however large the others are.
pub(crate) fn numel(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1, |product: usize, &extent| product.checked_mul(extent))
}
