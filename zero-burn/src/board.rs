//! What ranks of one process show each other of their devices' memory.
//!
//! A window of `zero-comm` is host memory. Ranks that are threads of one process can do without: each hangs out its tensors,
//! and whoever wants one takes it, over whatever connects the devices (CubeCL does so by NCCL, on the tensors' own memory), or
//! directly where both are on the same device.
//!
//! Streams of one device wait for each other by events where CubeCL knows that they have to, which is when memory was
//! allocated by one and is used by the other. What was written later it does not know: so who shows something waits
//! until the device has written it, and who has taken something with another thread than that of compute waits as well.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator, CommunicatorExt, ReduceOp};
use zero_core::{ParameterIndex, Rank};

use crate::arena::{self, Port};
use crate::cube;
use crate::device_bucket::Written;
use crate::engine::lock;
use crate::rank_device::{RankDevice, SLICE};
use crate::transports::{BucketParts, DeviceCollectives, DeviceWindows};
use crate::windows::{Values, Windows};

/// Who has come and waits for the others, by a number that is used once.
static MEETING: Mutex<Vec<(i64, Arc<Slot>)>> = Mutex::new(Vec::new());
static NUMBER: AtomicI64 = AtomicI64::new(0);

/// Sends and their receives are put on the streams of two devices one after the other. Devices do them in that order; if it was
/// not the same on both, each would wait for the other.
static TRANSFER: Mutex<()> = Mutex::new(());

/// The most tensors that are kept until they have come.
const MOST_TAKEN: usize = 1 << 10;

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Notice {
    Shard(ParameterIndex, Values),
    /// The gradients of a rank in the bucket of that number.
    Bucket(usize),
    /// Its part of the sums of the bucket of that number.
    Sums(usize),
}

/// One rank's view of what all ranks of its group show.
#[derive(Debug)]
pub(crate) struct Board {
    device: RankDevice,
    /// By rank.
    slots: Vec<Arc<Slot>>,
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
        // Nobody leaves before all have found each other.
        let mut every = [f64::from(u8::from(slots.is_some()))];
        comm.all_reduce(&mut every, ReduceOp::Min, "whether devices reach each other")?;
        let Some(slots) = slots.filter(|_| every == [1.0]) else { return Ok(None) };
        let port = slots[comm.rank().index()].port.clone();
        let own = port.client.service_id();
        let is_alone = slots.iter().all(|slot| slot.port.client.service_id() == own);
        let device = RankDevice { comm: Arc::clone(comm), port, is_alone };
        Ok(Some(Arc::new(Self { device, slots, taken: Mutex::default() })))
    }

    /// Shows tensors that the device has written, each in place of what was shown before.
    fn hang_out(&self, tensors: impl IntoIterator<Item = (Notice, CubeTensor)>) {
        let slot = self.own();
        let mut shown = lock(&slot.shown);
        let before: Vec<_> =
            tensors.into_iter().map(|(notice, tensor)| shown.insert(notice, tensor)).collect();
        drop(shown);
        slot.more.notify_all();
        drop(before);
    }

    /// What `rank` shows, on this rank's device.
    fn take(&self, rank: Rank, notice: Notice, label: &str) -> Result<CubeTensor, CommError> {
        self.bring(self.look(rank, notice, label)?, label)
    }

    /// As [`take`](Self::take), of some elements.
    fn take_part(
        &self,
        rank: Rank,
        notice: Notice,
        elements: Range<usize>,
        label: &str,
    ) -> Result<CubeTensor, CommError> {
        self.bring(cube::part(self.look(rank, notice, label)?, elements), label)
    }

    /// A tensor of any rank's on the device of this one.
    fn bring(&self, tensor: CubeTensor, label: &str) -> Result<CubeTensor, CommError> {
        let own = &self.device.port;
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
    fn look(&self, rank: Rank, notice: Notice, label: &str) -> Result<CubeTensor, CommError> {
        let slot = &self.slots[rank.index()];
        self.device.until(rank, label, || {
            let shown = lock(&slot.shown);
            let found = shown.get(&notice).cloned();
            if found.is_none() {
                // Its owner is in the middle of a step.
                drop(slot.more.wait_timeout(shown, SLICE).unwrap_or_else(PoisonError::into_inner));
            }
            Ok(found)
        })
    }

    fn own(&self) -> &Slot {
        &self.slots[self.device.comm.rank().index()]
    }
}

impl DeviceWindows for Board {
    fn device(&self) -> &RankDevice {
        &self.device
    }

    fn copies(&self) -> bool {
        false
    }

    fn show(&self, windows: &Windows, shards: Vec<(ParameterIndex, CubeTensor)>) -> Result<(), CommError> {
        self.settle(&shards.iter().map(|(_, shard)| shard).collect::<Vec<_>>(), "updated parameters")?;
        let notice = |parameter| Notice::Shard(parameter, windows.values);
        self.hang_out(shards.into_iter().map(|(parameter, shard)| (notice(parameter), shard)));
        Ok(())
    }

    fn withdraw(&self) {
        let before: HashMap<_, _> =
            lock(&self.own().shown).extract_if(|notice, _| matches!(notice, Notice::Shard(..))).collect();
        drop(before);
    }

    fn is_withdrawn(&self, parameter: ParameterIndex, values: Values) -> bool {
        !lock(&self.own().shown).contains_key(&Notice::Shard(parameter, values))
    }

    fn whole(&self, windows: &Windows, parameter: ParameterIndex) -> Result<CubeTensor, CommError> {
        let (notice, spec) = (Notice::Shard(parameter, windows.values), windows.parameter(parameter));
        let ranges = spec.partition().ranges().filter(|(_, range)| !range.is_empty());
        let shards = ranges.map(|(rank, range)| Ok((range.start, self.take(rank, notice, spec.name())?)));
        let shards: Vec<_> = shards.collect::<Result<_, CommError>>()?;
        let whole = arena::join(&self.device.port, windows.dtype, spec.numel(), shards);
        whole.map_err(|error| self.device.fail(spec.name(), error))
    }

    fn shard(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        rank: Rank,
    ) -> Result<CubeTensor, CommError> {
        self.look(rank, Notice::Shard(parameter, windows.values), windows.parameter(parameter).name())
    }

    fn settle(&self, written: &[&CubeTensor], label: &str) -> Result<(), CommError> {
        self.device.settle(written, label)?;
        let here = thread::current().id();
        let come: Vec<_> = lock(&self.taken).extract_if(.., |taken| taken.by == here).collect();
        drop(come);
        Ok(())
    }

    fn settle_all(&self, label: &str) -> Result<(), CommError> {
        let taken = std::mem::take(&mut *lock(&self.taken));
        taken.into_iter().try_for_each(|Taken { tensor, come, .. }| {
            self.device.wait(come, label)?;
            drop(tensor);
            Ok(())
        })
    }
}

impl DeviceCollectives for Board {
    fn device(&self) -> &RankDevice {
        &self.device
    }

    fn all_to_all(&self, parts: &BucketParts<'_>, bucket: CubeTensor) -> Result<Vec<CubeTensor>, CommError> {
        let BucketParts { comm, label, .. } = *parts;
        let notice = Notice::Bucket(parts.bucket);
        self.hang_out([(notice, bucket)]);
        comm.barrier(&format!("{label}: full"))?;
        let own = parts.of_ranks().find(|(rank, _)| *rank == comm.rank());
        let Some((_, own)) = own else { return Ok(Vec::new()) };
        comm.world_size().ranks().map(|rank| self.take_part(rank, notice, own.clone(), label)).collect()
    }

    fn all_gather(
        &self,
        parts: &BucketParts<'_>,
        part: CubeTensor,
    ) -> Result<Vec<(usize, CubeTensor)>, CommError> {
        let BucketParts { comm, label, .. } = *parts;
        let notice = Notice::Sums(parts.bucket);
        self.settle(&[&part], label)?;
        self.hang_out([(notice, part)]);
        comm.barrier(&format!("{label}: summed"))?;
        let all = parts
            .of_ranks()
            .map(|(rank, range)| Ok((range.start, self.take_part(rank, notice, 0..range.len(), label)?)));
        all.collect()
    }

    fn finish(&self, parts: &BucketParts<'_>, sums: Option<&CubeTensor>) -> Result<(), CommError> {
        self.settle(sums.as_slice(), parts.label)?;
        parts.comm.barrier(&format!("{}: taken", parts.label))?;
        let mut shown = lock(&self.own().shown);
        let before =
            [Notice::Bucket(parts.bucket), Notice::Sums(parts.bucket)].map(|notice| shown.remove(&notice));
        drop(shown);
        drop(before);
        Ok(())
    }
}

/// Whether memory goes from one device to the other without the host.
fn reaches(from: &Port, to: &Port) -> bool {
    let [from, to] = [&from.client, &to.client];
    let (one, other) = (from.service_id(), to.service_id());
    one == other || (one.service == other.service && from.has_device_transport() && to.has_device_transport())
}

/// A number that no other process has.
pub(crate) fn process() -> i64 {
    static PROCESS: OnceLock<i64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()).cast_signed())
}
