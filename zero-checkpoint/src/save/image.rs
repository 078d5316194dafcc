//! The safetensors file of a rank, before it is written.

use std::collections::HashSet;
use std::ops::Range;

use zero_core::{DType, Partition, Rank, WorldSize};

use crate::error::CheckpointError;
use crate::header::{HeaderTensor, header};
use crate::manifest::{Manifest, tensor_name};
use crate::save::contents::{Contents, Held};

/// What a rank's file will hold, byte for byte; the numbers still lie where they are.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    header: Vec<u8>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) bytes: u64,
}

/// A tensor of the file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Among the contents.
    pub(crate) parameter: usize,
    /// Among the parameter's states; `None` for its values.
    state: Option<usize>,
    pub(crate) state_name: Option<String>,
    pub(crate) range: Range<usize>,
    /// Where the data begin, in bytes from the beginning of the file.
    pub(crate) offset: u64,
    bytes: u64,
    /// Where they begin in what the rank holds, in bytes.
    source_offset: u64,
}

impl Image {
    /// What `rank` writes of `contents`, which have been checked.
    pub(crate) fn new(
        contents: &Contents<'_>,
        rank: Rank,
        world: WorldSize,
    ) -> Result<Self, CheckpointError> {
        let mut entries = Vec::new();
        let shares = shares(contents, rank, world);
        for (index, (parameter, range)) in contents.parameters.iter().zip(shares).enumerate() {
            if range.is_empty() {
                continue;
            }
            let held = match &parameter.held {
                Held::Replica => 0,
                Held::Part(held) => held.start,
            };
            let states =
                parameter.states.iter().enumerate().map(|(at, state)| (Some(at), state.data.dtype()));
            for (state, dtype) in std::iter::once((None, parameter.values.dtype())).chain(states) {
                let entry = Entry {
                    parameter: index,
                    state,
                    state_name: state.map(|at| parameter.states[at].name.clone()),
                    range: range.clone(),
                    offset: 0,
                    bytes: (range.len() * dtype.size()) as u64,
                    source_offset: ((range.start - held) * dtype.size()) as u64,
                };
                entries.push((dtype, entry));
            }
        }
        // Each tensor then begins at a multiple of its element's size, as readers that view it in place need.
        entries.sort_by_key(|(dtype, _)| std::cmp::Reverse(dtype.size()));
        let metadata = [("format", Manifest::FORMAT.to_owned()), ("step", contents.facts.step.to_string())]
            .map(|(key, value)| (key.to_owned(), value));
        let header = header(&metadata, &tensors(contents, &entries)?);
        let mut offset = header.len() as u64;
        for (_, entry) in &mut entries {
            entry.offset = offset;
            offset += entry.bytes;
        }
        Ok(Self { header, entries: entries.into_iter().map(|(_, entry)| entry).collect(), bytes: offset })
    }

    /// Fills `into` with the file's bytes from `offset` on.
    pub(crate) fn read(
        &self,
        contents: &Contents<'_>,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let end = offset + into.len() as u64;
        let header = self.header.len() as u64;
        if offset < header {
            let part = offset as usize..header.min(end) as usize;
            into[..part.len()].copy_from_slice(&self.header[part]);
        }
        let first = self.entries.partition_point(|entry| entry.offset + entry.bytes <= offset);
        for entry in self.entries[first..].iter().take_while(|entry| entry.offset < end) {
            let (from, to) = (entry.offset.max(offset), (entry.offset + entry.bytes).min(end));
            let parameter = &contents.parameters[entry.parameter];
            let data = entry.state.map_or(&parameter.values, |state| &parameter.states[state].data);
            let into = &mut into[(from - offset) as usize..(to - offset) as usize];
            data.read(entry.source_offset + from - entry.offset, into).map_err(|source| {
                let what = entry.state_name.as_deref().unwrap_or("values");
                CheckpointError::Source {
                    parameter: parameter.spec.name.clone(),
                    what: what.to_owned(),
                    source,
                }
            })?;
        }
        Ok(())
    }
}

/// The elements of each parameter that `rank` writes. Replicas are dealt out so that each rank writes as many bytes of them:
/// small ones whole, those larger than a rank's share in parts.
fn shares(contents: &Contents<'_>, rank: Rank, world: WorldSize) -> Vec<Range<usize>> {
    let ranks = world.get() as u128;
    let bytes = |parameter: &crate::save::SavedParameter<'_>| -> u128 {
        let states = parameter.states.iter().map(|state| state.data.dtype());
        let sizes = std::iter::once(parameter.values.dtype()).chain(states).map(DType::size);
        parameter.numel().unwrap_or_default() as u128 * sizes.sum::<usize>() as u128
    };
    let replicas = contents.parameters.iter().filter(|parameter| parameter.held == Held::Replica);
    let total: u128 = replicas.map(bytes).sum();
    let mut before: u128 = 0;
    let share = |parameter: &crate::save::SavedParameter<'_>| {
        let numel = parameter.numel().unwrap_or_default();
        let own = bytes(parameter);
        match &parameter.held {
            Held::Part(range) => range.clone(),
            Held::Replica if own * ranks > total => Partition::new(numel, world).range(rank),
            Held::Replica => {
                let middle = before + own / 2;
                let writer = (middle * ranks).checked_div(total).unwrap_or(0).min(ranks - 1);
                before += own;
                if writer as usize == rank.index() { 0..numel } else { 0..0 }
            }
        }
    };
    contents.parameters.iter().map(share).collect()
}

/// The tensors as the file's header tells them.
fn tensors(
    contents: &Contents<'_>,
    entries: &[(DType, Entry)],
) -> Result<Vec<HeaderTensor>, CheckpointError> {
    let mut names = HashSet::with_capacity(entries.len());
    let mut tensors = Vec::with_capacity(entries.len());
    for (dtype, entry) in entries {
        let parameter = &contents.parameters[entry.parameter];
        let numel = parameter.numel().unwrap_or_default();
        let state = entry.state_name.as_deref();
        let name = tensor_name(&parameter.spec.name, state, &entry.range, numel);
        if !names.insert(name.clone()) {
            return Err(CheckpointError::Contents {
                parameter: parameter.spec.name.clone(),
                reason: "its name and that of another parameter make one tensor's name; rename one"
                    .to_owned(),
            });
        }
        let shape =
            if entry.range.len() == numel { parameter.spec.shape.clone() } else { vec![entry.range.len()] };
        tensors.push(HeaderTensor { name, dtype: *dtype, shape, bytes: entry.bytes });
    }
    Ok(tensors)
}
