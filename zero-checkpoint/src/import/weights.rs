//! Weights in plain safetensors files, by intervals.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use zero_core::DType;

use crate::bytes::Target;
use crate::error::CheckpointError;
use crate::import::names::NameMap;
use crate::load::{Converter, Difference, LoadOptions, LoadReport, LoadedParameter, Wanted, WantedParameter};
use crate::manifest::{WeightLayout, paths};
use crate::weights::WeightsFile;

/// What a file of all weights is called.
const SINGLE: &str = "model.safetensors";
/// What the index of several files is called.
const INDEX: &str = "model.safetensors.index.json";
/// The longest index that is read, in bytes.
const MAX_INDEX: u64 = 100_000_000;

/// Weights that somebody has published: one safetensors file, or several with an index, as Hugging Face has them.
///
/// ```
/// # use safetensors::{Dtype, tensor::TensorView};
/// use zero_checkpoint::{
///     LoadOptions, NameMap, PublishedWeights, Target, Wanted, WantedParameter, WeightLayout,
/// };
/// use zero_core::{DType, ParameterSpec};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
/// # let view = TensorView::new(Dtype::F32, vec![2, 3], &bytes)?;
/// # safetensors::serialize_to_file([("lm_head.weight", view)], None, &path)?;
/// // The file has PyTorch's [out, in] = [2, 3].
/// let weights = PublishedWeights::open(&path, r#"{"lm_head.weight": "head.weight"}"#.parse()?)?;
/// // This rank holds the last two of three rows of Burn's [in, out] = [3, 2].
/// let mut values = [0.0; 4];
/// let spec = ParameterSpec {
///     name: "head.weight".to_owned(),
///     shape: vec![3, 2],
///     dtype: DType::F32,
///     trainable: true,
///     aliases: vec![],
/// };
/// weights.load(
///     Wanted {
///         parameters: vec![WantedParameter {
///             spec,
///             layout: WeightLayout::InOut,
///             range: 2..6,
///             values: Target::f32(&mut values),
///             states: vec![],
///         }],
///     },
///     &LoadOptions::default(),
/// )?;
/// assert_eq!(values, [2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PublishedWeights {
    path: PathBuf,
    files: Vec<WeightsFile>,
    /// By the model's name.
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
struct Tensor {
    file: usize,
    name: String,
    layout: WeightLayout,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl PublishedWeights {
    /// Opens a safetensors file, an index, or a folder that has either; `names` are what the model calls their tensors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Open`] and what else [`WeightsFile::open`] finds; [`Index`](CheckpointError::Index) if the index
    /// does not go with the files or leads out of their folder; [`TwoNames`](CheckpointError::TwoNames).
    pub fn open(path: impl AsRef<Path>, names: NameMap) -> Result<Self, CheckpointError> {
        let mut path = path.as_ref().to_path_buf();
        if path.is_dir() {
            let index = path.join(INDEX);
            path = if index.is_file() { index } else { path.join(SINGLE) };
        }
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        let files = if is_index { open_indexed(&path)? } else { vec![WeightsFile::open(&path)?] };
        let mut tensors = BTreeMap::new();
        for (file, weights) in files.iter().enumerate() {
            for published in weights.names() {
                let (name, layout) = names.to_model(published);
                let tensor = Tensor { file, name: published.to_owned(), layout };
                if let Some(other) = tensors.insert(name.clone(), tensor) {
                    let (first, second) = (other.name, published.to_owned());
                    return Err(CheckpointError::TwoNames { path, name, first, second });
                }
            }
        }
        Ok(Self { path, files, tensors })
    }

    /// The model's names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Loads the values of what is wanted; this rank reads only its own intervals. There is no optimizer state: states that
    /// are asked for are left alone.
    ///
    /// Parameters laid out as [`WeightLayout::InOut`] are transposed on the way, unless the table of names says that the
    /// file has them so. Other floating-point types than asked for are a difference, which [`Allow`](crate::Allow) can
    /// allow.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::load`](crate::Checkpoint::load), but that no hashes are known.
    pub fn load(&self, mut wanted: Wanted<'_>, options: &LoadOptions) -> Result<LoadReport, CheckpointError> {
        wanted.parameters.iter().try_for_each(WantedParameter::check)?;
        let found = self.matches(&wanted.parameters, options)?;
        let mut report = LoadReport::default();
        let mut buffer =
            vec![0; usize::try_from(options.buffer.get()).unwrap_or(usize::MAX).clamp(1 << 16, 8 << 20)];
        for (parameter, tensor) in wanted.parameters.iter_mut().zip(found) {
            let mut loaded = LoadedParameter::none(parameter);
            if let Some(tensor) = tensor {
                report.bytes_read += self.read(tensor, parameter, &mut buffer)?;
                loaded.values = true;
            }
            report.parameters.push(loaded);
        }
        Ok(report)
    }

    /// For each wanted parameter its tensor, if it is to be loaded.
    fn matches(
        &self,
        wanted: &[WantedParameter<'_>],
        options: &LoadOptions,
    ) -> Result<Vec<Option<&Tensor>>, CheckpointError> {
        let (mut differences, mut found, mut used) = (Vec::new(), Vec::new(), HashSet::new());
        for parameter in wanted {
            let spec = &parameter.spec;
            used.extend(paths(&spec.name, &spec.aliases));
            let mut paths = paths(&spec.name, &spec.aliases);
            let Some(tensor) = paths.find_map(|path| self.tensors.get(path)) else {
                differences.push(Difference::MissingParameter { name: spec.name.clone() });
                found.push(None);
                continue;
            };
            let info = self.files[tensor.file].info(&tensor.name)?;
            let (mut saved, dtype) = (info.shape.clone(), info.dtype);
            if tensor.is_transposed(parameter) && saved.len() == 2 {
                saved.reverse();
            }
            let same = saved == spec.shape;
            if !same {
                let (name, wanted) = (spec.name.clone(), spec.shape.clone());
                differences.push(Difference::Shape { name, saved, wanted });
            } else if dtype != parameter.values.dtype() {
                let (name, wanted) = (spec.name.clone(), parameter.values.dtype());
                differences.push(Difference::DType { name, what: "values".to_owned(), saved: dtype, wanted });
            }
            found.push(Some(tensor).filter(|_| same));
        }
        let unused = self.tensors.keys().filter(|name| !used.contains(name.as_str()));
        differences.extend(unused.map(|name| Difference::UnexpectedParameter { name: name.clone() }));
        differences.retain(|difference| !options.allow.allows(difference));
        if differences.is_empty() {
            return Ok(found);
        }
        Err(CheckpointError::Differences { place: self.path.display().to_string(), differences })
    }

    /// Reads a rank's interval; gives the bytes that were read.
    fn read(
        &self,
        tensor: &Tensor,
        parameter: &mut WantedParameter<'_>,
        buffer: &mut [u8],
    ) -> Result<u64, CheckpointError> {
        let transposed = tensor.is_transposed(parameter);
        let WantedParameter { spec, range, values, .. } = parameter;
        let file = &self.files[tensor.file];
        let (name, parameter, converter) = (&tensor.name, &spec.name, Converter::default());
        let mut reading = Reading { file, name, parameter, values, converter, read: 0 };
        match (transposed, &spec.shape[..]) {
            (true, &[ins, outs]) => reading.columns(range, ins, outs, buffer)?,
            _ => reading.run(range, buffer)?,
        }
        Ok(reading.read)
    }
}

impl Tensor {
    /// Whether the file has the transpose of what is wanted.
    fn is_transposed(&self, parameter: &WantedParameter<'_>) -> bool {
        parameter.layout == WeightLayout::InOut && self.layout == WeightLayout::Plain
    }
}

struct Reading<'r, 'a> {
    file: &'r WeightsFile,
    name: &'r str,
    parameter: &'r str,
    values: &'r mut Target<'a>,
    converter: Converter,
    read: u64,
}

impl Reading<'_, '_> {
    /// Elements as the file has them.
    fn run(&mut self, range: &Range<usize>, buffer: &mut [u8]) -> Result<(), CheckpointError> {
        let dtype = self.file.info(self.name)?.dtype;
        let most = buffer.len() / dtype.size();
        for start in range.clone().step_by(most) {
            let part = start..range.end.min(start + most);
            let bytes = &mut buffer[..part.len() * dtype.size()];
            self.file.read_bytes(self.name, part, bytes)?;
            self.read += bytes.len() as u64;
            self.put(start - range.start, bytes, dtype)?;
        }
        Ok(())
    }

    /// Elements `range` of a matrix of `ins` x `outs`, of which the file has the transpose: blocks of rows of the one are
    /// columns of the other.
    fn columns(
        &mut self,
        range: &Range<usize>,
        ins: usize,
        outs: usize,
        buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        if range.is_empty() {
            return Ok(());
        }
        let dtype = self.file.info(self.name)?.dtype;
        let size = dtype.size();
        let (first, last) = (range.start / outs, (range.end - 1) / outs + 1);
        // Half for what the file has, half for its transpose.
        let (from, to) = buffer.split_at_mut(buffer.len() / 2);
        let height = (from.len() / size / outs).max(1);
        // A row that is longer than the buffer is taken in parts.
        let width = outs.min(from.len() / size);
        for top in (first..last).step_by(height) {
            let rows = top..last.min(top + height);
            for left in (0..outs).step_by(width) {
                let cols = left..outs.min(left + width);
                let block = &mut from[..rows.len() * cols.len() * size];
                for (index, col) in cols.clone().enumerate() {
                    let part = col * ins + rows.start..col * ins + rows.end;
                    let bytes = &mut block[index * rows.len() * size..(index + 1) * rows.len() * size];
                    self.file.read_bytes(self.name, part, bytes)?;
                }
                self.read += block.len() as u64;
                transpose_bytes(block, cols.len(), rows.len(), size, &mut to[..block.len()]);
                for (index, row) in rows.clone().enumerate() {
                    let whole = row * outs + cols.start..row * outs + cols.end;
                    let wanted = whole.start.max(range.start)..whole.end.min(range.end);
                    if wanted.start < wanted.end {
                        let skipped = index * cols.len() + (wanted.start - whole.start);
                        let bytes = &to[skipped * size..(skipped + wanted.len()) * size];
                        self.put(wanted.start - range.start, bytes, dtype)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, element: usize, bytes: &[u8], dtype: DType) -> Result<(), CheckpointError> {
        let Self { values, converter, .. } = self;
        let wanted = values.dtype();
        let done = converter.convert(bytes, dtype, wanted, |further, bytes| {
            values.write(((element + further) * wanted.size()) as u64, bytes)
        });
        done.map_err(|source| CheckpointError::Target {
            parameter: self.parameter.to_owned(),
            what: "values".to_owned(),
            source,
        })
    }
}

/// The transpose of a row-major matrix of `rows` x `cols` elements of `size` bytes.
pub(crate) fn transpose_bytes(from: &[u8], rows: usize, cols: usize, size: usize, to: &mut [u8]) {
    /// Rows and columns of a square that is moved at once.
    const TILE: usize = 32;
    for top in (0..rows).step_by(TILE) {
        for left in (0..cols).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                for col in left..cols.min(left + TILE) {
                    let (source, target) = ((row * cols + col) * size, (col * rows + row) * size);
                    to[target..target + size].copy_from_slice(&from[source..source + size]);
                }
            }
        }
    }
}

/// The files of an index.
fn open_indexed(path: &Path) -> Result<Vec<WeightsFile>, CheckpointError> {
    let refused = |reason: String| CheckpointError::Index { path: path.to_path_buf(), reason };
    let failed = |source: io::Error| CheckpointError::Open { path: path.to_path_buf(), source };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > MAX_INDEX {
        return Err(refused(format!("it has {length} bytes, of {MAX_INDEX} allowed")));
    }
    let index = read_index(&fs::read(path).map_err(failed)?).map_err(refused)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files = Vec::new();
    let mut positions = HashMap::new();
    for file in index.values() {
        if !positions.contains_key(file) {
            positions.insert(file, files.len());
            files.push(WeightsFile::open(folder.join(file))?);
        }
    }
    for (tensor, file) in &index {
        if !files[positions[file]].contains(tensor) {
            return Err(refused(format!("tensor `{tensor}` is not in `{file}`")));
        }
    }
    for file in &files {
        if let Some(tensor) = file.names().find(|name| !index.contains_key(*name)) {
            return Err(refused(format!("tensor `{tensor}` of {} is not in it", file.path().display())));
        }
    }
    Ok(files)
}

/// The tensors of an index, by name, with their files; these stay in its folder.
pub(crate) fn read_index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let index: Index = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    for file in index.weight_map.values() {
        let plain = !file.is_empty() && !file.contains(['/', '\\', '\0', ':']) && !file.starts_with('.');
        if !plain {
            return Err(format!("`{}` is no name of a file in its folder", file.escape_default()));
        }
    }
    Ok(index.weight_map)
}
