//! Shards on devices, shown by ranks that are processes.
//!
//! A process cannot take another's tensors, but it can read memory that the other shares. So each rank copies its shards to
//! such memory, and shows in a window of the host where they lie: a table with a handle of the memory, the first byte and how
//! many there are, for each parameter. It is a sequence lock: its version grows with every change and is 0 in the middle of
//! one, and who reads looks at it before and after, and reads again if it has changed.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn_cubecl::tensor::CubeTensor;
use zero_comm::{CommError, Communicator, CommunicatorExt, WindowKey};
use zero_core::{DType, ParameterIndex, Rank};

use crate::cube;
use crate::engine::lock;
use crate::rank_device::RankDevice;
use crate::transports::DeviceWindows;
use crate::windows::{Values, Windows};

/// Where shards begin is a multiple of this.
const ALIGNMENT: usize = 256;

/// What others find a block of memory by.
pub(crate) type MemoryHandle = [u8; 72];

const WORD: usize = size_of::<u64>();
/// Bytes of a table for each parameter.
const ENTRY: usize = 2 * WORD + size_of::<MemoryHandle>();

/// The label of collective operations of `find`.
const FINDING: &str = "whether processes read each other's devices";

/// How long one sleeps who waits for a table.
const POLL: Duration = Duration::from_millis(1);

/// The version of a table whose owner uses the memory for something else.
const GONE: u64 = u64::MAX;

/// What ends the windows of engines that are gone. Until another engine of this process needs memory, others read them.
static LEFT: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());

/// Memory of a rank's device that other processes of the host read.
pub(crate) trait SharedMemory: fmt::Debug + Send + Sync + 'static {
    type Block: fmt::Debug + Send + Sync;

    fn device(&self) -> &RankDevice;

    /// Memory of at least so many bytes, or why there is none.
    fn allocate(&self, bytes: usize) -> Result<Self::Block, String>;

    fn handle(&self, block: &Self::Block) -> MemoryHandle;

    /// Finds a block of another rank, or says why it does not.
    fn reach(&self, handle: MemoryHandle) -> Result<(), String>;

    /// Copies tensors, each to the byte where it begins, when the device has written them. They are there on return.
    fn write(
        &self,
        block: &Self::Block,
        tensors: &[(usize, &CubeTensor)],
        label: &str,
    ) -> Result<(), CommError>;

    /// A tensor of so many elements on this rank's device, put together out of blocks that were reached. It is there on return.
    fn join(
        &self,
        dtype: DType,
        numel: usize,
        pieces: &[Piece],
        label: &str,
    ) -> Result<CubeTensor, CommError>;
}

/// Bytes of another rank's block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) handle: MemoryHandle,
    /// The first of them.
    pub(crate) from: usize,
    pub(crate) bytes: usize,
    /// Where they belong, in bytes.
    pub(crate) into: usize,
}

/// What ranks show each other in such memory.
#[derive(Debug)]
pub(crate) struct ProcessWindows<M: SharedMemory> {
    memory: Arc<M>,
    /// What this rank shows.
    compute: Mutex<Published<M::Block>>,
    masters: Mutex<Published<M::Block>>,
}

/// One kind of values of this rank's shards.
#[derive(Debug)]
struct Published<B> {
    blocks: Vec<B>,
    /// By parameter.
    places: Vec<Option<Place>>,
    version: u64,
}

/// Where a shard lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    block: usize,
    start: usize,
    bytes: usize,
}

impl<B> Published<B> {
    const NOTHING: Self = Self { blocks: Vec::new(), places: Vec::new(), version: 0 };

    /// Gives each of these shards a place, unless it is empty: where it has been, or in a new block, of which the bytes are
    /// returned.
    fn assign(&mut self, shards: impl IntoIterator<Item = (ParameterIndex, usize)>) -> usize {
        let (block, mut end) = (self.blocks.len(), 0);
        for (parameter, bytes) in shards.into_iter().filter(|(_, bytes)| *bytes > 0) {
            let at = parameter.index();
            self.places.resize(self.places.len().max(at + 1), None);
            let place = &mut self.places[at];
            if place.is_none_or(|place| place.bytes != bytes) {
                *place = Some(Place { block, start: end, bytes });
                end = (end + bytes).next_multiple_of(ALIGNMENT);
            }
        }
        end
    }

    /// What others read.
    fn table(&self, version: u64, handle: impl Fn(&B) -> MemoryHandle) -> Vec<u8> {
        let mut table = version.to_le_bytes().to_vec();
        for place in &self.places {
            // There is no block where there was no memory for it.
            let entry = place.and_then(|Place { block, start, bytes }| {
                Some((start, bytes, handle(self.blocks.get(block)?)))
            });
            let (start, bytes, handle) = entry.unwrap_or((0, 0, [0; _]));
            [start, bytes].iter().for_each(|word| table.extend((*word as u64).to_le_bytes()));
            table.extend(handle);
        }
        table
    }
}

/// Where a rank shows its table.
fn key(values: Values) -> WindowKey {
    WindowKey::new(u64::MAX - 1 - u64::from(values == Values::Master))
}

/// Shows a rank's table, under a version.
fn expose<M: SharedMemory>(
    memory: &M,
    values: Values,
    published: &Published<M::Block>,
    version: u64,
) -> Result<(), CommError> {
    let table = published.table(version, |block| memory.handle(block));
    memory.device().comm.expose(key(values), Arc::new(table))
}

/// The next number of some bytes.
fn take_word(bytes: &mut &[u8]) -> u64 {
    let (word, rest) = bytes.split_first_chunk().expect("tables have whole numbers");
    *bytes = rest;
    u64::from_le_bytes(*word)
}

/// What every rank brings, if all do; or else nothing, and why is logged. Collective.
fn bring(comm: &dyn Communicator, mine: Result<&[u8], &str>) -> Result<Option<Vec<Vec<u8>>>, CommError> {
    let mut own = vec![u8::from(mine.is_ok())];
    own.extend(mine.unwrap_or_else(|reason| reason.as_bytes()));
    let mut all = comm.all_gather_bytes(&own, FINDING)?;
    for (rank, brought) in all.iter_mut().enumerate() {
        if brought.remove(0) == 0 {
            let reason = String::from_utf8_lossy(brought);
            tracing::info!(rank, %reason, "parameters go through host memory");
            return Ok(None);
        }
    }
    Ok(Some(all))
}

impl<M: SharedMemory> ProcessWindows<M> {
    /// Windows, if every rank reaches the memory of every other; `memory` is this rank's, or why it has none. Collective.
    pub(crate) fn find(
        comm: &dyn Communicator,
        memory: Result<M, String>,
    ) -> Result<Option<Arc<Self>>, CommError> {
        let shown = memory.and_then(|memory| Ok((memory.allocate(WORD)?, memory)));
        // What each writes there: nothing that could be there already.
        let own_sign = RandomState::new().hash_one(comm.rank().index());
        let mine = match &shown {
            Ok((block, memory)) => Ok([&memory.handle(block)[..], &own_sign.to_le_bytes()].concat()),
            Err(reason) => Err(reason.as_str()),
        };
        let mine = mine.as_deref().map_err(|reason| *reason);
        let Some(cards) = bring(comm, mine)? else { return Ok(None) };
        let card = |card: &Vec<u8>| {
            let (handle, sign) = card.split_first_chunk()?;
            Some((*handle, u64::from_le_bytes(sign.try_into().ok()?)))
        };
        let cards: Vec<(MemoryHandle, u64)> = cards.iter().filter_map(card).collect();
        let reached = shown.and_then(|(block, memory)| {
            cards.iter().try_for_each(|(handle, _)| memory.reach(*handle))?;
            Ok((block, memory))
        });
        let mine = reached.as_ref().map(|_| &[][..]).map_err(String::as_str);
        let is_reached = bring(comm, mine)?.is_some();
        let Some((block, memory)) = reached.ok().filter(|_| is_reached) else { return Ok(None) };
        // All ranks have come here, so that none is in the middle of what it did with an engine before.
        let left = std::mem::take(&mut *lock(&LEFT));
        left.into_iter().for_each(|end| end());
        let [compute, masters] = [(), ()].map(|()| Mutex::new(Published::NOTHING));
        let windows = Self { memory: Arc::new(memory), compute, masters };
        windows.try_out(&block, own_sign, &cards)?;
        Ok(Some(Arc::new(windows)))
    }

    /// Makes sure that what each rank writes is what all others read.
    fn try_out(
        &self,
        block: &M::Block,
        own_sign: u64,
        cards: &[(MemoryHandle, u64)],
    ) -> Result<(), CommError> {
        let device = self.memory.device();
        let comm = &device.comm;
        self.memory.write(block, &[(0, &device.sign(own_sign))], FINDING)?;
        comm.barrier(FINDING)?;
        for (rank, &(handle, sign)) in comm.world_size().ranks().zip(cards) {
            let piece = Piece { handle, from: 0, bytes: WORD, into: 0 };
            let read = self.memory.join(DType::F32, WORD / DType::F32.size(), &[piece], FINDING)?;
            device.compare(rank, sign, &read, FINDING)?;
        }
        // Before the memory is used for something else.
        comm.barrier(FINDING)
    }

    /// Copies shards to where others read them.
    fn put(
        &self,
        published: &mut Published<M::Block>,
        shards: &[(ParameterIndex, CubeTensor)],
        label: &str,
    ) -> Result<(), CommError> {
        let bytes = |shard: &CubeTensor| cube::bytes(shard) as usize;
        let new = published.assign(shards.iter().map(|(parameter, shard)| (*parameter, bytes(shard))));
        if new > 0 {
            let block = self.memory.allocate(new).map_err(|reason| {
                let advice = "make room for copies of this rank's shards, or set device_transport to false";
                self.memory.device().fail(label, format!("{reason}; {advice}"))
            });
            published.blocks.push(block?);
        }
        let place = |parameter: ParameterIndex| *published.places.get(parameter.index())?;
        let places = shards.iter().filter_map(|(parameter, shard)| Some((place(*parameter)?, shard)));
        let places: Vec<_> = places.collect();
        published.blocks.iter().enumerate().try_for_each(|(at, block)| {
            let of_block = places.iter().filter(|(place, _)| place.block == at);
            let of_block: Vec<_> = of_block.map(|(place, shard)| (place.start, *shard)).collect();
            if of_block.is_empty() { Ok(()) } else { self.memory.write(block, &of_block, label) }
        })
    }

    /// The version of `rank`'s table, 0 if it shows none.
    fn version(&self, rank: Rank, values: Values, label: &str) -> Result<u64, CommError> {
        let mut version = [0; WORD];
        match self.memory.device().comm.read(rank, key(values), 0, &mut version, label) {
            Ok(()) => Ok(u64::from_le_bytes(version)),
            Err(CommError::WindowMissing { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Where the shard of `rank` lies that goes to byte `into`, and the version of the table, when the rank shows it.
    fn piece(
        &self,
        rank: Rank,
        windows: &Windows,
        parameter: ParameterIndex,
        into: usize,
    ) -> Result<(u64, Piece), CommError> {
        let (device, spec, values) = (self.memory.device(), windows.parameter(parameter), windows.values);
        let wanted = spec.partition().len(rank) * windows.dtype.size();
        let (offset, label) = (WORD + parameter.index() * ENTRY, spec.name());
        device.until(rank, label, || {
            let version = self.version(rank, values, label)?;
            if version == GONE {
                let (peer, key, label) = (rank, key(values), label.to_owned());
                return Err(CommError::WindowMissing { peer, key, label });
            }
            if version > 0 {
                let mut entry = [0; ENTRY];
                match device.comm.read(rank, key(values), offset, &mut entry, label) {
                    // Another table comes, or this one does not reach to the parameter yet.
                    Err(CommError::WindowBounds { .. } | CommError::WindowMissing { .. }) => {}
                    read => read?,
                }
                let mut rest = &entry[..];
                let [from, bytes] = [(), ()].map(|()| take_word(&mut rest) as usize);
                if bytes == wanted {
                    let handle = rest.try_into().expect("an entry ends with a handle");
                    return Ok(Some((version, Piece { handle, from, bytes, into })));
                }
            }
            thread::sleep(POLL);
            Ok(None)
        })
    }

    /// Shards of these ranks, which follow each other, side by side on this rank's device.
    fn join(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        ranks: impl Iterator<Item = Rank> + Clone,
    ) -> Result<CubeTensor, CommError> {
        let (spec, dtype) = (windows.parameter(parameter), windows.dtype);
        loop {
            let (mut seen, mut pieces, mut bytes) = (Vec::new(), Vec::new(), 0);
            for rank in ranks.clone().filter(|rank| spec.partition().len(*rank) > 0) {
                let (version, piece) = self.piece(rank, windows, parameter, bytes)?;
                bytes += piece.bytes;
                seen.push((rank, version));
                pieces.push(piece);
            }
            let joined = self.memory.join(dtype, bytes / dtype.size(), &pieces, spec.name())?;
            let mut has_changed = false;
            for (rank, version) in seen {
                has_changed |= self.version(rank, windows.values, spec.name())? != version;
            }
            if !has_changed {
                return Ok(joined);
            }
        }
    }
}

impl<M: SharedMemory> DeviceWindows for ProcessWindows<M> {
    fn device(&self) -> &RankDevice {
        self.memory.device()
    }

    fn copies(&self) -> bool {
        true
    }

    fn show(&self, windows: &Windows, shards: Vec<(ParameterIndex, CubeTensor)>) -> Result<(), CommError> {
        const LABEL: &str = "updated parameters";
        let published = if windows.values == Values::Master { &self.masters } else { &self.compute };
        let mut published = lock(published);
        expose(&*self.memory, windows.values, &published, 0)?;
        self.put(&mut published, &shards, LABEL)?;
        published.version += 1;
        expose(&*self.memory, windows.values, &published, published.version)
    }

    /// What is shown are copies.
    fn withdraw(&self) {}

    fn is_withdrawn(&self, _: ParameterIndex, _: Values) -> bool {
        false
    }

    fn shard(
        &self,
        windows: &Windows,
        parameter: ParameterIndex,
        rank: Rank,
    ) -> Result<CubeTensor, CommError> {
        self.join(windows, parameter, [rank].into_iter())
    }

    /// What is copied has been waited for.
    fn whole(&self, windows: &Windows, parameter: ParameterIndex, _: bool) -> Result<CubeTensor, CommError> {
        self.join(windows, parameter, self.device().comm.world_size().ranks())
    }
}

impl<M: SharedMemory> Drop for ProcessWindows<M> {
    /// Others may read for longer than this rank has an engine.
    fn drop(&mut self) {
        let memory = Arc::clone(&self.memory);
        let [compute, masters] = [&self.compute, &self.masters]
            .map(|published| std::mem::replace(&mut *lock(published), Published::NOTHING));
        lock(&LEFT).push(Box::new(move || {
            for (values, published) in [(Values::Compute, compute), (Values::Master, masters)] {
                if let Err(error) = expose(&*memory, values, &published, GONE) {
                    tracing::debug!(%error, "nobody reads these shards any more");
                }
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assign(published: &mut Published<u8>, shards: &[(usize, usize)]) -> usize {
        let shards = shards.iter().map(|&(parameter, bytes)| (ParameterIndex::new(parameter), bytes));
        let bytes = published.assign(shards);
        if bytes > 0 {
            published.blocks.push(published.blocks.len() as u8 + 1);
        }
        bytes
    }

    #[test]
    fn shards_stay_where_they_are_and_new_ones_get_new_blocks() {
        let mut published = Published::NOTHING;
        assert_eq!(assign(&mut published, &[(0, 100), (2, 0), (3, 300)]), 256 + 512);
        assert_eq!(assign(&mut published, &[(3, 300), (0, 100), (2, 0)]), 0);
        assert_eq!(assign(&mut published, &[(1, 4), (3, 300)]), 256);
        assert_eq!(assign(&mut published, &[(0, 104)]), 256);
        let place = |block, start, bytes| Some(Place { block, start, bytes });
        assert_eq!(published.places, [place(2, 0, 104), place(1, 0, 4), None, place(0, 256, 300)]);
    }

    #[test]
    fn a_table_says_where_each_shard_lies() {
        let mut published = Published::NOTHING;
        assert_eq!(published.table(7, |_| unreachable!()), 7_u64.to_le_bytes());
        assign(&mut published, &[(1, 100), (2, 300)]);
        let table = published.table(7, |block| [*block; _]);
        assert_eq!(table.len(), WORD + 3 * ENTRY);
        let mut rest = &table[..];
        assert_eq!(take_word(&mut rest), 7);
        let entries =
            rest.chunks(ENTRY).map(|mut entry| ([(), ()].map(|()| take_word(&mut entry)), entry.to_vec()));
        let expected = [([0, 0], vec![0; 72]), ([0, 100], vec![1; 72]), ([256, 300], vec![1; 72])];
        assert_eq!(entries.collect::<Vec<_>>(), expected);
        published.blocks.clear();
        assert_eq!(published.table(0, |block| [*block; _]), [0; WORD + 3 * ENTRY]);
    }
}
