//! The control plane: how the ranks of a world find each other, and how all of them learn why it failed.
//!
//! Each rank has one connection to the *coordinator*, a few threads in the launcher's process or in rank 0's.
//! Data never goes this way. What the coordinator decides is in `coordinator::world`, without any I/O.

mod agent;
mod coordinator;
mod frame;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod handshake;
mod heartbeat;
mod join_error;
mod message;
mod reception;
mod socket;
#[cfg(test)]
pub(crate) mod strangers;
#[cfg(test)]
mod tests;
mod timed;
mod token;

pub(crate) use agent::{Agent, Connection};
pub use coordinator::{Coordinator, CoordinatorOptions};
pub(crate) use handshake::{HandshakeError, connect};
pub use join_error::{JoinError, Refusal};
pub(crate) use message::{Hello, Roster};
pub(crate) use reception::{HANDSHAKE, Host, Reception};
pub(crate) use socket::tune;
pub(crate) use timed::Timed;
pub use token::{Token, TokenError};
