//! Ranks that reach each other over MPI.
//!
//! ```text
//! threads of the rank:  MpiLinks ── Writer, Reader ──┐                     MpiFabric::read, ::finalize, ...
//!                                                    │ Outbox, Inbox          │
//!                                                  Board <────────────────────┘
//!                                                    │
//! the MPI thread:       Engine ── Sending, Receiving ┘  Answers, Mailbox ── Channel, Flight ── MPI
//! ```
//!
//! - *One thread calls MPI.* MPI has no wait with a deadline, and asking it can take for ever: when a rank dies,
//!   Open MPI 4's TCP transport makes `MPI_Test` of its neighbours an endless loop. All other threads put their
//!   orders on the [`Board`](board::Board), and wait for news with deadlines of their own. That thread is also
//!   what makes MPI move while the rank computes, and what answers reads of the rank's windows.
//! - *MPI owns what it reads and writes.* A send or receive that has begun can't be taken back, so memory of a
//!   caller is never lent to MPI: bytes are copied to and from pieces, of which up to 4 are on their way in each
//!   direction of a link (and 4 more received), and a piece whose message never ends is never freed
//!   ([`Flight`](raw::Flight)). A window's bytes are sent from where they are, for their region can be owned.
//! - *A stream is cut by its sender alone.* The receiver asks MPI how long the next message is, keeps what is
//!   left of it, and takes no message before it wants its bytes. So both sides may cut their transfers as they
//!   like, and memory stays bounded by what is wanted.
//! - *Each direction of each link has a tag of its own*, chosen by its sender and told in a first message
//!   ([`Directory`](directory::Directory)), so groups never meet.
//! - *What it costs*: the way over the MPI thread, which for short messages is more than MPI itself takes, and on an
//!   idle rank a look every half a millisecond, so that reads are seen.
//! - *MPI is started once in a process*, and ended by [`MpiFabric::finalize`] if all ranks are well. `docs/mpi.md`
//!   tells what that means for users.

mod answers;
mod backoff;
mod board;
mod directory;
mod engine;
mod error;
mod fabric;
mod inbox;
mod links;
mod memory;
mod news;
mod outbox;
mod raw;
#[cfg(test)]
mod tests;
mod wire;

pub use error::MpiError;
pub(crate) use fabric::MpiFabric;
