//! Ranks as threads of one process, which read each other's memory.
//!
//! Nothing is serialised and nothing is copied twice: each rank lends its buffers to a rendezvous, and as
//! soon as all have come each computes its own part straight from the memory of the others. The argument why
//! that is sound stands in `rendezvous`, the code that relies on it in `meeting`.

mod communicator;
mod group;
mod health;
mod meeting;
mod presence;
mod rendezvous;
mod world;

pub use world::LocalWorld;
