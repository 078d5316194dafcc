//! How updated shards come to be seen: by other ranks in windows, and by layers in replicas.

use std::collections::HashSet;
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

/// How many bytes of shards are read from a device at once.
const READ_AT_ONCE: usize = 64 << 20;

/// Cuts `items` into groups of up to `most` bytes, or of one.
fn groups<T>(items: &[T], most: usize, bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let mut sum = 0;
        let fit = rest.iter().take_while(|item| {
            sum += bytes(item);
            sum <= most
        });
        let count = fit.count().max(1).min(rest.len());
        let (group, later) = rest.split_at(count);
        rest = later;
        (!group.is_empty()).then_some(group)
    })
}

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
        self.expose(indices)?;
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

    /// Exposes the shards of `indices`, and those that an update has withdrawn without changing them.
    fn expose(&self, indices: &[ParameterIndex]) -> Result<(), CommError> {
        let mut indices = indices.to_vec();
        let known: HashSet<_> = indices.iter().copied().collect();
        indices.extend(self.windows.withdrawn().into_iter().filter(|index| !known.contains(index)));
        // Of a device, several at once, which stops it less often; in host memory one by one, for each is a copy beside the
        // window that it replaces.
        let bytes = |index: &ParameterIndex| self.windows.bytes(*index) / self.world();
        let most = match self.has_device() {
            true if self.windows.are_on_devices() => usize::MAX,
            true => READ_AT_ONCE,
            false => 0,
        };
        for indices in groups(&indices, most, bytes) {
            let each = |shard: &dyn Fn(ParameterIndex) -> Tensor<1>| {
                indices.iter().map(|&index| (index, shard(index))).collect()
            };
            self.windows.expose(each(&|index| self.holdings.show(index)))?;
            if let Some(masters) = &self.masters {
                masters.expose(each(&|index| self.held(index).shard))?;
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

#[cfg(test)]
mod tests {
    use super::groups;

    #[test]
    fn groups_have_as_many_bytes_as_they_may_or_one_item() {
        let of = |items: &[usize], most| -> Vec<Vec<usize>> {
            groups(items, most, |item| *item).map(<[usize]>::to_vec).collect()
        };
        assert_eq!(of(&[], 5), [[0; 0]; 0]);
        assert_eq!(of(&[3, 2, 1, 9, 0, 5, 1], 5), [vec![3, 2], vec![1], vec![9], vec![0, 5], vec![1]]);
        assert_eq!(of(&[1, 0, 0], 0), [vec![1], vec![0, 0]]);
    }
}
