//! How ranks that share no memory reach each other.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use zero_core::Rank;

use super::wait::Wait;
use crate::flight::GroupId;
use crate::windows::Windows;
use crate::{CommError, WindowKey};

/// Bytes on their way to a peer.
#[derive(Debug)]
pub(crate) struct Outgoing<'a> {
    /// The peer's index in the links.
    pub(crate) peer: usize,
    pub(crate) bytes: &'a [u8],
    /// How many of them are gone; kept by the links.
    pub(crate) done: usize,
}

/// Room for bytes on their way from a peer.
#[derive(Debug)]
pub(crate) struct Incoming<'a> {
    /// The peer's index in the links.
    pub(crate) peer: usize,
    pub(crate) bytes: &'a mut [u8],
    /// How many of them have come; kept by the links.
    pub(crate) done: usize,
}

/// This rank's links to some peers, for operations of one order: used by one operation at a time.
///
/// Between two ranks bytes arrive in the order sent, without boundaries: both sides know the lengths.
pub(crate) trait Links: Send + Sync + Debug {
    /// Moves bytes until every one of `receives` is complete; if there are none, until every one of `sends`
    /// is. What is left of the sends goes on with the next call, in which they must come first.
    ///
    /// Transfers of one peer happen in the order of the slices. A transfer of no bytes is complete.
    ///
    /// # Errors
    ///
    /// Those of [`Wait::check`] and [`Wait::broken`]; after an error the links are of no use.
    fn transfer(
        &self,
        sends: &mut [Outgoing<'_>],
        receives: &mut [Incoming<'_>],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError>;

    /// How much of a buffer to all-reduce at once: little enough to stay in the caches of those who share
    /// some, much enough to hide the way to those who are far. A multiple of every element's size.
    fn piece_bytes(&self) -> usize;
}

/// Makes links, and reads windows. One per rank.
pub(crate) trait Fabric: Send + Sync + Debug {
    /// Links to `peers`, ranks of the world, for the collective operations of `group`; a link's index is its
    /// peer's place in `peers`. All of them make theirs at the same time.
    fn collective(
        &self,
        group: GroupId,
        peers: &[Rank],
        wait: &mut Wait<'_>,
    ) -> Result<Box<dyn Links>, CommError>;

    /// The link, of index 0 and both ways, for messages to `peer`. Made once per group and peer, at the first message.
    fn sender(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError>;

    /// The link, of index 0 and both ways, for messages from `peer`. Made once per group and peer, at the first message.
    fn receiver(&self, group: GroupId, peer: Rank, wait: &mut Wait<'_>) -> Result<Box<dyn Links>, CommError>;

    /// Lets other ranks read this rank's `windows` of `group`, until it is to forget them.
    fn serve(&self, group: GroupId, windows: Arc<Windows>);

    /// Lets nobody read the windows of `group` any more, and returns them.
    fn forget(&self, group: GroupId) -> Option<Arc<Windows>>;

    /// Ends what the fabric holds outside this process, once all ranks have finished, or the world has failed
    /// and is not `healthy`.
    fn end(&self, _healthy: bool, _deadline: Duration) {}

    /// Fills `into` from `peer`'s window, without the help of the peer's own threads.
    ///
    /// # Errors
    ///
    /// As [`Communicator::read`](crate::Communicator::read).
    fn read(
        &self,
        group: GroupId,
        peer: Rank,
        key: WindowKey,
        offset: usize,
        into: &mut [u8],
        wait: &mut Wait<'_>,
    ) -> Result<(), CommError>;
}
