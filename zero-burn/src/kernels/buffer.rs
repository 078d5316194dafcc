//! Buffers on a device.

use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;
use zero_core::DType;

use super::error::{KernelError, Role};
use super::table::Extent;
use super::words::Format;

/// A buffer on a device, and the type and number of its elements.
///
/// Elements are of `f32`, `bf16` or `f16`. Kernels read and write 16-bit elements by their bits, so that the device need not
/// know the types.
#[derive(Clone, Debug)]
pub struct Buffer {
    handle: Handle,
    dtype: DType,
    len: usize,
}

impl Buffer {
    /// The first `len` elements of `handle`, counted from where the handle begins.
    ///
    /// # Errors
    ///
    /// [`KernelError`] if the type is none that kernels work on, or the handle has less memory.
    pub fn new(handle: Handle, dtype: DType, len: usize) -> Result<Self, KernelError> {
        if Format::of(dtype).is_none() {
            return Err(KernelError::ElementType { dtype });
        }
        let bytes = handle.size_in_used();
        if len as u64 > bytes / dtype.size() as u64 {
            return Err(KernelError::Short { len, dtype, bytes });
        }
        let offset = handle.offset_start.unwrap_or(0);
        if !offset.is_multiple_of(dtype.size() as u64) {
            return Err(KernelError::Misplaced { offset, dtype });
        }
        Ok(Self { handle, dtype, len })
    }

    /// Its memory.
    pub const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The type of its elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// How many elements it has.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// That the elements from `start` are within, for `row`.
    pub(super) fn check_row(
        &self,
        role: Role,
        row: usize,
        start: usize,
        len: usize,
    ) -> Result<(), KernelError> {
        match start.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(KernelError::OutOfRange { row, role, start, len, elements: self.len }),
        }
    }

    /// Where a row of it lies.
    pub(super) fn extent(
        &self,
        role: Role,
        row: usize,
        start: usize,
        len: usize,
        written: bool,
    ) -> Extent<impl Ord + Copy + use<>> {
        let (memory, offset, _) = self.handle.clone().binding().claim_key();
        let byte = |element: usize| offset + (element * self.dtype.size()) as u64;
        Extent { memory, begin: byte(start), end: byte(start + len), row, role, written }
    }

    /// As kernels of `client` see it.
    pub(super) fn bind(&self, client: &Client, role: Role) -> Result<Bound, KernelError> {
        let Some(format) = Format::of(self.dtype) else {
            return Err(KernelError::ElementType { dtype: self.dtype });
        };
        if self.handle.service != client.service_id() {
            return Err(KernelError::OtherDevice { role });
        }
        // Devices bind memory at multiples of an alignment; what is beyond one is counted in elements.
        let properties = client.properties();
        let offset = self.handle.offset_start.unwrap_or(0);
        let beyond = offset % properties.memory.alignment.max(1);
        let mut handle = self.handle.clone();
        handle.offset_start = (offset > beyond).then(|| offset - beyond);
        let shift = beyond as usize / self.dtype.size();
        // Kernels count elements in u32, and the last cube counts a little further.
        let (len, limit) = (self.len.saturating_add(shift), u32::MAX as usize - (1 << 20));
        if len > limit {
            return Err(KernelError::TooLong { len, limit, device: properties.identity.name.clone() });
        }
        Ok(Bound { handle, format, shift })
    }
}

/// A buffer as kernels see it: words of 32 bits.
pub(super) struct Bound {
    pub(super) handle: Handle,
    pub(super) format: Format,
    /// How many elements behind the bound memory's beginning the buffer begins.
    pub(super) shift: usize,
}

impl Bound {
    /// The argument of a launch.
    pub(super) fn argument(&self) -> BufferArg {
        argument(&self.handle)
    }

    /// The argument of a launch that reads vectors of so many words, if there is one: devices bind no less than that.
    pub(super) fn vectors_argument(&self, client: &Client, words: usize) -> BufferArg {
        let bytes = (words * size_of::<u32>()) as u64;
        match self.handle.size_in_used() >= bytes {
            true => self.argument(),
            false => argument(&client.empty(bytes as usize)),
        }
    }
}

/// A handle as words of 32 bits.
pub(super) fn argument(handle: &Handle) -> BufferArg {
    let words = (handle.size_in_used() / 4) as usize;
    // SAFETY: the handle has that many words. A kernel touches no element that the checks of its rows haven't found within
    // the handle; the second half of a last word is memory that the allocator rounds up to.
    unsafe { BufferArg::from_raw_parts(handle.clone(), words) }
}
