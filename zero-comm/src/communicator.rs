//! One rank's place in a group.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use zero_core::{Rank, WorldSize};

use crate::{Buffer, BufferMut, CommError, FlightRecord, ReduceOp, Region, WindowKey};

/// One rank's place in a group of ranks, and all they do together.
///
/// What a backend implements; callers use the typed methods of [`CommunicatorExt`](crate::CommunicatorExt).
///
/// # Collective operations
///
/// `all_reduce_raw`, `all_gather_raw`, `reduce_scatter_raw`, `broadcast_raw`, `all_to_all_raw`, `barrier`,
/// `split` and `fence` are collective: every rank of the group calls the same ones in the same order, and
/// each returns when its buffers are its own again. Calls of one rank from several threads are taken one
/// after the other, in the order of arrival; to overlap operations, [`split`](Self::split) a group for each.
///
/// The *label* is for people: it names the parameter or the purpose in errors. Two labels that are both
/// non-empty and differ are a [`CommError::Mismatch`] even if all else agrees, because ranks that reduce
/// different parameters together are wrong however well the lengths fit.
///
/// # Errors
///
/// Every wait ends: with the operation, at the [`deadline`](Self::deadline) ([`CommError::Timeout`]), or at
/// once when a rank is gone ([`CommError::PeerLost`]), gives up ([`CommError::Aborted`]) or comes with
/// another operation ([`CommError::Mismatch`]). These fail the world for good: each later call of each rank
/// returns the first cause at once. The exceptions are what every rank concerned learns alike:
/// [`CommError::Overflow`], and the errors of [`read`](Self::read), after which the group goes on. A rank
/// that has merely finished fails only the operations that need it.
///
/// After an error the contents of buffers that were to be written are unspecified.
pub trait Communicator: Send + Sync + Debug {
    /// This rank, counted within the group.
    fn rank(&self) -> Rank;

    /// The number of ranks in the group.
    fn world_size(&self) -> WorldSize;

    /// How long an operation of this communicator waits for other ranks.
    fn deadline(&self) -> Duration;

    /// Makes this rank wait `deadline` long, from its next operation in this group on, and in groups
    /// [`split`](Self::split) off it later.
    fn set_deadline(&self, deadline: Duration);

    /// Replaces `buffer`, of one length on all ranks, by the element-wise reduction over all ranks.
    ///
    /// # Errors
    ///
    /// As all collective operations; [`CommError::Overflow`] for integers.
    fn all_reduce_raw(&self, buffer: BufferMut<'_>, op: ReduceOp, label: &str) -> Result<(), CommError>;

    /// Concatenates what the ranks send, in rank order, into everybody's `receive`.
    ///
    /// `counts[r]` is the number of elements that rank `r` sends, so `send` has `counts[rank]` and `receive`
    /// has `sum(counts)` elements; `counts` is equal on all ranks.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn all_gather_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        label: &str,
    ) -> Result<(), CommError>;

    /// Reduces `send` element-wise over all ranks and gives rank `r` the `r`-th part of the result.
    ///
    /// `counts[r]` is the length of that part, so `send` has `sum(counts)` and `receive` has `counts[rank]`
    /// elements; `counts` is equal on all ranks.
    ///
    /// # Errors
    ///
    /// As all collective operations; [`CommError::Overflow`] for integers.
    fn reduce_scatter_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError>;

    /// Replaces `buffer`, of one length on all ranks, by the `root`'s.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn broadcast_raw(&self, buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError>;

    /// Gives rank `r` the `r`-th part of `send`, and takes this rank's part from every rank, in rank order.
    ///
    /// `send` is cut by `send_counts`, `receive` by `receive_counts`, both in elements, one count per rank.
    /// What rank `a` sends to `b` is what `b` receives from `a`.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn all_to_all_raw(
        &self,
        send: Buffer<'_>,
        send_counts: &[usize],
        receive: BufferMut<'_>,
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError>;

    /// Gives `buffer` to rank `to`, and returns when that rank has received it.
    ///
    /// Between two ranks, messages of one direction are received in the order sent. They take no part in the
    /// order of collective operations, and sends and receives of one rank to several peers may overlap on
    /// several threads.
    ///
    /// # Errors
    ///
    /// As collective operations of the two; both get [`CommError::Mismatch`] if types or lengths differ.
    /// A rank cannot send to itself.
    fn send_raw(&self, to: Rank, buffer: Buffer<'_>, label: &str) -> Result<(), CommError>;

    /// Takes the next message of rank `from` into `buffer`, which has exactly its type and length.
    ///
    /// # Errors
    ///
    /// As [`send_raw`](Self::send_raw).
    fn receive_raw(&self, from: Rank, buffer: BufferMut<'_>, label: &str) -> Result<(), CommError>;

    /// Waits for all ranks.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn barrier(&self, label: &str) -> Result<(), CommError>;

    /// Makes a group of each set of ranks that call with one `color`, ordered by (`key`, rank here).
    ///
    /// A rank without color joins no group and gets `None`, but takes part in the call. Groups have windows
    /// and an order of operations of their own.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError>;

    /// The ranks of the group that run on this rank's host, itself among them, in order. They share its cores, memory
    /// and disks. Waits for nobody.
    fn ranks_of_host(&self) -> Vec<Rank> {
        self.world_size().ranks().collect()
    }

    /// Lets the ranks of the group read `region` under `key`, in place of what was there. Waits for nobody.
    ///
    /// # Errors
    ///
    /// Only those of a failed world.
    fn expose(&self, key: WindowKey, region: Arc<dyn Region>) -> Result<(), CommError>;

    /// Whether [`expose`](Self::expose) copies what it shows to where others can read it: then windows take memory of
    /// their own, and need not follow a region whose content moves. Waits for nobody.
    fn copies_windows(&self) -> bool {
        false
    }

    /// Takes the window back; nothing happens if there is none. Waits for nobody.
    ///
    /// # Errors
    ///
    /// Only those of a failed world.
    fn withdraw(&self, key: WindowKey) -> Result<(), CommError>;

    /// Fills `into` from the window `key` of `peer`, from byte `offset` on. The own window can be read too.
    ///
    /// Never waits for the peer, whatever that does meanwhile. Everything exposed or withdrawn before the
    /// last [`fence`](Self::fence) is seen; what has changed since may be. The windows of a rank that has
    /// finished can be read for as long as the group exists: who is done first must not take the others'
    /// last pass from them.
    ///
    /// # Errors
    ///
    /// [`CommError::WindowMissing`], [`CommError::WindowBounds`], [`CommError::InvalidArgument`] if the peer
    /// is outside the group, and those of a failed world.
    fn read(
        &self,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        label: &str,
    ) -> Result<(), CommError>;

    /// Waits for all ranks; reads after it see all that any rank exposed or withdrew before it.
    ///
    /// # Errors
    ///
    /// As all collective operations.
    fn fence(&self, label: &str) -> Result<(), CommError>;

    /// The last [`FlightRecord::KEPT`] operations of this rank, in all its groups, oldest first.
    ///
    /// Reads of windows are not among them: they wait for nobody.
    fn flight(&self) -> Vec<FlightRecord>;

    /// Fails the world: every pending and later call of all its ranks, in all groups, returns
    /// [`CommError::Aborted`] with this rank and the `reason`. The first failure of a world stays its cause.
    fn abort(&self, reason: &str);
}
