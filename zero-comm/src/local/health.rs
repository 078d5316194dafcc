//! What a world knows about its ranks: who has finished, and why it failed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;

use zero_core::{Rank, WorldSize};

use super::rendezvous::Rendezvous;
use crate::failure::Failure;
use crate::flight::{FlightReport, Recorder};
use crate::lock;
use crate::{CommError, OpKind};

/// How often a waiting rank looks before it sleeps: a few microseconds, about what falling asleep and being
/// woken costs.
const SPINS: u32 = 200;

/// The state of one world, shared by all groups of it.
pub(super) struct Health {
    spins: u32,
    /// For each rank that came to its end while the world had not failed, the how manieth it was.
    finished: Vec<AtomicUsize>,
    /// How many ranks have finished.
    finishes: AtomicUsize,
    failure: OnceLock<Failure>,
    /// What each rank did.
    recorders: Vec<Arc<Recorder>>,
    /// Where ranks may be asleep.
    rendezvous: Mutex<Vec<Weak<Rendezvous>>>,
}

impl Health {
    pub(super) fn new(size: WorldSize) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            // With fewer cores than ranks, spinning takes the core from the rank that is waited for.
            spins: if size.get() <= cores { SPINS } else { 0 },
            finished: size.ranks().map(|_| AtomicUsize::new(0)).collect(),
            finishes: AtomicUsize::new(0),
            failure: OnceLock::new(),
            recorders: size.ranks().map(|_| Arc::default()).collect(),
            rendezvous: Mutex::new(Vec::new()),
        }
    }

    pub(super) const fn spins(&self) -> u32 {
        self.spins
    }

    pub(super) fn recorder(&self, rank: Rank) -> &Arc<Recorder> {
        &self.recorders[rank.index()]
    }

    /// Makes [`announce`](Self::announce) reach `rendezvous`.
    pub(super) fn register(&self, rendezvous: &Arc<Rendezvous>) {
        let mut all = lock(&self.rendezvous);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(rendezvous));
    }

    /// Fails the world, unless it has failed before.
    pub(super) fn fail(&self, failure: Failure) {
        if self.record(failure) {
            self.announce();
        }
    }

    /// Fails the world without waking anybody; `announce` must follow if this was the first failure.
    ///
    /// Takes no lock, so that a rendezvous can call it with its own lock held.
    pub(super) fn record(&self, failure: Failure) -> bool {
        self.failure.set(failure.cut()).is_ok()
    }

    /// Notes that `rank` will not come again.
    pub(super) fn finish(&self, rank: Rank) {
        // Otherwise a rank that ends because of a failure would hide the failure.
        if self.failure.get().is_some() || self.finished(rank).is_some() {
            return;
        }
        let order = self.finishes.fetch_add(1, Ordering::SeqCst) + 1;
        self.finished[rank.index()].store(order, Ordering::SeqCst);
        tracing::debug!(%rank, "rank finished");
        self.wake();
    }

    /// If `rank` has finished, its place in the order in which ranks did.
    pub(super) fn finished(&self, rank: Rank) -> Option<usize> {
        Some(self.finished[rank.index()].load(Ordering::SeqCst)).filter(|order| *order > 0)
    }

    /// The error that `operation` gets if the world has failed.
    pub(super) fn check(&self, operation: OpKind, label: &str) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.error(operation, label)))
    }

    /// The rank that the first failure names as its origin.
    pub(super) fn blamed(&self) -> Option<Rank> {
        self.failure.get()?.blamed()
    }

    /// Lets every waiting rank see the failure, and says what all did last.
    pub(super) fn announce(&self) {
        // What they did is looked at before those who wait give up.
        let records: Vec<_> = self.recorders.iter().map(|recorder| Some(recorder.records())).collect();
        self.wake();
        if let Some(failure) = self.failure.get() {
            tracing::error!(%failure, "the world has failed");
            tracing::error!("{}", FlightReport::new(&records));
        }
    }

    fn wake(&self) {
        let all: Vec<_> = lock(&self.rendezvous).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|rendezvous| rendezvous.wake());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use zero_core::DType;

    use super::*;
    use crate::GroupId;
    use crate::LossCause;
    use crate::flight::Lane;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_world_that_fails_says_once_what_all_did_last() {
        let health = Health::new(WorldSize::new(2).unwrap());
        let lane = Lane::Collective(GroupId::WORLD);
        health.recorder(Rank::new(1)).begin(lane, OpKind::AllReduce, Some((DType::F32, 7)), "gradient");
        let (log, failure) = (Log::default(), Failure::Lost { rank: Rank::ROOT, cause: LossCause::Finished });
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            health.fail(failure.clone());
            health.fail(failure);
        });
        let told = String::from_utf8(lock(&log.0).clone()).unwrap();
        assert!(told.contains("rank 0 had finished and will not come"), "{told}");
        assert!(told.contains("all_reduce 7 x f32  \"gradient\"  waiting    rank 1"), "{told}");
        assert_eq!(told.matches("the last operations of 2 ranks").count(), 1, "{told}");
    }
}
