//! A communicator that fails where a plan says so.

mod error;
mod plan;

use std::process;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use zero_core::{Rank, WorldSize};

pub use self::error::FaultPlanError;
pub use self::plan::{Fault, FaultKind, FaultPlan};
use crate::clock::SystemClock;
use crate::lock::lock;
use crate::{
    Buffer, BufferMut, Clock, CommError, Communicator, CommunicatorExt, FlightRecord, OpKind, ReduceOp,
    Region, WindowKey,
};

/// How often a rank that stays out of an operation looks whether the others have given up.
const LOOK: Duration = Duration::from_millis(1);

/// A communicator whose rank suffers the faults of a [`FaultPlan`], for tests and drills.
///
/// The operations of the rank (collective ones, sends, receives and reads) are counted from 1, over the world
/// and all groups split off it. With several threads, the order is that in which they come.
///
/// ```
/// use std::sync::Arc;
///
/// use zero_comm::{CommError, Communicator, CommunicatorExt, FaultPlan, Faulty, LocalWorld, ReduceOp};
/// use zero_core::WorldSize;
///
/// let plan: FaultPlan = "rank=1,op=2,corrupt".parse()?;
/// let world = LocalWorld::new(WorldSize::new(2).unwrap());
/// let sums = world.run(|comm| {
///     let comm = Faulty::new(comm, &plan).map_err(|error| error.to_string())?;
///     let sum = || comm.all_reduce_value(1_i32, ReduceOp::Sum, "count").map_err(|error| error.to_string());
///     Ok::<_, String>([sum()?, sum()?])
/// })?;
/// assert_eq!(sums, [[2, 2 + (1 << 30)]; 2]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Communicator>,
    drill: Arc<Drill>,
}

/// The faults of one rank.
#[derive(Debug)]
struct Drill {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// How many operations have begun.
    operations: u64,
    /// What has not happened yet.
    pending: Vec<Fault>,
}

impl Faulty {
    /// The communicator `inner`, of a whole world, with the faults that `plan` has for its rank.
    ///
    /// # Errors
    ///
    /// [`FaultPlanError::NoSuchRank`] if the plan names a rank outside the world, on all ranks.
    pub fn new(inner: Arc<dyn Communicator>, plan: &FaultPlan) -> Result<Self, FaultPlanError> {
        Self::with_clock(inner, plan, Arc::new(SystemClock::new()))
    }

    /// As [`new`](Self::new), by another clock than the system's.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_clock(
        inner: Arc<dyn Communicator>,
        plan: &FaultPlan,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, FaultPlanError> {
        let size = inner.world_size();
        if let Some(fault) = plan.faults().iter().find(|fault| !size.contains(fault.rank)) {
            return Err(FaultPlanError::NoSuchRank { rank: fault.rank, size });
        }
        let pending = plan.faults().iter().filter(|fault| fault.rank == inner.rank()).copied().collect();
        let state = Mutex::new(State { operations: 0, pending });
        Ok(Self { inner, drill: Arc::new(Drill { clock, state }) })
    }

    /// How many operations this rank has begun, so that a drill can be planned from a run without faults.
    pub fn operations(&self) -> u64 {
        lock(&self.drill.state).operations
    }

    /// The faults of this rank that have not happened yet; a drill that ends with some has not tested them.
    pub fn pending(&self) -> Vec<Fault> {
        lock(&self.drill.state).pending.clone()
    }

    /// Begins an operation, which has `data` or not; says whether that is to be corrupted.
    fn begin(&self, operation: OpKind, label: &str, data: &[u8]) -> Result<bool, CommError> {
        let mut corrupt = false;
        for fault in self.drill.due(!data.is_empty()) {
            tracing::warn!(%fault, %operation, label, "planned fault");
            match fault.kind {
                FaultKind::Drop => return Err(self.stay_out(operation, label, fault)),
                FaultKind::Delay(time) => {
                    let clock = &self.drill.clock;
                    clock.sleep_until(clock.now().saturating_add(time));
                }
                FaultKind::Corrupt => corrupt = true,
                FaultKind::Kill => kill(),
                FaultKind::Panic => panic!("planned fault {fault} at {operation} {label:?}"),
            }
        }
        Ok(corrupt)
    }

    /// Waits until the others have given up on this rank, and returns what they learnt.
    fn stay_out(&self, operation: OpKind, label: &str, fault: Fault) -> CommError {
        let clock = &self.drill.clock;
        // The others may come later than this rank, and then wait as long as their deadline says.
        let until = clock.now().saturating_add(self.deadline().saturating_mul(2));
        while clock.now() < until {
            if let Err(error) = self.inner.check(operation, label) {
                return error;
            }
            clock.sleep_until(clock.now().saturating_add(LOOK));
        }
        let reason = format!("planned fault {fault} at {operation} {label:?}, which no rank waited for");
        self.inner.give_up(operation, label, &reason)
    }

    /// Does an operation that sends `data`.
    fn send(
        &self,
        operation: OpKind,
        label: &str,
        data: Buffer<'_>,
        act: impl FnOnce(Buffer<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if !self.begin(operation, label, data.bytes())? {
            return act(data);
        }
        let bytes = data.bytes();
        // Of eight bytes each, so that the copy is aligned for every element.
        let mut copy = vec![0_u64; bytes.len().div_ceil(size_of::<u64>())];
        let copy = &mut bytemuck::cast_slice_mut(&mut copy)[..bytes.len()];
        copy.copy_from_slice(bytes);
        invert(copy, data.dtype().size());
        act(Buffer::from_bytes(copy, data.dtype()))
    }
}

impl Drill {
    /// Counts an operation, and takes the faults that happen with it.
    fn due(&self, has_data: bool) -> Vec<Fault> {
        let mut state = lock(&self.state);
        state.operations += 1;
        let operations = state.operations;
        let (due, pending) = state.pending.drain(..).partition(|fault| {
            fault.operation.get() <= operations && (has_data || fault.kind != FaultKind::Corrupt)
        });
        state.pending = pending;
        due
    }
}

/// Inverts one bit of each element of `size` bytes; twice is as if never.
fn invert(bytes: &mut [u8], size: usize) {
    for element in bytes.chunks_exact_mut(size) {
        // Little-endian: the second bit from above, which changes a float's exponent.
        element[size - 1] ^= 0x40;
    }
}

/// Ends the process as the kernel does when memory runs out.
fn kill() -> ! {
    // An error leaves what is below.
    let _ = kill_process(getpid(), Signal::KILL);
    process::abort()
}

impl Communicator for Faulty {
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

    fn all_reduce_raw(&self, mut buffer: BufferMut<'_>, op: ReduceOp, label: &str) -> Result<(), CommError> {
        if self.begin(OpKind::AllReduce, label, buffer.bytes())? {
            // What the operation leaves of it is its result, so this needs no copy.
            let size = buffer.dtype().size();
            invert(buffer.bytes_mut(), size);
        }
        self.inner.all_reduce_raw(buffer, op, label)
    }

    fn all_gather_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        self.send(OpKind::AllGather, label, send, |send| {
            self.inner.all_gather_raw(send, receive, counts, label)
        })
    }

    fn reduce_scatter_raw(
        &self,
        send: Buffer<'_>,
        receive: BufferMut<'_>,
        counts: &[usize],
        op: ReduceOp,
        label: &str,
    ) -> Result<(), CommError> {
        self.send(OpKind::ReduceScatter, label, send, |send| {
            self.inner.reduce_scatter_raw(send, receive, counts, op, label)
        })
    }

    fn broadcast_raw(&self, mut buffer: BufferMut<'_>, root: Rank, label: &str) -> Result<(), CommError> {
        let corrupt = self.begin(OpKind::Broadcast, label, buffer.bytes())?;
        let size = buffer.dtype().size();
        if corrupt && root == self.rank() {
            invert(buffer.bytes_mut(), size);
        }
        let result = self.inner.broadcast_raw(buffer.reborrow(), root, label);
        if corrupt {
            // The root gets its own data back, another rank a corrupted copy.
            invert(buffer.bytes_mut(), size);
        }
        result
    }

    fn all_to_all_raw(
        &self,
        send: Buffer<'_>,
        send_counts: &[usize],
        receive: BufferMut<'_>,
        receive_counts: &[usize],
        label: &str,
    ) -> Result<(), CommError> {
        self.send(OpKind::AllToAll, label, send, |send| {
            self.inner.all_to_all_raw(send, send_counts, receive, receive_counts, label)
        })
    }

    fn send_raw(&self, to: Rank, buffer: Buffer<'_>, label: &str) -> Result<(), CommError> {
        self.send(OpKind::Send, label, buffer, |buffer| self.inner.send_raw(to, buffer, label))
    }

    fn receive_raw(&self, from: Rank, mut buffer: BufferMut<'_>, label: &str) -> Result<(), CommError> {
        let corrupt = self.begin(OpKind::Receive, label, buffer.bytes())?;
        self.inner.receive_raw(from, buffer.reborrow(), label)?;
        if corrupt {
            let size = buffer.dtype().size();
            invert(buffer.bytes_mut(), size);
        }
        Ok(())
    }

    fn barrier(&self, label: &str) -> Result<(), CommError> {
        self.begin(OpKind::Barrier, label, &[])?;
        self.inner.barrier(label)
    }

    fn split(
        &self,
        color: Option<u64>,
        key: u64,
        label: &str,
    ) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        self.begin(OpKind::Split, label, &[])?;
        let group = self.inner.split(color, key, label)?;
        Ok(group.map(|inner| -> Arc<dyn Communicator> {
            Arc::new(Self { inner, drill: Arc::clone(&self.drill) })
        }))
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
        let corrupt = self.begin(OpKind::Read, label, into)?;
        self.inner.read(peer, key, offset, into, label)?;
        if corrupt {
            invert(into, 1);
        }
        Ok(())
    }

    fn fence(&self, label: &str) -> Result<(), CommError> {
        self.begin(OpKind::Fence, label, &[])?;
        self.inner.fence(label)
    }

    fn flight(&self) -> Vec<FlightRecord> {
        self.inner.flight()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
