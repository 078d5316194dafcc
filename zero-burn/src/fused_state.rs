//! What fused optimizers keep of a shard.

use half::bf16;
use zero_core::{DType, ParameterIndex, Placement, Tier};
use zero_offload::{HostBuffer, HostOptimizer, StateSpec, Table};

use crate::ZeroError;
use crate::engine::Engine;

/// What is kept of a shard: PyTorch's states, in the type that the configuration says.
#[derive(Debug)]
pub struct FusedState {
    /// Updates so far.
    pub(crate) steps: u64,
    /// Of the first elements.
    pub(crate) memory: Vec<HostBuffer>,
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
        Ok(Self { steps: 0, memory, disk })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.iter().map(|state| state.len() as u64).sum()
    }
}
