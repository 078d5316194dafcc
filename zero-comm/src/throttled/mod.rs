//! A communicator that takes as long as one over a given link.

mod link;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use zero_core::{Bytes, DType, Rank, WorldSize};

pub use self::link::{Link, LinkError, Traffic};
use crate::clock::SystemClock;
use crate::lock::lock;
use crate::{Buffer, BufferMut, Clock, CommError, Communicator, FlightRecord, ReduceOp, Region, WindowKey};

/// A communicator on which each operation takes at least the time that a [`Link`] needs for it, so that
/// overlap can be measured without a network.
///
/// The time counts from the begin of the operation, waiting for other ranks included; what is left of it
/// when the operation is done, the rank sleeps. Each rank has one link, which its groups share: the bytes of
/// operations that overlap pass one after the other, in the order in which the operations began, while their
/// latencies overlap. An operation that fails returns at once.
///
/// A rank that sleeps is late for its next operation, so deadlines must be longer than the sleeps.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use zero_comm::{CommError, Communicator, Link, LocalWorld, Throttled};
/// use zero_core::WorldSize;
///
/// let slow = Link::new(Duration::from_millis(2), 1e6).unwrap();
/// LocalWorld::new(WorldSize::new(2).unwrap()).run(|comm| {
///     let comm = Throttled::new(comm, slow);
///     let begun = std::time::Instant::now();
///     comm.barrier("slow")?;
///     assert!(begun.elapsed() >= Duration::from_millis(2));
///     Ok::<_, CommError>(())
/// })?;
/// # Ok::<_, zero_comm::WorldError<CommError>>(())
/// ```
#[derive(Debug)]
pub struct Throttled {
    inner: Arc<dyn Communicator>,
    wire: Arc<Wire>,
}

/// The one link of a rank.
#[derive(Debug)]
struct Wire {
    link: Link,
    clock: Arc<dyn Clock>,
    /// When the bytes of all operations that have begun have passed.
    free: Mutex<Duration>,
}

impl Wire {
    /// Takes the link for an operation that begins now, and says when it is over.
    fn take(&self, traffic: Traffic) -> Duration {
        let now = self.clock.now();
        if traffic == Traffic::default() {
            return now;
        }
        let mut free = lock(&self.free);
        *free = now.max(*free).saturating_add(self.link.occupancy(traffic));
        free.saturating_add(self.link.delay(traffic))
    }
}

impl Throttled {
    /// The communicator `inner` on a `link`.
    pub fn new(inner: Arc<dyn Communicator>, link: Link) -> Self {
        Self::with_clock(inner, link, Arc::new(SystemClock::new()))
    }

    /// As [`new`](Self::new), by another clock than the system's.
    pub fn with_clock(inner: Arc<dyn Communicator>, link: Link, clock: Arc<dyn Clock>) -> Self {
        Self { inner, wire: Arc::new(Wire { link, clock, free: Mutex::default() }) }
    }

    /// Does `operation`, and lets it last as long as `traffic` needs.
    fn carry<T>(
        &self,
        traffic: Traffic,
        operation: impl FnOnce(&dyn Communicator) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let over = self.wire.take(traffic);
        let value = operation(&*self.inner)?;
        self.wire.clock.sleep_until(over);
        Ok(value)
    }

    /// The bytes of what `counts` give to, or take from, other ranks.
    fn others(&self, counts: &[usize], dtype: DType) -> Bytes {
        let here = self.inner.rank().index();
        let others = counts.iter().enumerate().filter(|(peer, _)| *peer != here);
        others.map(|(_, count)| Bytes::of(*count, dtype)).sum()
    }
}

/// The memory of a buffer.
const fn bytes(buffer: &[u8]) -> Bytes {
    Bytes::new(buffer.len() as u64)
}

impl Communicator for Throttled {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.inner.world_size()
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }

    fn set_deadline(&self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }

    fn all_reduce_raw(&self, buffer: BufferMut<'_>, op: ReduceOp, label: &str) -> Result<(), CommError> {
        let traffic = Traffic::all_reduce(self.world_size(), bytes(buffer.bytes()));
        self.carry(traffic, |inner| inner.all_reduce_raw(buffer, op, label))
    }

    fn all_gather_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        let traffic = Traffic::all_gather(self.world_size(), bytes(receive.bytes()), bytes(send.bytes()));
        self.carry(traffic, |inner| inner.all_gather_raw(send, receive, counts, label))
    }

    fn reduce_scatter_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        let traffic = Traffic::reduce_scatter(self.world_size(), bytes(send.bytes()), bytes(receive.bytes()));
        self.carry(traffic, |inner| inner.reduce_scatter_raw(send, receive, counts, op, label))
    }

    fn broadcast_raw(&self, buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError> {
        let traffic = Traffic::broadcast(self.world_size(), bytes(buffer.bytes()));
        self.carry(traffic, |inner| inner.broadcast_raw(buffer, root, label))
    }

    fn all_to_all_raw(
        &self,
        send: Buffer<'_>,
        send_counts: &[usize],
        receive: BufferMut<'_>,
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        let out = self.others(send_counts, send.dtype());
        let back = self.others(receive_counts, receive.dtype());
        self.carry(Traffic::all_to_all(self.world_size(), out, back), |inner| {
            inner.all_to_all_raw(send, send_counts, receive, receive_counts, label)
        })
    }

    fn send_raw(&self, to: Rank, buffer: Buffer<'_>, label: &str) -> Result<(), CommError> {
        let traffic = Traffic::message(bytes(buffer.bytes()));
        self.carry(traffic, |inner| inner.send_raw(to, buffer, label))
    }

    fn receive_raw(&self, from: Rank, buffer: BufferMut<'_>, label: &str) -> Result<(), CommError> {
        let traffic = Traffic::message(bytes(buffer.bytes()));
        self.carry(traffic, |inner| inner.receive_raw(from, buffer, label))
    }

    fn barrier(&self, label: &str) -> Result<(), CommError> {
        self.carry(Traffic::barrier(self.world_size()), |inner| inner.barrier(label))
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let traffic = Traffic::barrier(self.world_size());
        let group = self.carry(traffic, |inner| inner.split(color, key, label))?;
        Ok(group
            .map(|inner| -> Arc<dyn Communicator> { Arc::new(Self { inner, wire: Arc::clone(&self.wire) }) }))
    }

    fn ranks_of_host(&self) -> Vec<Rank> {
        self.inner.ranks_of_host()
    }

    fn expose(&self, key: WindowKey, region: Arc<dyn Region>) -> Result<(), CommError> {
        self.inner.expose(key, region)
    }

    fn copies_windows(&self) -> bool {
        self.inner.copies_windows()
    }

    fn withdraw(&self, key: WindowKey) -> Result<(), CommError> {
        self.inner.withdraw(key)
    }

    fn read(
        &self,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        label: &str,
    ) -> Result<(), CommError> {
        let own = peer == self.rank();
        let traffic = if own { Traffic::default() } else { Traffic::read(bytes(into)) };
        self.carry(traffic, |inner| inner.read(peer, key, offset, into, label))
    }

    fn fence(&self, label: &str) -> Result<(), CommError> {
        self.carry(Traffic::barrier(self.world_size()), |inner| inner.fence(label))
    }

    fn flight(&self) -> Vec<FlightRecord> {
        self.inner.flight()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
