//! One rank of a job, with what a world would give to its fabric.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use zero_core::{Rank, WorldSize};

use super::super::MpiFabric;
use crate::flight::{GroupId, Lane};
use crate::process::{Fabric, Incoming, Links, Operation, Outgoing, Standing, Wait};
use crate::windows::Windows;
use crate::{CommError, OpKind, WindowKey};

/// Long enough for anything that does end.
pub(super) const LONG: Duration = Duration::from_secs(60);

pub(super) struct Job {
    pub(super) fabric: MpiFabric,
    pub(super) standing: Arc<Standing>,
    deadline: Duration,
}

impl Job {
    pub(super) fn start() -> Self {
        let fabric = MpiFabric::start(LONG).unwrap();
        // Nobody hears the notices, so each rank decides alone.
        let standing = Standing::new(fabric.rank(), fabric.size(), None, mpsc::channel().0);
        Self { fabric, standing, deadline: LONG }
    }

    /// A rank that waits `deadline` long, in a world that has not failed.
    pub(super) fn impatient(&mut self, deadline: Duration) {
        self.standing = Standing::new(self.rank(), self.size(), None, mpsc::channel().0);
        self.deadline = deadline;
    }

    pub(super) fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    pub(super) fn size(&self) -> WorldSize {
        self.fabric.size()
    }

    pub(super) fn all(&self) -> Vec<Rank> {
        self.size().ranks().collect()
    }

    pub(super) fn next(&self) -> Rank {
        Rank::new((self.rank().index() + 1) % self.size().get())
    }

    pub(super) fn with_wait<R>(&self, act: impl FnOnce(&mut Wait<'_>) -> R) -> R {
        let expected: Vec<_> =
            self.all().into_iter().map(|rank| (rank, Lane::Collective(GroupId::WORLD))).collect();
        let operation =
            Operation { kind: OpKind::AllToAll, label: "label", sequence: 1, expected: &expected };
        act(&mut Wait::new(&self.standing, operation, self.deadline))
    }

    pub(super) fn collective(&self, group: GroupId) -> Result<Box<dyn Links>, CommError> {
        self.with_wait(|wait| self.fabric.collective(group, &self.all(), wait))
    }

    pub(super) fn transfer(
        &self,
        links: &dyn Links,
        sends: &mut [Outgoing<'_>],
        receives: &mut [Incoming<'_>],
    ) -> Result<(), CommError> {
        self.with_wait(|wait| links.transfer(sends, receives, wait))
    }

    /// Sends `bytes` to all ranks, this one too, and receives as many from each.
    pub(super) fn exchange(&self, links: &dyn Links, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let peers = 0..self.size().get();
        let mut into: Vec<_> = peers.clone().map(|_| vec![0; bytes.len()]).collect();
        let mut sends: Vec<_> = peers.map(|peer| Outgoing { peer, bytes, done: 0 }).collect();
        let mut receives: Vec<_> =
            into.iter_mut().enumerate().map(|(peer, bytes)| Incoming { peer, bytes, done: 0 }).collect();
        self.transfer(links, &mut sends, &mut receives)?;
        // What is left of the sends.
        self.transfer(links, &mut sends, &mut [])?;
        Ok(into)
    }

    pub(super) fn serve(&self, group: GroupId) -> Arc<Windows> {
        let windows = Arc::new(Windows::default());
        self.fabric.serve(group, Arc::clone(&windows));
        windows
    }

    pub(super) fn read(
        &self,
        group: GroupId,
        peer: Rank,
        key: u64,
        offset: usize,
        len: usize,
    ) -> Result<Vec<u8>, CommError> {
        let mut into = vec![0; len];
        self.with_wait(|wait| self.fabric.read(group, peer, WindowKey::new(key), offset, &mut into, wait))?;
        Ok(into)
    }

    /// Waits for all ranks.
    pub(super) fn meet(&self, links: &dyn Links) {
        self.exchange(links, &[1]).unwrap();
    }

    pub(super) fn end(&self) {
        self.fabric.finalize(true, LONG).unwrap();
    }
}

/// A number that looks random.
pub(super) fn number(seed: [u64; 3]) -> u64 {
    GroupId::WORLD.child(seed[0], seed[1]).child(seed[2], 0).get()
}

/// The bytes from `start` on of all that one rank sends to another.
pub(super) fn bytes(from: Rank, to: Rank, start: usize, len: usize) -> Vec<u8> {
    let seed = (from.index() * 7 + to.index() * 31) as u64;
    // Every word differs from those before, so bytes in a wrong place are found.
    (start..start + len)
        .map(|at| ((at as u64 / 8 + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (at % 8 * 8)) as u8)
        .collect()
}
