//! Ranks that save and load together, as `zero-checkpoint` knows them.

use std::sync::Arc;

use zero_checkpoint::{BoxError, Coordinator};
use zero_comm::{Communicator, CommunicatorExt};
use zero_core::{Rank, WorldSize};

/// A communicator for what the ranks of a checkpoint tell each other.
#[derive(Debug)]
pub(crate) struct Ranks(pub(crate) Arc<dyn Communicator>);

const LABEL: &str = "checkpoint";

impl Coordinator for Ranks {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }

    fn gather(&self, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        let counts: Vec<_> = self.0.all_gather_value(bytes.len() as i64, LABEL)?;
        let is_root = self.rank() == Rank::ROOT;
        let mut sent = vec![0; counts.len()];
        sent[Rank::ROOT.index()] = bytes.len();
        let received: Vec<_> = counts.iter().map(|count| if is_root { *count as usize } else { 0 }).collect();
        let mut all = vec![0_u8; received.iter().sum()];
        self.0.all_to_all_uneven(bytes, &sent, &mut all, &received, LABEL)?;
        if !is_root {
            return Ok(None);
        }
        let mut rest = all.as_slice();
        let parts = received.iter().map(|&count| {
            let (part, after) = rest.split_at(count);
            rest = after;
            part.to_vec()
        });
        Ok(Some(parts.collect()))
    }

    fn broadcast(&self, root: Rank, bytes: &mut [u8]) -> Result<(), BoxError> {
        Ok(self.0.broadcast(bytes, root, LABEL)?)
    }
}
