//! What ranks of one process show each other of their devices' memory.
//!
//! A window of `zero-comm` is host memory. Ranks that are threads of one process can do without: each hangs out its tensors,
//! and whoever wants one takes it: directly where both are on the same device, else by copies over whatever connects the devices.
//!
//! Streams of one device wait for each other by events where CubeCL knows that they have to, which is when memory was
//! allocated by one and is used by the other. What was written later it does not know: so who shows something waits
//! until the device has written it. Between devices, it is the host that waits, never one device for another.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use zero_comm::{CommError, Communicator, CommunicatorExt, ReduceOp};
use zero_core::{ParameterIndex, Rank};

use crate::arena::{self, Port};
use crate::cube;
use crate::engine::lock;
use crate::rank_device::{RankDevice, SLICE};
use crate::transports::{BucketParts, Carrier, Carry, DeviceCollectives, DeviceWindows};
use crate::windows::{Values, Windows};

/// Who has come and waits for the others, by a number that is used once.
static MEETING: Mutex<Vec<(i64, Arc<Slot>)>> = Mutex::new(Vec::new());
static NUMBER: AtomicI64 = AtomicI64::new(0);

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Notice {
    Shard(ParameterIndex, Values),
    /// The gradients of a rank in the bucket of that number.
    Bucket(usize),
    /// Its part of the sums of the bucket of that number.
    Sums(usize),
    /// By which others find out whether they read what the rank has.
    Sign,
}

/// One rank's view of what all ranks of its group show.
#[derive(Debug)]
pub(crate) struct Board {
    device: RankDevice,
    /// By rank.
    slots: Vec<Arc<Slot>>,
    /// What brings tensors from other devices, if ranks have several.
    carrier: Option<Box<dyn Carrier>>,
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
        Self::meet_by(find_carrier, comm, port)
    }

    /// As [`meet`](Self::meet), with what connects this rank's device to others found by `find`, or why nothing does.
    pub(crate) fn meet_by(
        find: impl Fn(&Port, &[&Port]) -> Result<Box<dyn Carrier>, String>,
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
        let found = slots.zip(port).and_then(|(slots, port)| {
            let ports = slots.iter().map(|slot| &slot.port);
            let others: Vec<_> = ports.filter(|other| !is_same(&other.client, &port.client)).collect();
            let carrier = if others.is_empty() { Ok(None) } else { find(port, &others).map(Some) };
            match carrier {
                Ok(carrier) => Some((slots, carrier, port)),
                Err(reason) => {
                    let rank = comm.rank();
                    tracing::info!(%rank, reason, "parameters and gradients go through host memory");
                    None
                }
            }
        });
        // Nobody leaves before all have found each other.
        let mut every = [f64::from(u8::from(found.is_some()))];
        comm.all_reduce(&mut every, ReduceOp::Min, "whether devices reach each other")?;
        let Some((slots, carrier, port)) = found.filter(|_| every == [1.0]) else { return Ok(None) };
        let device = RankDevice { comm: Arc::clone(comm), port: port.clone() };
        let board = Self { device, slots, carrier };
        board.try_out(&all)?;
        Ok(Some(Arc::new(board)))
    }

    /// Makes sure that what comes from other devices is what is there; `cards` has two numbers of each rank that together
    /// nobody else has.
    fn try_out(&self, cards: &[i64]) -> Result<(), CommError> {
        const LABEL: &str = "trying out connections of devices";
        if self.carrier.is_none() {
            return Ok(());
        }
        let (device, ranks) = (&self.device, || self.device.comm.world_size().ranks());
        let signs: Vec<_> = cards.chunks_exact(2).map(|card| (card[0] ^ card[1]).cast_unsigned()).collect();
        let own = device.sign(signs[device.comm.rank().index()]);
        device.settle(&[&own], LABEL)?;
        self.hang_out([(Notice::Sign, own)]);
        let shown = ranks().map(|rank| self.look(rank, Notice::Sign, LABEL));
        let brought = self.bring(shown.collect::<Result<_, _>>()?, LABEL)?;
        let mut read = ranks().zip(signs).zip(&brought);
        read.try_for_each(|((rank, sign), read)| device.compare(rank, sign, read, LABEL))
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

    /// Tensors of any ranks' on the device of this one.
    fn bring(&self, tensors: Vec<CubeTensor>, label: &str) -> Result<Vec<CubeTensor>, CommError> {
        let Some(carrier) = &self.carrier else { return Ok(tensors) };
        let is_here = |tensor: &CubeTensor| is_same(&tensor.client, &self.device.port.client);
        let place = |tensor: &CubeTensor| match is_here(tensor) {
            true => Ok(tensor.clone()),
            false => self.device.empty(tensor.meta.num_elements(), cube::dtype_of(tensor), label),
        };
        let here: Vec<_> = tensors.iter().map(place).collect::<Result<_, _>>()?;
        let foreign = tensors.iter().zip(&here).filter(|(tensor, _)| !is_here(tensor));
        let copies: Vec<_> = foreign.map(|(from, into)| Carry { from, into, start: 0 }).collect();
        if !copies.is_empty() {
            carrier.carry(&self.device, &copies, label)?;
        }
        Ok(here)
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
        self.device
            .settle(&shards.iter().map(|(_, shard)| shard).collect::<Vec<_>>(), "updated parameters")?;
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

    fn whole(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        waits: bool,
    ) -> Result<CubeTensor, CommError> {
        let (notice, spec) = (Notice::Shard(parameter, windows.values), windows.parameter(parameter));
        let (device, name, numel) = (&self.device, spec.name(), spec.numel());
        let ranges = spec.partition().ranges().filter(|(_, range)| !range.is_empty());
        let shards = ranges.map(|(rank, range)| Ok((range.start, self.look(rank, notice, name)?)));
        let shards: Vec<_> = shards.collect::<Result<_, CommError>>()?;
        let Some(carrier) = &self.carrier else {
            // Their owners change shards in place unless somebody has them.
            let kept = if waits { shards.clone() } else { Vec::new() };
            let whole = arena::join(&device.port, windows.dtype, numel, shards);
            let whole = whole.map_err(|error| device.fail(name, error))?;
            if waits {
                device.settle(&[&whole], name)?;
            }
            drop(kept);
            return Ok(whole);
        };
        let whole = device.empty(numel, windows.dtype, name)?;
        let copies = shards.iter().map(|(start, shard)| Carry { from: shard, into: &whole, start: *start });
        carrier.carry(device, &copies.collect::<Vec<_>>(), name)?;
        Ok(whole)
    }

    fn shard(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        rank: Rank,
    ) -> Result<CubeTensor, CommError> {
        self.look(rank, Notice::Shard(parameter, windows.values), windows.parameter(parameter).name())
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
        let addends = comm.world_size().ranks().map(|rank| {
            let bucket = self.look(rank, notice, label)?;
            Ok(cube::part(bucket, own.clone()))
        });
        self.bring(addends.collect::<Result<_, CommError>>()?, label)
    }

    fn all_gather(
        &self,
        parts: &BucketParts<'_>,
        part: CubeTensor,
    ) -> Result<Vec<(usize, CubeTensor)>, CommError> {
        let BucketParts { comm, label, .. } = *parts;
        let notice = Notice::Sums(parts.bucket);
        self.device.settle(&[&part], label)?;
        self.hang_out([(notice, part)]);
        comm.barrier(&format!("{label}: summed"))?;
        let sums = parts.of_ranks().map(|(rank, range)| Ok((range.start, self.look(rank, notice, label)?)));
        let (starts, sums): (Vec<_>, Vec<_>) =
            sums.collect::<Result<Vec<_>, CommError>>()?.into_iter().unzip();
        Ok(starts.into_iter().zip(self.bring(sums, label)?).collect())
    }

    fn finish(&self, parts: &BucketParts<'_>, sums: Option<&CubeTensor>) -> Result<(), CommError> {
        self.device.settle(sums.as_slice(), parts.label)?;
        parts.comm.barrier(&format!("{}: taken", parts.label))?;
        let mut shown = lock(&self.own().shown);
        let before =
            [Notice::Bucket(parts.bucket), Notice::Sums(parts.bucket)].map(|notice| shown.remove(&notice));
        drop(shown);
        drop(before);
        Ok(())
    }
}

/// Whether both are ways to one device.
fn is_same(one: &Client, other: &Client) -> bool {
    one.service_id() == other.service_id()
}

/// What connects a device to others, or why nothing does.
fn find_carrier(own: &Port, others: &[&Port]) -> Result<Box<dyn Carrier>, String> {
    #[cfg(feature = "cuda")]
    return Ok(Box::new(crate::cuda::Peers::new(own, others.iter().copied())?));
    #[cfg(not(feature = "cuda"))]
    Err(format!("nothing connects {:?} and {:?}", own.device, others[0].device))
}

/// A number that no other process has.
pub(crate) fn process() -> i64 {
    static PROCESS: OnceLock<i64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()).cast_signed())
}
