//! What fused optimizers keep of a shard.

#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;
use half::bf16;
use serde_json::{Map, Value};
use zero_checkpoint::BoxError;
#[cfg(feature = "cube")]
use zero_core::Bytes;
use zero_core::{DType, ParameterIndex, Placement, Tier};
use zero_offload::{HostBuffer, HostOptimizer, Slot, StateSpec, Table};
#[cfg(feature = "cube")]
use zero_offload::{HostPool, PoolOptions};

use crate::ZeroError;
#[cfg(feature = "cube")]
use crate::arena::Content;
#[cfg(feature = "cube")]
use crate::cube;
use crate::engine::Engine;
use crate::kept::{self, Kept, Piece};

/// For errors.
#[cfg(feature = "cube")]
const READING: &str = "reading optimizer state";

/// What is kept of a shard: PyTorch's states, in the type that the configuration says.
#[derive(Debug)]
pub struct FusedState {
    /// Of the first elements; nothing if they are in `device`.
    pub(crate) memory: Vec<HostBuffer>,
    /// Where the optimizer runs on a CubeCL device, since the first update there.
    #[cfg(feature = "cube")]
    pub(crate) device: Vec<CubeTensor>,
    /// Of the others, in order: those whose masters are in memory, and those whose masters are on a disk, too.
    pub(crate) disk: Vec<Table>,
}

impl FusedState {
    pub(crate) fn new(
        optimizer: &HostOptimizer,
        engine: &Engine,
        parameter: ParameterIndex,
    ) -> Result<Self, ZeroError> {
        let (dtype, offload) = (engine.config.precision.optimizer_state, engine.offload());
        let numel = engine.holdings.owned(parameter).len();
        let specs = optimizer.states();
        let on_disk = |placement: &Placement| match placement.tier {
            Tier::Nvme if !specs.is_empty() => placement.elements(numel),
            _ => 0,
        };
        let with_masters = if engine.is_mixed() { on_disk(&offload.parameters) } else { 0 };
        let on_disk = on_disk(&offload.optimizer);
        let fill = |spec: &StateSpec, bytes: &mut [u8]| match dtype {
            DType::BF16 => bytemuck::cast_slice_mut(bytes).fill(bf16::from_f32(spec.initial)),
            _ => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
        };
        let workers = engine.workers()?;
        let memory = specs.iter().map(|spec| {
            let mut buffer = engine.states.take_near(workers, (numel - on_disk) * dtype.size());
            fill(spec, &mut buffer);
            buffer
        });
        let memory = memory.collect();
        let tables = [on_disk - with_masters, with_masters].into_iter().filter(|rows| *rows > 0);
        let disk = tables
            .map(|rows| {
                let columns = specs.iter().map(|spec| {
                    let mut initial = vec![0; dtype.size()];
                    fill(spec, &mut initial);
                    (spec.name, dtype.size(), initial)
                });
                let name = engine.parameter(parameter).name();
                let table = engine.disk()?.reserve(name, rows, &columns.collect::<Vec<_>>());
                table.map_err(|error| ZeroError::from(error).during("making room for optimizer state"))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            memory,
            #[cfg(feature = "cube")]
            device: Vec::new(),
            disk,
        })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = self.memory.iter().map(|state| state.len() as u64).sum::<u64>();
        #[cfg(feature = "cube")]
        let bytes = bytes + self.device.iter().map(cube::bytes).sum::<u64>();
        bytes
    }

    /// Whether nothing is on the device.
    pub(crate) fn is_in_memory(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.device.is_empty();
        #[cfg(not(feature = "cube"))]
        true
    }

    /// How many states there are, each in memory or on the device.
    #[cfg(feature = "cube")]
    pub(crate) fn len(&self) -> usize {
        self.memory.len() + self.device.len()
    }

    /// Moves the states out, to be updated on the device.
    #[cfg(feature = "cube")]
    pub(crate) fn take(&mut self) -> impl Iterator<Item = Content> + use<> {
        let memory = std::mem::take(&mut self.memory).into_iter().map(Content::Host);
        memory
            .chain(std::mem::take(&mut self.device).into_iter().map(|state| Content::Device(Box::new(state))))
    }
}

impl Kept for FusedState {
    fn rest(&mut self) {}

    #[cfg(feature = "cube")]
    fn put_away(&mut self) -> Result<(), ZeroError> {
        let pool = HostPool::new(PoolOptions { retain: Bytes::ZERO });
        let read = self.device.iter().map(|state| {
            let mut buffer = pool.take(cube::bytes(state) as usize);
            cube::read(state, 0, READING, &mut buffer)?;
            Ok::<_, ZeroError>(buffer)
        });
        let memory: Vec<_> = read.collect::<Result<_, _>>()?;
        if !memory.is_empty() {
            (self.memory, self.device) = (memory, Vec::new());
        }
        Ok(())
    }

    fn scalars(&self) -> Map<String, Value> {
        Map::new()
    }

    fn read(&self, tensor: usize, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        #[cfg(feature = "cube")]
        if let Some(state) = self.device.get(tensor) {
            return Ok(cube::read(state, offset, READING, into)?);
        }
        for piece in self.pieces(tensor, offset, into.len()) {
            let into = &mut into[piece.bytes];
            match piece.place.checked_sub(1) {
                None => into.copy_from_slice(&self.memory[tensor][piece.offset as usize..][..into.len()]),
                Some(table) => self.disk[table].column(tensor).ok_or(NO_COLUMN)?.read(piece.offset, into)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, tensor: usize, offset: u64, from: &[u8]) -> Result<(), BoxError> {
        for piece in self.pieces(tensor, offset, from.len()).collect::<Vec<_>>() {
            let from = &from[piece.bytes];
            match piece.place.checked_sub(1) {
                None => {
                    self.memory[tensor][piece.offset as usize..][..from.len()].copy_from_slice(from);
                }
                Some(table) => {
                    let slot = self.disk[table].column_mut(tensor).ok_or(NO_COLUMN)?;
                    slot.write(piece.offset, from)?;
                }
            }
        }
        Ok(())
    }
}

const NO_COLUMN: &str = "a table has a column for each state";

impl FusedState {
    /// Where bytes of a tensor lie: in memory first, then in tables.
    fn pieces(&self, tensor: usize, offset: u64, len: usize) -> impl Iterator<Item = Piece> {
        let columns = self.disk.iter().map(|table| table.column(tensor).map_or(0, Slot::bytes));
        let lengths: Vec<_> = std::iter::once(self.memory[tensor].len() as u64).chain(columns).collect();
        kept::pieces(lengths, offset, len)
    }
}
