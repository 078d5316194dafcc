//! What a connection is for.

use serde::{Deserialize, Serialize};
use zero_core::{Rank, WorldSize};

use crate::flight::GroupId;

/// What a connection is for, as the rank that dials says in its hello. Ranks are those of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Channel {
    pub(super) purpose: Purpose,
    /// Who dials.
    pub(super) from: Rank,
    /// Who accepts.
    pub(super) to: Rank,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// Collective operations of a group. The higher rank dials.
    Collective(GroupId),
    /// Messages within a group. The sender dials.
    Messages(GroupId),
    /// Reads from the windows of who accepts.
    Windows,
}

impl Channel {
    pub(super) fn encode(&self) -> Vec<u8> {
        // Fails for no value of this type.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// The channel that a hello to `rank` of a world of `size` names, if it can be.
    pub(super) fn decode(hello: &[u8], rank: Rank, size: WorldSize) -> Option<Self> {
        let channel: Self = postcard::from_bytes(hello).ok()?;
        let is_possible = channel.to == rank
            && size.contains(channel.from)
            && match channel.purpose {
                Purpose::Collective(_) => channel.from > rank,
                Purpose::Messages(_) | Purpose::Windows => channel.from != rank,
            };
        is_possible.then_some(channel)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HERE: Rank = Rank::new(1);

    fn channel(purpose: Purpose, from: usize, to: usize) -> Vec<u8> {
        Channel { purpose, from: Rank::new(from), to: Rank::new(to) }.encode()
    }

    #[test]
    fn only_hellos_that_can_be_are_taken() {
        let size = WorldSize::new(3).unwrap();
        let collective = Purpose::Collective(GroupId::WORLD);
        assert!(Channel::decode(&channel(collective, 2, 1), HERE, size).is_some());
        assert!(Channel::decode(&channel(Purpose::Messages(GroupId::WORLD), 0, 1), HERE, size).is_some());
        // Who should accept dials; for another rank; from no rank; from itself.
        assert!(Channel::decode(&channel(collective, 0, 1), HERE, size).is_none());
        assert!(Channel::decode(&channel(Purpose::Windows, 0, 2), HERE, size).is_none());
        assert!(Channel::decode(&channel(Purpose::Windows, 3, 1), HERE, size).is_none());
        assert!(Channel::decode(&channel(Purpose::Windows, 1, 1), HERE, size).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_channel_or_none(hello: Vec<u8>) {
            if let Some(channel) = Channel::decode(&hello, HERE, WorldSize::new(3).unwrap()) {
                prop_assert_eq!(channel.to, HERE);
            }
        }
    }
}
