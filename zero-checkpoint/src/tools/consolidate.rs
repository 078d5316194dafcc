//! From the shards of all ranks to plain weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use zero_core::{Bytes, DType};

use crate::error::CheckpointError;
use crate::folder::{self, failed};
use crate::header::{HeaderTensor, header};
use crate::import::{NameMap, transpose_bytes};
use crate::load::{Checkpoint, Converter};
use crate::manifest::{ParameterRecord, WeightLayout};
use crate::memory::Memory;
use crate::storage::{LocalStorage, Storage};
use crate::tools::Progress;
use crate::tools::output::Appender;
use crate::tools::verified::VerifiedReader;

/// How plain weights are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsolidateOptions {
    /// The type of elements; `None` for that of the masters. Integers stay what they are.
    pub dtype: Option<DType>,
    /// How linear weights are laid out.
    pub layout: FileLayout,
    /// What the tensors are called.
    pub names: NameMap,
    /// What becomes of the further paths of a tied parameter.
    pub tied: TiedWeights,
    /// The most bytes of tensors in a file; one that is larger has a file of its own.
    pub max_file: Bytes,
    /// What may be buffered, in bytes: at least 4 MiB, and three times a row of the largest matrix that is transposed. A
    /// matrix that is transposed is read as often as a third of this goes into it.
    pub buffer: Bytes,
}

impl Default for ConsolidateOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            layout: FileLayout::PyTorch,
            names: NameMap::default(),
            tied: TiedWeights::Noted,
            max_file: Bytes::new(5_000_000_000),
            buffer: Bytes::new(256 << 20),
        }
    }
}

/// How linear weights are laid out in plain weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FileLayout {
    /// `[out, in]`, unless the table of names says otherwise for one.
    #[default]
    PyTorch,
    /// As the model has them: Burn's `[in, out]`.
    Burn,
}

/// What becomes of the further paths of a tied parameter in plain weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TiedWeights {
    /// They are told in the metadata of the file, as `safetensors.torch.save_model` tells them.
    #[default]
    Noted,
    /// Each has a tensor of its own.
    Copied,
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Consolidated {
    /// The files of weights, and the index if there is one.
    pub files: Vec<PathBuf>,
    /// How many tensors they hold.
    pub tensors: usize,
    /// Their data, in bytes.
    pub bytes: u64,
}

/// The least buffer.
const LEAST: u64 = 4 << 20;

/// A tensor on its way.
struct Planned<'m> {
    record: &'m ParameterRecord,
    output: HeaderTensor,
    transposed: bool,
    noted: Vec<(String, String)>,
}

/// Writes the values of a checkpoint to the new folder `to` as loaders of Hugging Face's expect them: `model.safetensors`, or
/// several files with `model.safetensors.index.json`. The folder is there when all of it is.
///
/// # Errors
///
/// [`CheckpointError::OutputExists`], [`BufferTooSmall`](CheckpointError::BufferTooSmall),
/// [`TwoNames`](CheckpointError::TwoNames); what is wrong with the checkpoint's files; those of the file system.
pub fn consolidate(
    checkpoint: &Checkpoint,
    to: &Path,
    options: &ConsolidateOptions,
    progress: Progress<'_>,
) -> Result<Consolidated, CheckpointError> {
    let least = Bytes::new(LEAST.max(checkpoint.manifest().chunk_bytes * 4));
    if options.buffer < least {
        return Err(CheckpointError::BufferTooSmall { bytes: options.buffer, least });
    }
    if to.exists() {
        return Err(CheckpointError::OutputExists { path: to.to_path_buf() });
    }
    let planned = in_files(plan(checkpoint, to, options)?, options.max_file);
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = LocalStorage::new(parent);
    let (temporary, _mark) = folder::make_temporary(&place, checkpoint.manifest().step)?;
    let done = write(checkpoint, &place, &temporary, planned, options, progress).and_then(|mut written| {
        let from = parent.join(&temporary);
        // Its mark goes last: without it, a save to the same place would sweep the folder.
        let renamed = fs::rename(&from, to).and_then(|()| fs::remove_file(to.join(".lock")));
        renamed.map_err(failed(&place, "rename", &temporary))?;
        place.sync_folder("").map_err(failed(&place, "sync", ""))?;
        written.files.iter_mut().for_each(|file| *file = to.join(&*file));
        Ok(written)
    });
    if done.is_err() {
        // What is wrong is told already.
        let _ = place.remove_folder(&temporary);
    }
    done
}

/// All tensors, in the order of the model.
fn plan<'m>(
    checkpoint: &'m Checkpoint,
    to: &Path,
    options: &ConsolidateOptions,
) -> Result<Vec<Planned<'m>>, CheckpointError> {
    let mut taken: BTreeMap<String, &str> = BTreeMap::new();
    let mut all = Vec::new();
    for record in &checkpoint.manifest().parameters {
        let dtype =
            options.dtype.filter(|_| !record.values.dtype.is_integer()).unwrap_or(record.values.dtype);
        let (name, layout) = options.names.to_published(&record.name);
        let transposed = options.layout == FileLayout::PyTorch
            && (record.layout, layout) == (WeightLayout::InOut, WeightLayout::Plain)
            && record.shape.len() == 2;
        let mut shape = record.shape.clone();
        if transposed {
            shape.reverse();
        }
        let aliases: Vec<_> =
            record.aliases.iter().map(|alias| options.names.to_published(alias).0).collect();
        let (copies, mut noted) = match options.tied {
            TiedWeights::Copied => (aliases, Vec::new()),
            TiedWeights::Noted => {
                (Vec::new(), aliases.into_iter().map(|alias| (alias, name.clone())).collect())
            }
        };
        for name in std::iter::once(name).chain(copies) {
            if let Some(first) = taken.insert(name.clone(), &record.name) {
                let (first, second) = (first.to_owned(), record.name.clone());
                return Err(CheckpointError::TwoNames { path: to.to_path_buf(), name, first, second });
            }
            let bytes = Bytes::of(record.numel(), dtype).get();
            let output = HeaderTensor { name, dtype, shape: shape.clone(), bytes };
            all.push(Planned { record, output, transposed, noted: std::mem::take(&mut noted) });
        }
    }
    Ok(all)
}

/// The tensors of each file, of which there is at least one.
fn in_files(tensors: Vec<Planned<'_>>, most: Bytes) -> Vec<Vec<Planned<'_>>> {
    let mut files = vec![Vec::new()];
    let mut room = most.get();
    for tensor in tensors {
        let bytes = tensor.output.bytes;
        match files.last_mut() {
            Some(file) if file.is_empty() || bytes <= room => file.push(tensor),
            _ => {
                files.push(vec![tensor]);
                room = most.get();
            }
        }
        room = room.saturating_sub(bytes);
    }
    // Tensors then lie at multiples of their element's size.
    files
        .iter_mut()
        .for_each(|file| file.sort_by_key(|tensor| std::cmp::Reverse(tensor.output.dtype.size())));
    files
}

/// Writes the files into a folder; their names are relative to it.
fn write(
    checkpoint: &Checkpoint,
    place: &LocalStorage,
    folder: &str,
    files: Vec<Vec<Planned<'_>>>,
    options: &ConsolidateOptions,
    progress: Progress<'_>,
) -> Result<Consolidated, CheckpointError> {
    let mut copier = Copier::new(checkpoint, options.buffer)?;
    let mut written = Consolidated::default();
    let mut weight_map = BTreeMap::new();
    let count = files.len();
    for (index, tensors) in files.into_iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let path = format!("{folder}/{name}");
        let format = match options.layout {
            FileLayout::PyTorch => "pt",
            FileLayout::Burn => "burn",
        };
        let mut metadata = vec![("format".to_owned(), format.to_owned())];
        metadata.extend(tensors.iter().flat_map(|tensor| tensor.noted.iter().cloned()));
        let (records, outputs): (Vec<_>, Vec<_>) =
            tensors.into_iter().map(|tensor| ((tensor.record, tensor.transposed), tensor.output)).unzip();
        let header = header(&metadata, &outputs);
        let data: u64 = outputs.iter().map(|output| output.bytes).sum();
        let file = place.create(&path, header.len() as u64 + data).map_err(failed(place, "create", &path))?;
        copier.file(file, &header, &records, &outputs, failed(place, "write", &path), progress)?;
        weight_map.extend(outputs.iter().map(|output| (output.name.clone(), name.clone())));
        written.tensors += outputs.len();
        written.bytes += data;
        written.files.push(name.into());
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": written.bytes}, "weight_map": weight_map});
        let path = format!("{folder}/model.safetensors.index.json");
        let text = format!("{index:#}\n");
        let put = || {
            let mut file = place.create(&path, text.len() as u64)?;
            file.write(text.as_bytes())?;
            file.finish()
        };
        put().map_err(failed(place, "write", &path))?;
        written.files.push("model.safetensors.index.json".into());
    }
    place.sync_folder(folder).map_err(failed(place, "sync", folder))?;
    Ok(written)
}

/// The memory that copying takes.
struct Copier<'c> {
    reader: VerifiedReader<'c>,
    output: Memory,
    /// As the checkpoint has the elements, and transposed.
    blocks: [Memory; 2],
    converter: Converter,
    budget: Bytes,
}

impl<'c> Copier<'c> {
    fn new(checkpoint: &'c Checkpoint, budget: Bytes) -> Result<Self, CheckpointError> {
        let memory = |bytes: u64| Memory::zeroed(bytes as usize).ok_or(CheckpointError::NoMemory { bytes });
        let output = (budget.get() / 4).min(8 << 20) / 4096 * 4096;
        let converted = Converter::BYTES as u64;
        let block = (budget.get() - output - converted - checkpoint.manifest().chunk_bytes) / 2 / 8 * 8;
        Ok(Self {
            reader: VerifiedReader::new(checkpoint)?,
            output: memory(output)?,
            blocks: [memory(block)?, memory(block)?],
            converter: Converter::default(),
            budget,
        })
    }

    fn file(
        &mut self,
        file: Box<dyn crate::storage::WriteFile>,
        header: &[u8],
        records: &[(&ParameterRecord, bool)],
        outputs: &[HeaderTensor],
        failed: impl Fn(std::io::Error) -> CheckpointError,
        progress: Progress<'_>,
    ) -> Result<(), CheckpointError> {
        let Self { reader, output, blocks, converter, budget } = self;
        let mut appender = Appender::new(file, output, failed);
        appender.append(header)?;
        for ((record, transposed), output) in records.iter().zip(outputs) {
            let dtype = record.values.dtype;
            let mut append = |bytes: &[u8]| {
                converter.convert(bytes, dtype, output.dtype, |_, converted| appender.append(converted))
            };
            let before = reader.bytes_read;
            match (*transposed, &record.shape[..]) {
                (true, &[ins, outs]) => {
                    let row = Bytes::of(ins, dtype).get();
                    let width =
                        (blocks[0].len() as u64).checked_div(row).map_or(outs, |width| width as usize);
                    if width == 0 && outs > 0 {
                        let least = Bytes::new((row * 3).max(LEAST) + (16 << 20));
                        return Err(CheckpointError::BufferTooSmall { bytes: *budget, least });
                    }
                    copy_transposed(reader, record, [ins, outs], width, blocks, &mut append)?;
                }
                _ => copy(reader, record, &mut blocks[0], &mut append)?,
            }
            progress(reader.bytes_read - before);
        }
        appender.finish()
    }
}

/// Where copied elements go, in order.
type Append<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>;

/// Copies values as the checkpoint has them.
fn copy(
    reader: &mut VerifiedReader<'_>,
    record: &ParameterRecord,
    block: &mut [u8],
    append: Append<'_>,
) -> Result<(), CheckpointError> {
    let size = record.values.dtype.size();
    let most = block.len() / size;
    for start in (0..record.numel()).step_by(most) {
        let range = start..record.numel().min(start + most);
        let block = &mut block[..range.len() * size];
        reader.read(&record.values, range, block)?;
        append(block)?;
    }
    Ok(())
}

/// Copies the transpose of a matrix, as many of its columns at once as `width` says.
fn copy_transposed(
    reader: &mut VerifiedReader<'_>,
    record: &ParameterRecord,
    [ins, outs]: [usize; 2],
    width: usize,
    [from, to]: &mut [Memory; 2],
    append: Append<'_>,
) -> Result<(), CheckpointError> {
    let size = record.values.dtype.size();
    for left in (0..outs).step_by(width.max(1)) {
        let cols = left..outs.min(left + width);
        let block = &mut from[..ins * cols.len() * size];
        let rows = block.chunks_mut((cols.len() * size).max(1));
        for (row, part) in rows.enumerate() {
            reader.read(&record.values, row * outs + cols.start..row * outs + cols.end, part)?;
        }
        let turned = &mut to[..block.len()];
        transpose_bytes(block, ins, cols.len(), size, turned);
        append(turned)?;
    }
    Ok(())
}
