//! Transports between CUDA devices: of ranks that are threads of a process (`peers`), and of ranks that are processes.
//!
//! Shards are read from each other's memory, which CUDA maps between processes of one host: no rank has to do anything for one
//! who reads. Buckets are a matter of all ranks, in one order, and go by NCCL, between hosts as well.
//!
//! CubeCL does not give its streams away, so what it computes and what is copied beside it do not wait for each other on the
//! device: before a copy, the thread that asks for it waits until all that it gave the device is done, and after it until the copy
//! is. Threads that read ahead and reduce have streams of their own, so what layers compute goes on meanwhile.

mod collectives;
mod copies;
mod held_tensor;
mod memory;
mod peers;

use std::sync::Arc;

use zero_comm::{CommError, Communicator, CommunicatorExt};

use self::collectives::NcclCollectives;
use self::memory::CudaMemory;
pub(crate) use self::peers::Peers;
use crate::arena::Port;
use crate::board::process;
use crate::process_windows::ProcessWindows;
use crate::rank_device::RankDevice;
use crate::transports::Transports;

/// Those between the ranks of `comm`; `port` if this rank wants any. Collective.
pub(crate) fn find(comm: &Arc<dyn Communicator>, port: Option<&Port>) -> Result<Transports, CommError> {
    let device = port.and_then(|port| Some((port.clone(), port.cuda_index()? as usize)));
    // Threads of a process whose devices nothing connects are no case for what connects processes.
    let own = if device.is_some() { process() } else { 0 };
    let mut all = comm.all_gather_value(own, "who has a CUDA device and a process for it")?;
    all.sort_unstable();
    let is_ready = !all.contains(&0) && all.windows(2).all(|pair| pair[0] != pair[1]);
    let Some((port, index)) = device.filter(|_| is_ready) else { return Ok(Transports::default()) };
    let device = || RankDevice { comm: Arc::clone(comm), port: port.clone() };
    let shares_host = comm.ranks_of_host().len() == comm.world_size().get();
    let memory = match shares_host {
        true => CudaMemory::new(device(), index),
        false => Err(String::from("ranks are on several hosts")),
    };
    let shards = ProcessWindows::find(&**comm, memory)?;
    let buckets = NcclCollectives::find(device(), index)?;
    Ok(Transports { shards: shards.map(|shards| shards as _), buckets: buckets.map(|buckets| buckets as _) })
}

#[cfg(test)]
mod tests;
