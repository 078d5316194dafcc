//! Memory that an operation reads or writes, without its element type.

use std::fmt;

use zero_core::DType;

use crate::Element;

/// A borrowed slice of elements whose type is known at run time.
///
/// It is made from a typed slice only, so its bytes are always aligned for [`dtype`](Self::dtype) and
/// hold a whole number of elements.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl<'a> Buffer<'a> {
    /// The elements in `bytes`, which are aligned for `dtype` and hold a whole number of them.
    pub(crate) const fn from_bytes(bytes: &'a [u8], dtype: DType) -> Self {
        Self { bytes, dtype }
    }

    /// The type of one element.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements in native byte order.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements; `None` unless they are of type `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::cast_slice(self.bytes))
    }
}

impl<'a, T: Element> From<&'a [T]> for Buffer<'a> {
    fn from(elements: &'a [T]) -> Self {
        Self { bytes: bytemuck::cast_slice(elements), dtype: T::DTYPE }
    }
}

impl fmt::Debug for Buffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} x {})", self.len(), self.dtype)
    }
}

/// A mutably borrowed slice of elements whose type is known at run time.
///
/// Like [`Buffer`], it is made from a typed slice only.
pub struct BufferMut<'a> {
    bytes: &'a mut [u8],
    dtype: DType,
}

impl BufferMut<'_> {
    /// The type of one element.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements in native byte order.
    pub const fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// The elements in native byte order; every bit pattern is valid.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The elements; `None` unless they are of type `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&[T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::cast_slice(self.bytes))
    }

    /// The elements; `None` unless they are of type `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Option<&mut [T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::cast_slice_mut(self.bytes))
    }

    /// The same memory, for a shorter time.
    pub(crate) const fn reborrow(&mut self) -> BufferMut<'_> {
        BufferMut { bytes: self.bytes, dtype: self.dtype }
    }

    /// The same memory, to read.
    pub const fn as_buffer(&self) -> Buffer<'_> {
        Buffer { bytes: self.bytes, dtype: self.dtype }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for BufferMut<'a> {
    fn from(elements: &'a mut [T]) -> Self {
        Self { bytes: bytemuck::cast_slice_mut(elements), dtype: T::DTYPE }
    }
}

impl fmt::Debug for BufferMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferMut({} x {})", self.len(), self.dtype)
    }
}
