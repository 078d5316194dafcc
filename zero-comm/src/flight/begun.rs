//! How far one rank has come.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use super::record::{GroupId, Lane};

/// How many operations one rank has begun in each lane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begun {
    lanes: BTreeMap<Lane, u64>,
    /// Whether a lane may be missing in which operations were begun.
    has_gaps: bool,
}

impl Begun {
    /// So many lanes fit into one message to all ranks, with much room.
    pub(crate) const MAX_LANES: usize = 16 << 10;

    /// Counts one more operation of `lane`, which was not forgotten, and returns its number, from 1.
    pub(crate) fn add(&mut self, lane: Lane) -> u64 {
        let begun = self.lanes.entry(lane).or_default();
        *begun += 1;
        *begun
    }

    /// How many operations of `lane` were begun; `None` if that is not known.
    pub(crate) fn of(&self, lane: Lane) -> Option<u64> {
        self.lanes.get(&lane).copied().or(if self.has_gaps { None } else { Some(0) })
    }

    pub(crate) fn forget(&mut self, group: GroupId) {
        let ranks = (Rank::new(0), Rank::new(usize::MAX));
        for (first, last) in [
            (Lane::Collective(group), Lane::Collective(group)),
            (Lane::Send(group, ranks.0), Lane::Send(group, ranks.1)),
            (Lane::Receive(group, ranks.0), Lane::Receive(group, ranks.1)),
        ] {
            while let Some((lane, _)) = self.lanes.range(first..=last).next() {
                let lane = *lane;
                self.lanes.remove(&lane);
                self.has_gaps = true;
            }
        }
    }

    /// As much of it as fits into a message, collective operations first.
    pub(crate) fn cut(&self) -> Self {
        let lanes: BTreeMap<_, _> =
            self.lanes.iter().take(Self::MAX_LANES).map(|(lane, begun)| (*lane, *begun)).collect();
        let has_gaps = self.has_gaps || lanes.len() < self.lanes.len();
        Self { lanes, has_gaps }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lanes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_begun_is_known_until_something_is_forgotten() {
        let (mut begun, other) = (Begun::default(), GroupId::WORLD.child(1, 2));
        let (lane, never) = (Lane::Collective(GroupId::WORLD), Lane::Send(other, Rank::ROOT));
        assert_eq!((begun.add(lane), begun.add(lane)), (1, 2));
        begun.forget(other);
        assert_eq!((begun.of(lane), begun.of(never)), (Some(2), Some(0)));
        begun.add(never);
        begun.forget(other);
        assert_eq!((begun.of(lane), begun.of(never)), (Some(2), None));
    }

    #[test]
    fn what_is_cut_off_is_not_known() {
        let mut begun = Begun::default();
        let message = |peer| Lane::Send(GroupId::WORLD, Rank::new(peer));
        for peer in 0..Begun::MAX_LANES {
            begun.add(message(peer));
        }
        assert_eq!(begun.cut(), begun);
        begun.add(Lane::Collective(GroupId::WORLD));
        let cut = begun.cut();
        assert_eq!(cut.len(), Begun::MAX_LANES);
        assert_eq!(cut.of(Lane::Collective(GroupId::WORLD)), Some(1));
        assert_eq!((cut.of(message(0)), cut.of(message(Begun::MAX_LANES - 1))), (Some(1), None));
    }
}
