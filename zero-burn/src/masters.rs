//! Master weights on a disk.

use std::sync::{Arc, Condvar, Mutex};

use zero_core::{DType, Parameter, ParameterIndex, Tier};
use zero_offload::{NvmeStore, Slot, StoreError, Table};

use crate::ZeroError;
use crate::base::Base;
use crate::disk::{Traffic, open_store};
use crate::engine::lock;
use crate::floats::burn_dtype;
use crate::held::Held;
use crate::host::{HostTensor, tensor_from_buffer};

/// The last elements of this rank's shards, each shard in a table of one column.
#[derive(Debug)]
pub(crate) struct Masters {
    store: NvmeStore,
    traffic: Arc<Traffic>,
    /// By parameter.
    shards: Mutex<Vec<Shard>>,
    is_back: Condvar,
}

#[derive(Debug)]
enum Shard {
    /// All of it is in memory.
    InMemory,
    OnDisk(Table),
    /// An update has it.
    Out,
}

impl Masters {
    /// A place for masters, if the configuration keeps some on a disk; none until tiers are chosen.
    pub(crate) fn open(base: &Base) -> Result<Option<Self>, ZeroError> {
        let placement = &base.offload().parameters;
        if placement.tier != Tier::Nvme || placement.fraction == 0.0 {
            return Ok(None);
        }
        let store = open_store(base, placement.path.as_deref(), base.offload().block_bytes);
        let store =
            store.map_err(|error| ZeroError::from(error).during("opening the disk for master weights"))?;
        let traffic = Arc::clone(&base.traffic);
        Ok(Some(Self { store, traffic, shards: Mutex::default(), is_back: Condvar::new() }))
    }

    /// Writes the last elements of a new shard; what is held then is the rest, and a copy of all in the type of layers.
    pub(crate) fn put(&self, base: &Base, parameter: &Parameter, held: Held) -> Result<Held, ZeroError> {
        let values = HostTensor::new(held.shard.clone());
        let values = values.as_slice();
        let on_disk = base.offload().parameters.elements(values.len());
        if on_disk == 0 {
            self.set(parameter.index(), Shard::InMemory);
            return Ok(held);
        }
        let (rest, last) = values.split_at(values.len() - on_disk);
        let write = || {
            let width = DType::F32.size();
            let columns = [("master", width)];
            let mut table = Table::reserve(&self.store, parameter.name(), on_disk as u64, &columns)?;
            // On page boundaries, so that it is written as it lies.
            let mut buffer = base.exports.take(on_disk * width);
            buffer.as_mut_slice::<f32>().copy_from_slice(last);
            let slot = table.column_mut(0).expect("it was reserved with one column");
            self.traffic.during(buffer.len() as u64, || slot.write(0, &buffer))?;
            Ok(table)
        };
        let table =
            write().map_err(|error: StoreError| ZeroError::from(error).during("writing master weights"))?;
        self.set(parameter.index(), Shard::OnDisk(table));
        let copy = held.shard.clone().cast(burn_dtype(base.config.precision.compute));
        let mut buffer = base.exports.take(size_of_val(rest));
        buffer.as_mut_slice::<f32>().copy_from_slice(rest);
        Ok(Held::with_copy(tensor_from_buffer(buffer, DType::F32, &base.home), copy))
    }

    /// Moves what is on the disk of a shard out, to be updated; it has to be given back.
    pub(crate) fn take(&self, parameter: ParameterIndex) -> Option<Table> {
        let shard = &mut lock(&self.shards)[parameter.index()];
        match std::mem::replace(shard, Shard::Out) {
            Shard::OnDisk(table) => Some(table),
            other => {
                *shard = other;
                None
            }
        }
    }

    pub(crate) fn give_back(&self, parameter: ParameterIndex, table: Table) {
        self.set(parameter, Shard::OnDisk(table));
        self.is_back.notify_all();
    }

    /// Waits until no update has what is on the disk of a shard.
    pub(crate) fn wait_for(&self, parameter: ParameterIndex) {
        let is_out = |shards: &mut Vec<Shard>| matches!(shards[parameter.index()], Shard::Out);
        drop(self.is_back.wait_while(lock(&self.shards), is_out));
    }

    /// Fills `into` with bytes of what is on the disk of a shard, from `offset` on.
    pub(crate) fn read(
        &self,
        parameter: ParameterIndex,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), ZeroError> {
        self.with(parameter, into.len(), |slot| slot.read(offset, into), "reading master weights")
    }

    /// Replaces bytes of what is on the disk of a shard, from `offset` on.
    pub(crate) fn write(&self, parameter: ParameterIndex, offset: u64, from: &[u8]) -> Result<(), ZeroError> {
        self.with(parameter, from.len(), |slot| slot.write(offset, from), "writing master weights")
    }

    fn with(
        &self,
        parameter: ParameterIndex,
        bytes: usize,
        run: impl FnOnce(&mut Slot) -> Result<(), StoreError>,
        during: &str,
    ) -> Result<(), ZeroError> {
        match &mut lock(&self.shards)[parameter.index()] {
            Shard::InMemory => Ok(()),
            Shard::Out => Err(ZeroError::UpdatePending),
            Shard::OnDisk(table) => {
                let slot = table.column_mut(0).expect("it was reserved with one column");
                let done = self.traffic.during(bytes as u64, || run(slot));
                done.map_err(|error| ZeroError::from(error).during(during))
            }
        }
    }

    fn set(&self, parameter: ParameterIndex, shard: Shard) {
        let mut shards = lock(&self.shards);
        let known = shards.len().max(parameter.index() + 1);
        shards.resize_with(known, || Shard::InMemory);
        shards[parameter.index()] = shard;
    }
}
