//! A rank's being there.

use std::sync::Arc;
use std::thread;

use zero_core::Rank;

use super::health::Health;
use crate::LossCause;
use crate::failure::Failure;
use crate::flight::Recorder;

/// Shared by all communicators of one rank: the rank has finished when the last of them is gone.
pub(super) struct Presence {
    health: Arc<Health>,
    rank: Rank,
    recorder: Arc<Recorder>,
}

impl Presence {
    pub(super) fn new(health: Arc<Health>, rank: Rank) -> Self {
        let recorder = Arc::clone(health.recorder(rank));
        Self { health, rank, recorder }
    }

    pub(super) const fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn recorder(&self) -> &Recorder {
        &self.recorder
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
