//! A rank's being there.

use std::sync::Arc;
use std::thread;

use zero_core::Rank;

use super::health::Health;
use crate::LossCause;
use crate::failure::Failure;

/// Shared by all communicators of one rank: the rank has finished when the last of them is gone.
pub(super) struct Presence {
    health: Arc<Health>,
    rank: Rank,
}

impl Presence {
    pub(super) const fn new(health: Arc<Health>, rank: Rank) -> Self {
        Self { health, rank }
    }

    pub(super) const fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) const fn health(&self) -> &Arc<Health> {
        &self.health
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if thread::panicking() {
            let cause = LossCause::Panicked("its thread unwound".to_owned());
            self.health.fail(Failure::Lost { rank: self.rank, cause });
        } else {
            self.health.finish(self.rank);
        }
    }
}
