//! Ranks that talk over TCP.
//!
//! Each rank listens at one port, which the rendezvous makes known. There is one connection for each pair of
//! ranks in each group, so that operations of different groups do not wait for each other; one for the
//! messages of each direction; and as many as threads read at once for windows, which the owner's service
//! threads answer.

mod channel;
mod counters;
mod door;
mod fabric;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod links;
mod service;

pub(crate) use fabric::{TcpFabric, Unstarted};
