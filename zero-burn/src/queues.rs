//! Threads for communication beside compute.

use std::sync::Arc;

use zero_comm::{Communicator, WorkQueue};
use zero_core::ZeroConfig;

use crate::ZeroError;
use crate::error::During;

/// Threads for communication beside compute, where that is wanted and there is somebody to talk to.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    pub(crate) reductions: Option<WorkQueue>,
    pub(crate) reads: Option<Arc<WorkQueue>>,
}

impl Queues {
    /// Collective.
    pub(crate) fn new(config: &ZeroConfig, comm: &Arc<dyn Communicator>) -> Result<Self, ZeroError> {
        if comm.world_size().get() == 1 {
            return Ok(Self::default());
        }
        // On which nobody else operates: reductions meet in the order in which they were submitted.
        let group = comm
            .split(Some(0), comm.rank().index() as u64, "zero reductions")
            .during(|| String::from("forming the engine's group"))?;
        // Every rank named a color, so every rank is in the group.
        let reductions = group.unwrap_or_else(|| comm.clone());
        reductions.set_deadline(config.deadline());
        // Only now, for the ranks have not compared configurations yet.
        if !config.overlap {
            return Ok(Self::default());
        }
        let queue = |comm: &Arc<dyn Communicator>| {
            WorkQueue::new(comm.clone()).map_err(|source| {
                comm.abort(&source.to_string());
                ZeroError::NoThread(Arc::new(source))
            })
        };
        // Reads need no order: they may run on the engine's own group.
        Ok(Self { reductions: Some(queue(&reductions)?), reads: Some(Arc::new(queue(comm)?)) })
    }
}
