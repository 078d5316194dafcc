//! What ranks of one process show each other of their devices' memory.
//!
//! A window of `zero-comm` is host memory. Ranks that are threads of one process can do without: each hangs out its tensors,
//! and whoever wants one takes it, over whatever connects the devices (CubeCL does so by NCCL, on the tensors' own memory), or
//! directly where both are on the same device. Nobody has to do anything for one who takes, as with windows.
//!
//! Streams of one device wait for each other by events where CubeCL knows that they have to, which is when memory was
//! allocated by one and is used by the other. What was written later it does not know: so who shows something waits
//! until the device has written it, and who has taken something with another thread than that of compute waits as well.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use burn_cubecl::tensor::CubeTensor;
use cubecl::future::block_on;
use zero_comm::{CommError, Communicator, CommunicatorExt, OpKind, ReduceOp, Region, WindowKey};
use zero_core::{ParameterIndex, Rank};

use crate::agreement::give_up;
use crate::arena::Port;
use crate::device_bucket::Written;
use crate::engine::lock;
use crate::windows::Values;

/// Who has come and waits for the others, by a number that is used once.
static MEETING: Mutex<Vec<(i64, Arc<Slot>)>> = Mutex::new(Vec::new());
static NUMBER: AtomicI64 = AtomicI64::new(0);

/// Sends and their receives are put on the streams of two devices one after the other. Devices do them in that order; if it was
/// not the same on both, each would wait for the other.
static TRANSFER: Mutex<()> = Mutex::new(());

/// The longest that one who waits does not look whether the world has failed.
const SLICE: Duration = Duration::from_millis(20);

/// The most tensors that are kept until they have come.
const MOST_TAKEN: usize = 1 << 10;

/// A window without bytes: to read it shows whether the world has failed.
const SIGN_OF_LIFE: WindowKey = WindowKey::new(u64::MAX);

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Notice {
    Shard(ParameterIndex, Values),
    /// The gradients of a rank in the bucket of that number.
    Bucket(usize),
    /// Its part of the sums of the bucket of that number.
    Sums(usize),
}

/// One rank's view of what all ranks of its group show.
#[derive(Debug)]
pub(crate) struct Board {
    comm: Arc<dyn Communicator>,
    /// By rank.
    slots: Vec<Arc<Slot>>,
    is_one_device: bool,
    /// What may not have come yet. Until it has, its owner must not write there: CubeCL keeps the memory that a kernel reads, but
    /// not that which is sent.
    taken: Mutex<Vec<Taken>>,
}

/// A tensor of another device.
struct Taken {
    tensor: CubeTensor,
    /// When it is here.
    come: Written,
    by: ThreadId,
}

impl std::fmt::Debug for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Taken").field("by", &self.by).finish_non_exhaustive()
    }
}

/// What one rank shows.
#[derive(Debug)]
struct Slot {
    port: Port,
    shown: Mutex<HashMap<Notice, CubeTensor>>,
    more: Condvar,
}

struct Nothing;

impl Region for Nothing {
    fn bytes(&self) -> &[u8] {
        &[]
    }
}

impl Board {
    /// A board, if all ranks are threads of one process and their devices reach each other. Collective.
    pub(crate) fn meet(
        comm: &Arc<dyn Communicator>,
        port: Option<&Port>,
    ) -> Result<Option<Arc<Self>>, CommError> {
        /// Leaves the meeting.
        struct Come(i64);

        impl Drop for Come {
            fn drop(&mut self) {
                lock(&MEETING).retain(|(number, _)| *number != self.0);
            }
        }

        if comm.world_size().get() == 1 {
            return Ok(None);
        }
        let come = Come(NUMBER.fetch_add(1, Ordering::Relaxed));
        if let Some(port) = port {
            let slot = Slot { port: port.clone(), shown: Mutex::default(), more: Condvar::new() };
            lock(&MEETING).push((come.0, Arc::new(slot)));
        }
        let (own, mut all) = ([process(), come.0], vec![0_i64; 2 * comm.world_size().get()]);
        comm.all_gather(&own, &mut all, "who shares a process")?;
        let slot_of = |card: &[i64]| {
            let meeting = lock(&MEETING);
            let found = meeting.iter().find(|(number, _)| card == [own[0], *number]);
            found.map(|(_, slot)| Arc::clone(slot))
        };
        let slots: Option<Vec<_>> = all.chunks_exact(2).map(slot_of).collect();
        let slots =
            slots.filter(|slots| port.is_some_and(|port| slots.iter().all(|slot| reaches(&slot.port, port))));
        let mut every = [f64::from(u8::from(slots.is_some()))];
        comm.all_reduce(&mut every, ReduceOp::Min, "whether devices reach each other")?;
        let Some(slots) = slots.filter(|_| every == [1.0]) else { return Ok(None) };
        comm.expose(SIGN_OF_LIFE, Arc::new(Nothing))?;
        comm.fence("boards")?;
        let own = slots[comm.rank().index()].port.client.service_id();
        let is_one_device = slots.iter().all(|slot| slot.port.client.service_id() == own);
        Ok(Some(Arc::new(Self { comm: Arc::clone(comm), slots, is_one_device, taken: Mutex::default() })))
    }

    /// Shows tensors that the device has [written](Self::settle), each in place of what was shown before.
    pub(crate) fn show(&self, tensors: Vec<(Notice, CubeTensor)>) {
        let slot = self.own();
        let mut shown = lock(&slot.shown);
        let before: Vec<_> =
            tensors.into_iter().map(|(notice, tensor)| shown.insert(notice, tensor)).collect();
        drop(shown);
        slot.more.notify_all();
        drop(before);
    }

    /// Waits until the device has done what this thread gave it to do, `written` included.
    pub(crate) fn settle<'a>(
        &self,
        written: impl IntoIterator<Item = &'a CubeTensor>,
        label: &str,
    ) -> Result<(), CommError> {
        let written = written.into_iter().map(|tensor| &tensor.handle);
        self.wait(self.port().client.sync_buffers(written), label)?;
        let here = thread::current().id();
        let come: Vec<_> = lock(&self.taken).extract_if(.., |taken| taken.by == here).collect();
        drop(come);
        Ok(())
    }

    /// Waits until all that any thread took from other devices has come.
    pub(crate) fn settle_all(&self, label: &str) -> Result<(), CommError> {
        let taken = std::mem::take(&mut *lock(&self.taken));
        taken.into_iter().try_for_each(|Taken { tensor, come, .. }| {
            self.wait(come, label)?;
            drop(tensor);
            Ok(())
        })
    }

    /// Waits for a device, no longer than the deadline or until the world fails: its failure is the world's.
    pub(crate) fn wait(&self, written: Written, label: &str) -> Result<(), CommError> {
        let waited = match self.is_one_device {
            true => block_on(written).map_err(|error| Waited::Failed(error.to_string())),
            false => wait(&*self.comm, written, label),
        };
        waited.map_err(|waited| match waited {
            Waited::World(error) => error,
            Waited::Failed(reason) => self.fail(label, &reason),
        })
    }

    /// Ends the world with what is wrong with this rank's device.
    pub(crate) fn fail(&self, label: &str, reason: &str) -> CommError {
        give_up(&*self.comm, OpKind::Read, label, format!("{:?}: {reason}", self.port().device))
    }

    /// Whether this rank shows something.
    pub(crate) fn shows(&self, notice: Notice) -> bool {
        lock(&self.own().shown).contains_key(&notice)
    }

    /// Shows no shards any more, so that nobody else has their memory. Who wants one waits.
    pub(crate) fn withdraw_shards(&self) {
        let before: HashMap<_, _> =
            lock(&self.own().shown).extract_if(|notice, _| matches!(notice, Notice::Shard(..))).collect();
        drop(before);
    }

    /// Does not show something any more.
    pub(crate) fn withdraw(&self, notice: Notice) {
        let before = lock(&self.own().shown).remove(&notice);
        drop(before);
    }

    /// What `rank` shows, on this rank's device.
    pub(crate) fn take(&self, rank: Rank, notice: Notice, label: &str) -> Result<CubeTensor, CommError> {
        self.bring(self.find(rank, notice, label)?, label)
    }

    /// As [`take`](Self::take), of some elements.
    pub(crate) fn take_part(
        &self,
        rank: Rank,
        notice: Notice,
        elements: Range<usize>,
        label: &str,
    ) -> Result<CubeTensor, CommError> {
        let CubeTensor { client, device, handle, dtype, meta, .. } = self.find(rank, notice, label)?;
        let (all, size) = (meta.num_elements(), dtype.size() as u64);
        let handle = handle.offset_start(elements.start as u64 * size);
        let handle = handle.offset_end((all - elements.end) as u64 * size);
        let shape = [elements.len()].into();
        self.bring(CubeTensor::new_contiguous(client, device, shape, handle, dtype), label)
    }

    /// A tensor of any rank's on the device of this one.
    fn bring(&self, tensor: CubeTensor, label: &str) -> Result<CubeTensor, CommError> {
        let own = self.port();
        if tensor.client.service_id() == own.client.service_id() {
            return Ok(tensor);
        }
        if lock(&self.taken).len() >= MOST_TAKEN {
            self.settle_all(label)?;
        }
        let turn = lock(&TRANSFER);
        let brought = tensor.clone().to_client(own.client.clone(), own.device.clone());
        drop(turn);
        let (come, by) = (own.client.sync(), thread::current().id());
        lock(&self.taken).push(Taken { tensor, come, by });
        Ok(brought)
    }

    /// What `rank` shows, where it is.
    pub(crate) fn find(&self, rank: Rank, notice: Notice, label: &str) -> Result<CubeTensor, CommError> {
        let (slot, begin) = (&self.slots[rank.index()], Instant::now());
        loop {
            self.comm.read(rank, SIGN_OF_LIFE, 0, &mut [], label)?;
            let shown = lock(&slot.shown);
            if let Some(tensor) = shown.get(&notice) {
                return Ok(tensor.clone());
            }
            if begin.elapsed() >= self.comm.deadline() {
                let (operation, label) = (OpKind::Read, label.to_owned());
                let after = self.comm.deadline();
                return Err(CommError::Timeout { operation, label, after, missing: vec![rank] });
            }
            // Its owner is in the middle of a step.
            drop(slot.more.wait_timeout(shown, SLICE).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// This rank's way to its device.
    pub(crate) fn port(&self) -> &Port {
        &self.own().port
    }

    fn own(&self) -> &Slot {
        &self.slots[self.comm.rank().index()]
    }
}

/// Why a wait ended that was in vain.
#[derive(Debug)]
enum Waited {
    World(CommError),
    Failed(String),
}

/// Waits in a thread of its own. Where another device never sends, there is no end; then the thread stays behind.
fn wait(comm: &dyn Communicator, written: Written, label: &str) -> Result<(), Waited> {
    let (begin, (sender, receiver)) = (Instant::now(), mpsc::channel());
    let waiting = thread::Builder::new().name(String::from("device")).spawn(move || {
        drop(sender.send(block_on(written)));
    });
    waiting.map_err(|error| Waited::Failed(error.to_string()))?;
    loop {
        match receiver.recv_timeout(SLICE) {
            Ok(written) => return written.map_err(|error| Waited::Failed(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Waited::Failed(String::from("waiting for it panicked")));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        comm.read(comm.rank(), SIGN_OF_LIFE, 0, &mut [], label).map_err(Waited::World)?;
        if begin.elapsed() >= comm.deadline() {
            return Err(Waited::Failed(format!("not done within {:?}", comm.deadline())));
        }
    }
}

/// Whether memory goes from one device to the other without the host.
fn reaches(from: &Port, to: &Port) -> bool {
    let [from, to] = [&from.client, &to.client];
    let (one, other) = (from.service_id(), to.service_id());
    one == other || (one.service == other.service && from.has_device_transport() && to.has_device_transport())
}

/// A number that no other process has.
fn process() -> i64 {
    static PROCESS: OnceLock<i64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()).cast_signed())
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use zero_comm::LocalWorld;
    use zero_core::WorldSize;

    use super::*;

    /// What each of two ranks waits for, and what comes of it.
    fn waits(written: impl Fn(usize) -> Written + Sync, aborts: bool) -> Vec<String> {
        let world = LocalWorld::new(WorldSize::new(2).unwrap()).with_deadline(Duration::from_millis(300));
        let waited = world.run(|comm| {
            comm.expose(SIGN_OF_LIFE, Arc::new(Nothing))?;
            comm.fence("signs of life")?;
            let rank = comm.rank().index();
            if aborts && rank == 1 {
                comm.abort("no more");
                return Ok(String::new());
            }
            Ok::<_, CommError>(format!("{:?}", wait(&*comm, written(rank), "a wait")))
        });
        waited.unwrap_or_else(|error| vec![error.to_string()])
    }

    #[test]
    fn a_wait_ends_with_what_is_waited_for_at_the_deadline_or_with_the_world() {
        assert_eq!(waits(|_| Box::pin(ready(Ok(()))), false), ["Ok(())", "Ok(())"]);
        for waited in waits(|_| Box::pin(pending()), false) {
            assert!(waited.contains("not done within 300ms"), "{waited}");
        }
        for waited in waits(|_| Box::pin(async { panic!("a device is lost") }), false) {
            assert!(waited.contains("panicked"), "{waited}");
        }
        let waited = waits(|_| Box::pin(pending()), true).concat();
        assert!(waited.contains("no more"), "{waited}");
    }
}
