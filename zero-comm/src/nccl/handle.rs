//! A communicator of NCCL. The only file that calls its functions.

use std::ffi::{c_int, c_void};
use std::ptr;

use zero_core::DType;

use super::entry::{Primitive, PrimitiveKind};
use super::error::NcclError;
use super::library::{Config, IN_PROGRESS, Library, NO_COLOR, RawCommunicator, RawStream, SUCCESS, UniqueId};
use crate::ReduceOp;

/// One rank's communicator. Dropping it aborts it.
///
/// The device of the communicator must be the calling thread's when a method is called.
pub(super) struct Handle {
    library: &'static Library,
    /// Null when it is gone.
    raw: RawCommunicator,
}

// SAFETY: NCCL takes calls for a communicator from any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Handle {}

/// What NCCL refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) function: &'static str,
    pub(super) code: c_int,
    pub(super) message: String,
}

impl Refusal {
    /// The error for a refusal while `during` was done.
    pub(super) fn during(self, during: String) -> NcclError {
        let Self { function, code, message } = self;
        NcclError::Nccl { during, function, code, message }
    }
}

/// Makes what ranks need to find each other; one of them calls it.
pub(super) fn unique_id(library: &Library) -> Result<UniqueId, Refusal> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: NCCL writes the whole identifier.
    let code = unsafe { (library.get_unique_id)(&mut id) };
    accept(library, ptr::null_mut(), "ncclGetUniqueId", code)?;
    Ok(id)
}

/// An error unless `code` says that the call went well, or has begun to.
fn accept(
    library: &Library,
    raw: RawCommunicator,
    function: &'static str,
    code: c_int,
) -> Result<(), Refusal> {
    match code {
        SUCCESS | IN_PROGRESS => Ok(()),
        _ => Err(Refusal { function, code, message: library.explain(code, raw) }),
    }
}

impl Handle {
    /// Begins to join `size` ranks as the one at `position`.
    pub(super) fn join(
        library: &'static Library,
        size: usize,
        id: UniqueId,
        position: usize,
    ) -> Result<Self, Refusal> {
        let mut config = Config::NON_BLOCKING;
        let mut handle = Self { library, raw: ptr::null_mut() };
        // SAFETY: NCCL copies id and configuration, and writes the communicator before it returns and, as of
        // version 2.18, not later.
        let code = unsafe {
            (library.init_rank_config)(&mut handle.raw, to_int(size), id, to_int(position), &mut config)
        };
        accept(library, handle.raw, "ncclCommInitRankConfig", code)?;
        Ok(handle)
    }

    /// `Some` when everything that was begun is done.
    pub(super) fn ready(&mut self) -> Result<Option<()>, Refusal> {
        const FUNCTION: &str = "ncclCommGetAsyncError";
        let mut state = SUCCESS;
        // SAFETY: the communicator is there; NCCL writes one number.
        self.there(FUNCTION, |library, raw| unsafe { (library.get_async_error)(raw, &mut state) })?;
        accept(self.library, self.raw, FUNCTION, state)?;
        Ok((state == SUCCESS).then_some(()))
    }

    /// Begins to split the communicator. Nothing may be under way on it.
    pub(super) fn split(&mut self, color: Option<usize>, key: usize) -> Result<Splitting, Refusal> {
        let splitting = Splitting { library: self.library, child: Box::into_raw(Box::new(ptr::null_mut())) };
        let color = color.map_or(NO_COLOR, to_int);
        self.there("ncclCommSplit", |library, raw| {
            // SAFETY: the communicator is there. NCCL writes the new one at any time until this one is ready
            // or aborted; the memory it writes is freed by `Splitting::finish` alone.
            unsafe { (library.split)(raw, color, to_int(key), splitting.child, ptr::null_mut()) }
        })?;
        Ok(splitting)
    }

    /// Puts all `calls` on `stream`, as one group.
    ///
    /// # Safety
    ///
    /// The stream is one of the communicator's device. The addresses are of memory there that is as long as
    /// the calls say, stays, and is not used otherwise until the calls have completed on the stream or the
    /// communicator is aborted.
    pub(super) unsafe fn issue(&mut self, calls: &[Primitive], stream: RawStream) -> Result<(), Refusal> {
        // SAFETY: no condition; each start has its end below, whatever fails in between.
        accept(self.library, self.raw, "ncclGroupStart", unsafe { (self.library.group_start)() })?;
        let issued = calls.iter().try_for_each(|call| {
            // SAFETY: by the contract of this function.
            unsafe { self.call(call, stream) }
        });
        // SAFETY: the group was started above, on this thread.
        let code = unsafe { (self.library.group_end)() };
        issued.and(accept(self.library, self.raw, "ncclGroupEnd", code))
    }

    /// # Safety
    ///
    /// As [`issue`](Self::issue).
    unsafe fn call(&mut self, call: &Primitive, stream: RawStream) -> Result<(), Refusal> {
        let Primitive { kind, from, into, count, dtype } = *call;
        let (from, into) = (from as *const c_void, into as *mut c_void);
        let dtype = dtype_code(dtype);
        let function = match kind {
            PrimitiveKind::AllReduce(_) => "ncclAllReduce",
            PrimitiveKind::AllGather => "ncclAllGather",
            PrimitiveKind::ReduceScatter(_) => "ncclReduceScatter",
            PrimitiveKind::Broadcast { .. } => "ncclBroadcast",
            PrimitiveKind::Reduce { .. } => "ncclReduce",
            PrimitiveKind::Send { .. } => "ncclSend",
            PrimitiveKind::Receive { .. } => "ncclRecv",
        };
        // SAFETY: the communicator is there; memory and stream are by the contract of this function.
        self.there(function, |library, raw| unsafe {
            match kind {
                PrimitiveKind::AllReduce(op) => {
                    (library.all_reduce)(from, into, count, dtype, op_code(op), raw, stream)
                }
                PrimitiveKind::AllGather => (library.all_gather)(from, into, count, dtype, raw, stream),
                PrimitiveKind::ReduceScatter(op) => {
                    (library.reduce_scatter)(from, into, count, dtype, op_code(op), raw, stream)
                }
                PrimitiveKind::Broadcast { root } => {
                    (library.broadcast)(from, into, count, dtype, to_int(root), raw, stream)
                }
                PrimitiveKind::Reduce { op, root } => {
                    (library.reduce)(from, into, count, dtype, op_code(op), to_int(root), raw, stream)
                }
                PrimitiveKind::Send { to } => (library.send)(from, count, dtype, to_int(to), raw, stream),
                PrimitiveKind::Receive { from } => {
                    (library.receive)(into, count, dtype, to_int(from), raw, stream)
                }
            }
        })
    }

    /// Begins to end the communicator: what was launched completes first.
    pub(super) fn finalize(&mut self) -> Result<(), Refusal> {
        // SAFETY: the communicator is there.
        self.there("ncclCommFinalize", |library, raw| unsafe { (library.finalize)(raw) })
    }

    /// Frees a communicator that is finalized.
    pub(super) fn destroy(&mut self) -> Result<(), Refusal> {
        // SAFETY: the communicator is there, and is forgotten below.
        let destroyed = self.there("ncclCommDestroy", |library, raw| unsafe { (library.destroy)(raw) });
        self.raw = ptr::null_mut();
        destroyed
    }

    /// Ends everything that is under way, and frees the communicator. Nothing happens if it is gone.
    pub(super) fn abort(&mut self) {
        if self.raw.is_null() {
            return;
        }
        // SAFETY: the communicator is there, and is forgotten below.
        let aborted = self.there("ncclCommAbort", |library, raw| unsafe { (library.abort)(raw) });
        self.raw = ptr::null_mut();
        if let Err(Refusal { code, message, .. }) = aborted {
            tracing::warn!(code, message, "NCCL did not abort a communicator");
        }
    }

    /// Calls `function`, unless the communicator is gone.
    fn there(
        &self,
        function: &'static str,
        call: impl FnOnce(&Library, RawCommunicator) -> c_int,
    ) -> Result<(), Refusal> {
        if self.raw.is_null() {
            let message = "the communicator was aborted".to_owned();
            return Err(Refusal { function, code: SUCCESS, message });
        }
        accept(self.library, self.raw, function, call(self.library, self.raw))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A split that was begun. One that does not come to its end leaks a pointer's memory, as NCCL may still
/// write to it.
pub(super) struct Splitting {
    library: &'static Library,
    child: *mut RawCommunicator,
}

impl Splitting {
    /// The new communicator; `None` for a rank without color.
    ///
    /// # Safety
    ///
    /// The communicator that is split has become ready since.
    pub(super) unsafe fn finish(self) -> Option<Handle> {
        // SAFETY: it came from a box, is freed here alone, and NCCL has written it for the last time, by the
        // contract of this function.
        let raw = *unsafe { Box::from_raw(self.child) };
        (!raw.is_null()).then_some(Handle { library: self.library, raw })
    }
}

/// Ranks fit NCCL's integers: who has more has failed to start so many long before.
fn to_int(number: usize) -> c_int {
    number.try_into().unwrap_or(c_int::MAX)
}

/// `ncclDataType_t`.
const fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// `ncclRedOp_t`.
const fn op_code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

#[cfg(test)]
mod tests;
