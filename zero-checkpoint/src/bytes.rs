//! Bytes that lie with somebody else, taken and given by pieces.

use zero_core::DType;

use crate::coordinator::BoxError;

const _: () =
    assert!(cfg!(target_endian = "little"), "files are little-endian, and numbers go into them as they lie");

/// Bytes that are read by pieces, such as a tensor on a disk.
pub trait ReadBytes: Sync {
    /// Fills `into` from the byte at `offset` on. Every byte is asked for once per save.
    ///
    /// # Errors
    ///
    /// Those of whatever holds the bytes.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BoxError>;
}

/// Where bytes go, by pieces.
pub trait WriteBytes {
    /// Puts `bytes` at `offset`. Every byte comes once per load, in any order.
    ///
    /// # Errors
    ///
    /// Those of whatever takes the bytes.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError>;
}

impl<F: FnMut(u64, &[u8]) -> Result<(), BoxError>> WriteBytes for F {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError> {
        self(offset, bytes)
    }
}

/// The elements of this rank's interval, as they are to be saved.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    dtype: DType,
    source: Source<'a>,
}

#[derive(Clone, Copy)]
enum Source<'a> {
    Memory(&'a [u8]),
    Elsewhere(&'a dyn ReadBytes),
}

impl<'a> Data<'a> {
    /// Numbers in memory.
    pub fn f32(values: &'a [f32]) -> Self {
        Self::bytes(DType::F32, bytemuck::cast_slice(values))
    }

    /// Numbers of any type in memory, little-endian.
    pub fn bytes(dtype: DType, bytes: &'a [u8]) -> Self {
        Self { dtype, source: Source::Memory(bytes) }
    }

    /// Numbers that lie elsewhere, little-endian, and are read by pieces. Offsets begin at 0 with the interval.
    pub fn elsewhere(dtype: DType, source: &'a dyn ReadBytes) -> Self {
        Self { dtype, source: Source::Elsewhere(source) }
    }

    /// The type of an element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The length, where it is known.
    pub(crate) fn len(&self) -> Option<usize> {
        match self.source {
            Source::Memory(bytes) => Some(bytes.len()),
            Source::Elsewhere(_) => None,
        }
    }

    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        match self.source {
            Source::Memory(bytes) => {
                let start = usize::try_from(offset)?;
                let from = bytes.get(start..).and_then(|rest| rest.get(..into.len()));
                into.copy_from_slice(from.ok_or("the slice is shorter than its interval")?);
                Ok(())
            }
            Source::Elsewhere(source) => source.read(offset, into),
        }
    }
}

impl std::fmt::Debug for Data<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let source = match self.source {
            Source::Memory(_) => "memory",
            Source::Elsewhere(_) => "elsewhere",
        };
        f.debug_struct("Data").field("dtype", &self.dtype).field("source", &source).finish()
    }
}

/// Where the elements of an interval go, and what type they are to have there.
pub struct Target<'a> {
    pub(crate) dtype: DType,
    pub(crate) place: Place<'a>,
}

pub(crate) enum Place<'a> {
    Memory(&'a mut [u8]),
    Elsewhere(&'a mut dyn WriteBytes),
}

impl<'a> Target<'a> {
    /// Numbers in memory.
    pub fn f32(values: &'a mut [f32]) -> Self {
        Self::bytes(DType::F32, bytemuck::cast_slice_mut(values))
    }

    /// Numbers of any type in memory, little-endian.
    pub fn bytes(dtype: DType, bytes: &'a mut [u8]) -> Self {
        Self { dtype, place: Place::Memory(bytes) }
    }

    /// Numbers that go elsewhere, little-endian, by pieces. Offsets begin at 0 with the interval.
    pub fn elsewhere(dtype: DType, place: &'a mut dyn WriteBytes) -> Self {
        Self { dtype, place: Place::Elsewhere(place) }
    }

    /// The type of an element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The length, where it is known.
    pub(crate) fn len(&self) -> Option<usize> {
        match &self.place {
            Place::Memory(bytes) => Some(bytes.len()),
            Place::Elsewhere(_) => None,
        }
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError> {
        match &mut self.place {
            Place::Memory(all) => {
                let start = usize::try_from(offset)?;
                let into = all.get_mut(start..).and_then(|rest| rest.get_mut(..bytes.len()));
                into.ok_or("the slice is shorter than its interval")?.copy_from_slice(bytes);
                Ok(())
            }
            Place::Elsewhere(place) => place.write(offset, bytes),
        }
    }
}

impl std::fmt::Debug for Target<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}
