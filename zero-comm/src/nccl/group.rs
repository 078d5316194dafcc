//! Operations that are launched together.

use cudarc::driver::CudaStream;
use zero_core::Rank;

use super::buffer::{DeviceBuffer, DeviceBufferMut};
use super::communicator::NcclCommunicator;
use super::entry::Entry;
use super::error::NcclError;
use crate::arguments::{Argument, Place, check_op};
use crate::request::Request;
use crate::{OpKind, ReduceOp};

/// Operations on device memory that NCCL launches together, which saves a launch for each, and lets messages
/// in both directions go at once.
///
/// Made by [`NcclCommunicator::group`]; nothing happens before [`launch`](Self::launch). Until then wrong
/// arguments are kept, and `launch` returns the first as its error. No operation of a group may write what
/// another of it reads or writes; the borrows make sure of that.
///
/// # Operations
///
/// As in a [`Communicator`](crate::Communicator), every rank calls the same collective operations in the same
/// order, counts and lengths are in elements, and labels are for errors. Unlike there, reductions are taken
/// in NCCL's order and precision, not in rank order: sums of floats depend on its version and on how the
/// devices are connected, sums of integers wrap, and what becomes of NaN is NCCL's choice. The mean of
/// integers is refused. What has no elements, and a group without operations, does nothing.
#[must_use = "nothing happens before `launch`"]
#[derive(Debug)]
pub struct NcclGroup<'a> {
    communicator: &'a NcclCommunicator,
    operations: Vec<Operation<'a>>,
    /// The first operation with wrong arguments, and what is wrong.
    invalid: Option<(OpKind, String, String)>,
}

/// One operation, and its memory as far as it has any.
#[derive(Debug)]
pub(super) struct Operation<'a> {
    pub(super) entry: Entry,
    pub(super) send: Option<DeviceBuffer<'a>>,
    pub(super) receive: Option<DeviceBufferMut<'a>>,
}

impl<'a> NcclGroup<'a> {
    pub(super) const fn new(communicator: &'a NcclCommunicator) -> Self {
        Self { communicator, operations: Vec::new(), invalid: None }
    }

    /// Replaces `buffer`, of one length on all ranks, by the element-wise reduction over all ranks.
    pub fn all_reduce(&mut self, buffer: impl Into<DeviceBufferMut<'a>>, op: ReduceOp, label: &str) {
        let buffer = buffer.into();
        let (dtype, length) = (buffer.dtype(), buffer.len());
        let request = check_op(op, dtype).map(|()| (Request::AllReduce { dtype, length, op }, 0));
        self.add(OpKind::AllReduce, request, None, Some(buffer), label);
    }

    /// Concatenates equal parts: `receive` has world size times as many elements as `send`.
    pub fn all_gather(
        &mut self,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        label: &str,
    ) {
        let send = send.into();
        let counts = vec![send.len(); self.place().size.get()];
        self.all_gather_uneven(send, receive, &counts, label);
    }

    /// Concatenates parts of `counts[r]` elements from rank `r`; `counts` is equal on all ranks.
    ///
    /// Equal parts go faster.
    pub fn all_gather_uneven(
        &mut self,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        counts: &[usize],
        label: &str,
    ) {
        let (send, receive) = (send.into(), receive.into());
        let whole = Argument::new("receive", receive.len(), receive.dtype());
        let part = Argument::new("send", send.len(), send.dtype());
        let request = self.place().check_parts(counts, &whole, &part);
        let request =
            request.map(|()| (Request::AllGather { dtype: send.dtype(), counts: counts.to_vec() }, 0));
        self.add(OpKind::AllGather, request, Some(send), Some(receive), label);
    }

    /// Reduces equal parts: `send` has world size times as many elements as `receive`.
    pub fn reduce_scatter(
        &mut self,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        op: ReduceOp,
        label: &str,
    ) {
        let receive = receive.into();
        let counts = vec![receive.len(); self.place().size.get()];
        self.reduce_scatter_uneven(send, receive, &counts, op, label);
    }

    /// Reduces parts of `counts[r]` elements for rank `r`; `counts` is equal on all ranks.
    ///
    /// Equal parts go faster.
    pub fn reduce_scatter_uneven(
        &mut self,
        send: impl Into<DeviceBuffer<'a>>,
        receive: impl Into<DeviceBufferMut<'a>>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) {
        let (send, receive) = (send.into(), receive.into());
        let whole = Argument::new("send", send.len(), send.dtype());
        let part = Argument::new("receive", receive.len(), receive.dtype());
        let request =
            self.place().check_parts(counts, &whole, &part).and_then(|()| check_op(op, send.dtype()));
        let request = request
            .map(|()| (Request::ReduceScatter { dtype: send.dtype(), counts: counts.to_vec(), op }, 0));
        self.add(OpKind::ReduceScatter, request, Some(send), Some(receive), label);
    }

    /// Replaces `buffer`, of one length on all ranks, by the `root`'s.
    pub fn broadcast(&mut self, buffer: impl Into<DeviceBufferMut<'a>>, root: Rank, label: &str) {
        let buffer = buffer.into();
        let request = self.place().member("root", root).map(|position| {
            let root = self.communicator.members()[position];
            (Request::Broadcast { dtype: buffer.dtype(), length: buffer.len(), root }, position)
        });
        self.add(OpKind::Broadcast, request, None, Some(buffer), label);
    }

    /// Gives `buffer` to rank `to`, which receives it in a launch of its own.
    ///
    /// Messages of one direction between two ranks are received in the order sent.
    pub fn send(&mut self, to: Rank, buffer: impl Into<DeviceBuffer<'a>>, label: &str) {
        let buffer = buffer.into();
        let request = self.place().other("the receiver", to);
        let request =
            request.map(|position| (Request::Send { dtype: buffer.dtype(), length: buffer.len() }, position));
        self.add(OpKind::Send, request, Some(buffer), None, label);
    }

    /// Takes the next message of rank `from` into `buffer`, which has exactly its type and length.
    pub fn receive(&mut self, from: Rank, buffer: impl Into<DeviceBufferMut<'a>>, label: &str) {
        let buffer = buffer.into();
        let request = self.place().other("the sender", from);
        let request = request
            .map(|position| (Request::Receive { dtype: buffer.dtype(), length: buffer.len() }, position));
        self.add(OpKind::Receive, request, None, Some(buffer), label);
    }

    /// Puts the operations on `stream`, which must be one of the communicator's device. Returns when they are
    /// on the stream, not when they are complete: work put on the stream later runs after them, and
    /// [`NcclCommunicator::wait`] waits for them on the host.
    ///
    /// # Errors
    ///
    /// [`CommError::InvalidArgument`](crate::CommError::InvalidArgument) for wrong arguments;
    /// with [`Agreement::Checked`](crate::Agreement::Checked) what the exchange over `control` finds;
    /// [`NcclError::Nccl`] and [`NcclError::Driver`] for what is refused; [`NcclError::Timeout`] if NCCL does
    /// not get as far as launching within the deadline. Each fails the communicator for good, and the world
    /// of `control` with it, unless a rank had merely finished.
    pub fn launch(self, stream: &'a CudaStream) -> Result<(), NcclError> {
        match self.invalid {
            Some((operation, label, reason)) => Err(self.communicator.refuse(operation, &label, reason)),
            None => self.communicator.launch(self.operations, stream),
        }
    }

    fn place(&self) -> Place {
        self.communicator.place()
    }

    fn add(
        &mut self,
        operation: OpKind,
        request: Result<(Request, usize), String>,
        send: Option<DeviceBuffer<'a>>,
        receive: Option<DeviceBufferMut<'a>>,
        label: &str,
    ) {
        let contexts = [
            send.as_ref().and_then(|buffer| buffer.context()),
            receive.as_ref().and_then(|buffer| buffer.context()),
        ];
        let foreign = contexts
            .into_iter()
            .flatten()
            .find_map(|context| self.communicator.foreign("the memory", context));
        let request = request.and_then(|request| foreign.map_or(Ok(request), Err));
        match request {
            Ok((request, partner)) => {
                let entry = Entry { request, label: label.to_owned(), partner };
                self.operations.push(Operation { entry, send, receive });
            }
            Err(reason) => {
                self.invalid.get_or_insert((operation, label.to_owned(), reason));
            }
        }
    }
}
