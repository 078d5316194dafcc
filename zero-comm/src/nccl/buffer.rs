//! Device memory that an operation reads or writes, without its element type.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceSlice, SyncOnDrop};
use zero_core::DType;

use crate::Element;

/// Borrowed memory of a CUDA device whose element type is known at run time.
///
/// Made from a [`CudaSlice`] or a [`CudaView`], whose uses on several streams cudarc keeps in order.
pub struct DeviceBuffer<'a>(Memory<'a>);

/// Mutably borrowed memory of a CUDA device whose element type is known at run time.
///
/// Made from a [`CudaSlice`] or a [`CudaViewMut`], whose uses on several streams cudarc keeps in order.
pub struct DeviceBufferMut<'a>(Memory<'a>);

/// The address of memory for work on a stream, and what must be dropped when the work is on the stream.
pub(super) type Claim<'a> = (u64, Option<SyncOnDrop<'a>>);

struct Memory<'a> {
    dtype: DType,
    length: usize,
    /// Where the memory was allocated; `None` if only the caller knows.
    context: Option<Arc<CudaContext>>,
    claim: Box<dyn FnOnce(&'a CudaStream) -> Claim<'a> + 'a>,
}

impl<'a> Memory<'a> {
    fn tracked<T: Element, S: DeviceSlice<T> + 'a>(
        slice: S,
        claim: fn(S, &'a CudaStream) -> (u64, SyncOnDrop<'a>),
    ) -> Self {
        Self {
            dtype: T::DTYPE,
            length: slice.len(),
            context: Some(Arc::clone(slice.stream().context())),
            claim: Box::new(move |stream| {
                let (address, used) = claim(slice, stream);
                (address, Some(used))
            }),
        }
    }

    fn raw(address: u64, dtype: DType, length: usize) -> Self {
        Self { dtype, length, context: None, claim: Box::new(move |_| (address, None)) }
    }
}

macro_rules! common {
    ($name:literal, $buffer:ident) => {
        impl<'a> $buffer<'a> {
            /// The type of one element.
            pub const fn dtype(&self) -> DType {
                self.0.dtype
            }

            /// The number of elements.
            pub const fn len(&self) -> usize {
                self.0.length
            }

            /// Whether there are no elements.
            pub const fn is_empty(&self) -> bool {
                self.0.length == 0
            }

            /// Where the memory was allocated, if that is known.
            pub(super) fn context(&self) -> Option<&CudaContext> {
                self.0.context.as_deref()
            }

            /// Makes `stream` wait for earlier uses of the memory.
            pub(super) fn claim(self, stream: &'a CudaStream) -> Claim<'a> {
                (self.0.claim)(stream)
            }
        }

        impl fmt::Debug for $buffer<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($name, "({} x {})"), self.len(), self.dtype())
            }
        }
    };
}

common!("DeviceBuffer", DeviceBuffer);
common!("DeviceBufferMut", DeviceBufferMut);

impl DeviceBuffer<'_> {
    /// Memory that is not cudarc's: `length` elements of `dtype` at the device address `address`.
    ///
    /// # Safety
    ///
    /// The memory is allocated on the device of the communicator it is used with, and aligned for `dtype`.
    /// Until the operation it is passed to has completed on its stream, it stays allocated and nothing writes
    /// it; whatever wrote it before is ordered before that stream.
    pub unsafe fn from_raw(address: u64, dtype: DType, length: usize) -> Self {
        Self(Memory::raw(address, dtype, length))
    }
}

impl DeviceBufferMut<'_> {
    /// Memory that is not cudarc's: `length` elements of `dtype` at the device address `address`.
    ///
    /// # Safety
    ///
    /// The memory is allocated on the device of the communicator it is used with, and aligned for `dtype`.
    /// Until the operation it is passed to has completed on its stream, it stays allocated and nothing else
    /// reads or writes it; whatever did before is ordered before that stream.
    pub unsafe fn from_raw(address: u64, dtype: DType, length: usize) -> Self {
        Self(Memory::raw(address, dtype, length))
    }
}

impl<'a, T: Element> From<CudaView<'a, T>> for DeviceBuffer<'a> {
    fn from(view: CudaView<'a, T>) -> Self {
        Self(Memory::tracked(view, CudaView::view_ptr))
    }
}

impl<'a, T: Element> From<&'a CudaSlice<T>> for DeviceBuffer<'a> {
    fn from(slice: &'a CudaSlice<T>) -> Self {
        slice.as_view().into()
    }
}

impl<'a, T: Element> From<CudaViewMut<'a, T>> for DeviceBufferMut<'a> {
    fn from(view: CudaViewMut<'a, T>) -> Self {
        Self(Memory::tracked(view, CudaViewMut::view_ptr_mut))
    }
}

impl<'a, T: Element> From<&'a mut CudaSlice<T>> for DeviceBufferMut<'a> {
    fn from(slice: &'a mut CudaSlice<T>) -> Self {
        slice.as_view_mut().into()
    }
}
