//! One operation as the flight recorder keeps it.

use std::fmt;

use serde::{Deserialize, Serialize};
use zero_core::{DType, Rank};

use crate::OpKind;

/// Names a group within its world, alike on all its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupId(u64);

impl GroupId {
    /// The group of all ranks.
    pub const WORLD: Self = Self(0);

    /// The group of `color` that the `sequence`-th collective operation of this group splits off.
    pub(crate) fn child(self, sequence: u64, color: u64) -> Self {
        let mut mixed = self.0;
        for word in [sequence, color] {
            // The finalizer of splitmix64.
            mixed = (mixed ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^= mixed >> 31;
        }
        Self(mixed.max(1))
    }

    /// The group that another process calls by this number.
    pub(crate) const fn from_wire(number: u64) -> Self {
        Self(number)
    }

    /// The number behind the name.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::WORLD {
            f.pad("world")
        } else {
            // Enough to tell the groups of one program apart.
            f.pad(&format!("{:06x}", self.0 >> 40))
        }
    }
}

/// Operations that one rank calls in an order of their own. Peers are ranks of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Lane {
    /// The collective operations of a group.
    Collective(GroupId),
    /// Messages to a rank.
    Send(GroupId, Rank),
    /// Messages from a rank.
    Receive(GroupId, Rank),
}

impl Lane {
    pub(crate) const fn group(self) -> GroupId {
        match self {
            Self::Collective(group) | Self::Send(group, _) | Self::Receive(group, _) => group,
        }
    }
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FlightState {
    /// This rank has come; not all others have.
    Waiting,
    /// All have come, and data moves.
    Moving,
    /// It has ended well.
    Done,
    /// It has ended with an error.
    Failed,
}

impl fmt::Display for FlightState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Waiting => "waiting",
            Self::Moving => "moving",
            Self::Done => "done",
            Self::Failed => "failed",
        })
    }
}

/// One operation of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The group it belongs to.
    pub group: GroupId,
    /// The rank of the world it is a message to or from; `None` for collective operations.
    pub peer: Option<Rank>,
    /// The how manieth it is, from 1: of the collective operations of its group, or of the messages of one
    /// direction between two ranks.
    pub sequence: u64,
    /// What was called.
    pub kind: OpKind,
    /// The element type and number, if it moves elements: of the whole buffer where ranks have parts.
    pub elements: Option<(DType, usize)>,
    /// The label; at most [`FlightRecord::LABEL_BYTES`] of it.
    pub label: String,
    /// How far it came.
    pub state: FlightState,
}

impl FlightRecord {
    /// How many operations of a rank are kept.
    pub const KEPT: usize = 256;

    /// How much of a label is kept.
    pub const LABEL_BYTES: usize = 64;
}

impl fmt::Display for FlightRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} {}", self.group, self.sequence, self.kind)?;
        if let Some(peer) = self.peer {
            write!(f, " {} {peer}", if self.kind == OpKind::Receive { "from" } else { "to" })?;
        }
        if let Some((dtype, elements)) = self.elements {
            write!(f, " {elements} x {dtype}")?;
        }
        write!(f, " {:?} {}", self.label, self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::GroupId;

    #[test]
    fn groups_have_names_of_their_own() {
        let mut names: Vec<_> = (0..100)
            .flat_map(|sequence| (0..100).map(move |color| GroupId::WORLD.child(sequence, color)))
            .collect();
        names.push(GroupId::WORLD);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 10_001);
    }
}
