//! Memory that the ranks of one host share.
//!
//! The memory is an anonymous file (`memfd`) that one rank makes and the others open by its place in `/proc`:
//! it has no name in any file system, so whatever way its ranks end, nothing of it stays behind.

mod arena;
mod hall;
mod route;
mod segment;
mod shape;
mod streaming;
mod streams;
mod table;

pub(crate) use arena::{Arena, ArenaError};
pub(crate) use hall::Hall;
pub(crate) use segment::{Segment, SharedFile};
pub(crate) use shape::Shape;
