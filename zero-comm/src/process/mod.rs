//! Ranks as processes, on one host or several.

mod aligned;
mod call;
mod communicator;
mod connect_error;
mod fabric;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod group;
mod host;
mod host_id;
mod hosts;
mod meet;
mod mesh;
mod mesh_plane;
mod plane;
mod posted;
mod presence;
mod shm;
mod standing;
#[cfg(test)]
mod tests;
mod wait;
mod world;

pub use connect_error::ConnectError;
pub(crate) use fabric::{Fabric, Incoming, Links, Outgoing};
pub(crate) use standing::{Finish, Notice, Standing, TimedOut};
#[cfg(test)]
pub(crate) use wait::Operation;
pub(crate) use wait::Wait;
pub use world::ProcessWorld;
