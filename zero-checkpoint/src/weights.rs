//! The reader of a safetensors file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use zero_core::DType;

use crate::error::CheckpointError;
use crate::positioned::read_exact_at;

/// Bytes of the header's length, which a file begins with.
const PREFIX: u64 = size_of::<u64>() as u64;

/// The longest header that the format allows, in bytes; what is read is bounded by it and by the file.
pub(crate) const MAX_HEADER: u64 = 100_000_000;

/// How many names an error suggests.
const SUGGESTIONS: usize = 3;

/// What a file's header tells of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of an element.
    pub dtype: DType,
    /// The length of each dim; none for a scalar.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// The number of elements: 1 for a scalar, 0 if any dim is empty.
    pub fn numel(&self) -> usize {
        // No overflow: validation multiplied the same numbers in the same order.
        self.shape.iter().product()
    }
}

/// A safetensors file, opened and validated, whose tensors are read when asked for.
///
/// Reads are positioned: they take `&self`, may come from any number of threads at once, and touch only the
/// bytes that they return. Values are in row-major order. The file must not be changed while it is open.
///
/// ```
/// use zero_checkpoint::{WeightsFile, transpose};
/// # use safetensors::{Dtype, tensor::TensorView};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|v| v.to_le_bytes()).collect();
/// # let view = TensorView::new(Dtype::F32, vec![2, 3], &bytes)?;
/// # safetensors::serialize_to_file([("head.weight", view)], None, &path)?;
///
/// let file = WeightsFile::open(&path)?;
/// assert_eq!(file.names().collect::<Vec<_>>(), ["head.weight"]);
/// assert_eq!(file.info("head.weight")?.shape, [2, 3]);
///
/// // A shard: only these 8 bytes are read.
/// assert_eq!(file.read_f32_range("head.weight", 2..4)?, [3.0, 4.0]);
///
/// // A linear layer as PyTorch stores it, laid out as Burn wants it.
/// let weight = file.read_f32("head.weight")?;
/// assert_eq!(transpose(&weight, 2, 3)?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WeightsFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Where the data begins, in bytes from the start of the file.
    offset: u64,
    /// The format's type, where [`DType`] has no such.
    info: Result<TensorInfo, Dtype>,
}

impl WeightsFile {
    /// Opens the file at `path` and validates its header: that it parses, that the tensors' data follow each
    /// other without gap or overlap, that each is as long as its shape and type say, and that together they
    /// fill the file. No data is read.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Open`], [`Read`](CheckpointError::Read), [`Truncated`](CheckpointError::Truncated) or
    /// [`Malformed`](CheckpointError::Malformed).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref().to_path_buf();
        let open = || -> io::Result<(File, u64)> {
            let metadata = fs::metadata(&path)?;
            if metadata.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            // To open a pipe would wait for somebody to write into it.
            if !metadata.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
            }
            let file = File::open(&path)?;
            let len = file.metadata()?.len();
            Ok((file, len))
        };
        let (file, len) = open().map_err(|source| CheckpointError::Open { path: path.clone(), source })?;
        let truncated = |expected| CheckpointError::Truncated { path: path.clone(), expected, found: len };
        let malformed = |reason| CheckpointError::Malformed { path: path.clone(), reason };

        if len < PREFIX {
            return Err(truncated(PREFIX));
        }
        let mut prefix = [0; PREFIX as usize];
        read(&path, &file, &mut prefix, 0)?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > MAX_HEADER {
            return Err(malformed(format!("its header claims {header_len} bytes, of {MAX_HEADER} allowed")));
        }
        let data_start = PREFIX + header_len;
        if data_start > len {
            return Err(truncated(data_start));
        }
        let mut header = vec![0; header_len as usize];
        read(&path, &file, &mut header, PREFIX)?;

        // `SafeTensors::read_metadata` makes the same checks, but wants the data in memory with the header.
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| malformed(error.to_string()))?;
        let end = (metadata.data_len() as u64)
            .checked_add(data_start)
            .ok_or_else(|| malformed("its tensors are larger than any file".to_owned()))?;
        if end > len {
            return Err(truncated(end));
        }
        if end < len {
            return Err(malformed(format!("{} bytes follow the last tensor", len - end)));
        }

        let entry = |info: &safetensors::tensor::TensorInfo| Entry {
            offset: data_start + info.data_offsets.0 as u64,
            info: match dtype(info.dtype) {
                Some(dtype) => Ok(TensorInfo { dtype, shape: info.shape.clone() }),
                None => Err(info.dtype),
            },
        };
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, entry(info))).collect();
        Ok(Self { path, file, tensors })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The type and shape of a tensor.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::UnknownTensor`], which names the most similar ones, or
    /// [`UnsupportedDType`](CheckpointError::UnsupportedDType).
    pub fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        self.entry(name).map(|(info, _)| info)
    }

    /// All values of an f32 tensor.
    ///
    /// # Errors
    ///
    /// Those of [`info`](Self::info), [`CheckpointError::WrongDType`] if it holds another type, and
    /// [`Read`](CheckpointError::Read).
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        self.read_values(name, DType::F32, None, |value: f32| f32::from_bits(u32::from_le(value.to_bits())))
    }

    /// The values of an f32 tensor from element `range.start` to before element `range.end`, counted in
    /// row-major order; only those are read from disk.
    ///
    /// # Errors
    ///
    /// Those of [`read_f32`](Self::read_f32), and [`CheckpointError::OutOfBounds`] if the range is not within
    /// the tensor or ends before it starts.
    pub fn read_f32_range(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        self.read_values(name, DType::F32, Some(range), |value: f32| {
            f32::from_bits(u32::from_le(value.to_bits()))
        })
    }

    /// All values of an i32 tensor.
    ///
    /// # Errors
    ///
    /// Those of [`read_f32`](Self::read_f32).
    pub fn read_i32(&self, name: &str) -> Result<Vec<i32>, CheckpointError> {
        self.read_values(name, DType::I32, None, i32::from_le)
    }

    /// Fills `into` with the elements `range` of a tensor that is there and has them, as the file has them.
    pub(crate) fn read_bytes(
        &self,
        name: &str,
        range: Range<usize>,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (info, offset) = self.entry(name)?;
        read(&self.path, &self.file, into, offset + (range.start * info.dtype.size()) as u64)
    }

    fn entry(&self, name: &str) -> Result<(&TensorInfo, u64), CheckpointError> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(CheckpointError::UnknownTensor {
                path: self.path.clone(),
                name: name.to_owned(),
                nearest: self.nearest(name),
            });
        };
        match &entry.info {
            Ok(info) => Ok((info, entry.offset)),
            Err(dtype) => Err(CheckpointError::UnsupportedDType {
                path: self.path.clone(),
                name: name.to_owned(),
                dtype: dtype.to_string(),
            }),
        }
    }

    fn nearest(&self, name: &str) -> Vec<String> {
        let mut names: Vec<&String> = self.tensors.keys().collect();
        names.sort_by_key(|known| strsim::levenshtein(known, name));
        names.into_iter().take(SUGGESTIONS).cloned().collect()
    }

    /// Reads elements of `T`, which `dtype` stands for; `None` is all of them.
    fn read_values<T: Pod>(
        &self,
        name: &str,
        dtype: DType,
        range: Option<Range<usize>>,
        from_le: impl Fn(T) -> T,
    ) -> Result<Vec<T>, CheckpointError> {
        let (info, offset) = self.entry(name)?;
        if info.dtype != dtype {
            return Err(CheckpointError::WrongDType {
                path: self.path.clone(),
                name: name.to_owned(),
                expected: dtype,
                found: info.dtype,
            });
        }
        let numel = info.numel();
        let range = range.unwrap_or(0..numel);
        if range.start > range.end || range.end > numel {
            return Err(CheckpointError::OutOfBounds {
                path: self.path.clone(),
                name: name.to_owned(),
                range,
                numel,
            });
        }
        // `open` saw a file that holds all of the tensor, which bounds both.
        let start = offset + (range.start * size_of::<T>()) as u64;
        let mut values = vec![T::zeroed(); range.len()];
        read(&self.path, &self.file, bytemuck::cast_slice_mut(&mut values), start)?;
        if cfg!(target_endian = "big") {
            values.iter_mut().for_each(|value| *value = from_le(*value));
        }
        Ok(values)
    }
}

fn read(path: &Path, file: &File, buffer: &mut [u8], offset: u64) -> Result<(), CheckpointError> {
    read_exact_at(file, buffer, offset).map_err(|source| CheckpointError::Read {
        path: path.to_path_buf(),
        offset,
        bytes: buffer.len() as u64,
        source,
    })
}

/// Our name of the format's type, if we have one.
fn dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::I64 => Some(DType::I64),
        Dtype::I32 => Some(DType::I32),
        Dtype::U8 => Some(DType::U8),
        _ => None,
    }
}
