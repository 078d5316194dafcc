//! What ranks and the coordinator say to each other.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use zero_core::{Rank, WorldSize};

use super::join_error::Refusal;
use crate::FlightRecord;
use crate::failure::Failure;
use crate::flight::{Begun, FlightReport, GroupId, Lane};
use crate::process::Notice;

/// The hello of both sides in the handshake of a control connection.
pub(super) const PURPOSE: &[u8] = b"control";

/// A rank introduces itself, to the coordinator and by that to all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) rank: Rank,
    /// The size of the world that the rank belongs to.
    pub(crate) size: WorldSize,
    /// Names the program, its version and what else has to be equal on all ranks.
    pub(crate) build: String,
    /// Names the host: ranks with equal names share memory.
    pub(crate) host: String,
    /// Where ranks of other hosts can reach this one.
    pub(crate) data: Option<SocketAddr>,
    /// Where ranks of the same host find this one's shared memory.
    pub(crate) segment: Option<String>,
    /// The number of its process on its host.
    pub(crate) pid: u32,
    /// How long it waits for the others to join, and its operations for other ranks.
    pub(crate) deadline: Duration,
}

/// Who takes part in a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Roster {
    /// All ranks, in order.
    pub(crate) hellos: Vec<Hello>,
    /// The rank in whose process the coordinator runs, unless it runs in a launcher's.
    pub(crate) host: Option<Rank>,
}

/// From a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromRank {
    Join(Hello),
    Notice(Notice),
    /// The answer to [`ToRank::Ask`].
    State {
        /// How many operations of the lane in question the rank has begun.
        begun: u64,
        records: Vec<FlightRecord>,
    },
    Pong,
}

/// From the coordinator to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToRank {
    Refused(Refusal),
    /// All ranks are there. Comes after one `Present` for each, in order.
    Start {
        host: Option<Rank>,
        /// After how much silence each side gives the other up.
        silence: Duration,
    },
    Present(Hello),
    /// All ranks are connected with each other.
    Go,
    /// Asks for the state of the rank, in particular of a lane.
    Ask(Option<Lane>),
    Ping,
    /// Why the world has failed.
    Verdict(Failure),
    /// A rank has finished.
    Finished {
        rank: Rank,
        /// The how manieth of all ranks it was, from 1.
        order: usize,
        begun: Begun,
    },
    Flight(FlightReport),
    /// All members have dropped the group: nobody reads its windows any more.
    Forget(GroupId),
}
