//! How updated shards come to be seen: by other ranks in windows, and by layers in replicas.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use burn::tensor::Tensor;
use zero_comm::{CommError, OpKind};
use zero_core::ParameterIndex;

use crate::ZeroError;
use crate::engine::{Engine, lock};
use crate::error::During;
use crate::held::Updated;
use crate::statistics::Activity;

impl Engine {
    /// Puts updated shards in place and makes every rank see them.
    pub(crate) fn replace_shards(
        &self,
        updated: Vec<(ParameterIndex, Updated)>,
        nothing_here: &[ParameterIndex],
    ) -> Result<(), ZeroError> {
        // Who asks for a parameter meanwhile waits until its replica is there.
        let _updating = self.phase.begin_update();
        // Others have updated theirs: replicas of these are stale, too.
        let mut indices = nothing_here.to_vec();
        for &index in nothing_here {
            let shard = self.held(index).shard;
            self.holdings.set_shard(index, Updated { shard, copy: None });
        }
        for (index, shard) in updated {
            self.holdings.set_shard(index, shard);
            indices.push(index);
        }
        self.version.fetch_add(1, Ordering::AcqRel);
        self.ladder.step_down();
        self.gathers.begin_round();
        let published = self.publish(&indices);
        self.fail(published.during(|| String::from("publishing updated parameters")))
    }

    /// Exposes the shards of `indices` and renews the replicas made of them, beside compute where that is wanted.
    pub(crate) fn publish(&self, indices: &[ParameterIndex]) -> Result<(), CommError> {
        if !self.has_windows() {
            indices.iter().for_each(|&index| self.holdings.copy_whole(index));
            return Ok(());
        }
        for &index in indices {
            self.windows.expose(index, self.holdings.show(index))?;
            if let Some(masters) = &self.masters {
                masters.expose(index, self.held(index).shard)?;
            }
        }
        self.comm.fence("updated parameters")?;
        for &index in indices.iter().filter(|index| self.stays_whole(**index)) {
            match &self.reads {
                None => drop(self.renew(index)?),
                Some(reads) => {
                    let holdings = Arc::clone(&self.holdings);
                    let (name, bytes) = (self.parameter(index).name(), self.windows.bytes(index));
                    let work = reads.submit(OpKind::Read, name, bytes, (), move |_, (), _| {
                        holdings.gather_whole(index).map(drop)
                    });
                    lock(&self.renewals)[index.index()] = Some(work);
                }
            }
        }
        Ok(())
    }

    /// The replica of a parameter that stays gathered, after a step.
    pub(crate) fn renew(&self, index: ParameterIndex) -> Result<Tensor<1>, CommError> {
        let begin = Instant::now();
        let renewal = lock(&self.renewals)[index.index()].take();
        if let Some(work) = renewal {
            work.wait()?;
        }
        let whole = match self.held(index).whole {
            Some(whole) => whole,
            None => self.holdings.gather_whole(index)?,
        };
        self.recorder.exposed(Activity::Gather, begin);
        Ok(whole)
    }

    /// Waits for the replicas that no layer has asked for since the last step: their owners may change them soon.
    pub(crate) fn settle_renewals(&self) -> Result<(), ZeroError> {
        let coming: Vec<_> = lock(&self.renewals)
            .iter()
            .enumerate()
            .filter(|(_, work)| work.is_some())
            .map(|(at, _)| at)
            .collect();
        for at in coming {
            let index = ParameterIndex::new(at);
            let name = self.parameter(index).name();
            self.fail(self.renew(index).during(|| format!("gathering parameter `{name}`")))?;
        }
        Ok(())
    }

    pub(crate) fn stays_whole(&self, index: ParameterIndex) -> bool {
        !self.config.stage.shards_parameters() || self.parameter(index).persistent()
    }
}
