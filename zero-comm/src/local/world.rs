//! A world of threads.

use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use zero_core::{Rank, WorldSize};

use super::communicator::LocalCommunicator;
use super::group::Group;
use super::health::Health;
use super::presence::Presence;
use crate::failure::Failure;
use crate::lock;
use crate::{Communicator, LossCause, RankFailure, WorldError, panic_message};

/// What the main thread of a program usually has; a rank runs what otherwise runs there.
const STACK_BYTES: usize = 8 << 20;

/// Ranks that are threads of this process.
///
/// The value describes a world; each [`run`](Self::run) and each call of
/// [`communicators`](Self::communicators) makes a new one.
#[derive(Clone, Debug)]
pub struct LocalWorld {
    size: WorldSize,
    deadline: Duration,
}

impl LocalWorld {
    /// How long an operation waits for other ranks unless told otherwise.
    pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

    /// A world of `size` ranks.
    pub const fn new(size: WorldSize) -> Self {
        Self { size, deadline: Self::DEFAULT_DEADLINE }
    }

    /// The number of ranks.
    pub const fn size(&self) -> WorldSize {
        self.size
    }

    /// The same world, in which an operation waits for other ranks no longer than `deadline`.
    #[must_use]
    pub const fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Runs `f` once per rank, each on a thread named `rank-0`, `rank-1`, ..., and returns what they return,
    /// in rank order.
    ///
    /// A rank takes part until `f` returns. When it returns an error or panics, all operations of the other
    /// ranks fail at once and name it, so the world comes to its end.
    ///
    /// # Errors
    ///
    /// The first failure, with all later ones beside it: see [`WorldError`].
    pub fn run<T, E, F>(&self, f: F) -> Result<Vec<T>, WorldError<E>>
    where
        T: Send,
        E: Display + Debug + Send,
        F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
    {
        let health = Arc::new(Health::new(self.size));
        let failures = Mutex::new(Vec::new());
        let run_rank = |rank: Rank, presence: Arc<Presence>, communicator: Arc<dyn Communicator>| {
            let failure = match catch_unwind(AssertUnwindSafe(|| f(communicator))) {
                Ok(Ok(value)) => {
                    // The value may hold communicators, but the rank has come to its end.
                    health.finish(rank);
                    return Some(value);
                }
                Ok(Err(error)) => RankFailure::Error(error),
                Err(payload) => RankFailure::Panic(panic_message(payload.as_ref())),
            };
            let cause = match &failure {
                RankFailure::Error(error) => LossCause::Failed(format!("{error:#}")),
                RankFailure::Panic(message) => LossCause::Panicked(message.clone()),
            };
            // Noted before the others can fail because of it.
            lock(&failures).push((rank, failure));
            health.fail(Failure::Lost { rank, cause });
            // Held until here: the communicators went with `f`, which must not look like a proper end.
            drop(presence);
            None
        };
        let values: Vec<Option<T>> = thread::scope(|scope| {
            let run_rank = &run_rank;
            let mut threads = Vec::with_capacity(self.size.get());
            for (presence, communicator) in self.join(&health) {
                let rank = presence.rank();
                let thread = thread::Builder::new().name(format!("rank-{}", rank.index()));
                let held = Arc::clone(&presence);
                let spawned = thread
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, move || run_rank(rank, held, communicator));
                match spawned {
                    Ok(thread) => threads.push(thread),
                    Err(source) => {
                        let reason = format!("its thread did not start: {source}");
                        health.fail(Failure::Aborted { rank, reason });
                        return Err(WorldError::Spawn { rank, source });
                    }
                }
            }
            Ok(threads.into_iter().map(|thread| thread.join().ok().flatten()).collect())
        })?;
        let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = WorldError::from_failures(failures, health.blamed()) {
            return Err(error);
        }
        Ok(values.into_iter().flatten().collect())
    }

    /// The communicators of all ranks, in rank order, for a caller that has threads of its own.
    ///
    /// A rank has finished when its communicator, and all it made by [`split`](Communicator::split), are
    /// dropped; if that happens while a thread unwinds, it counts as a panic of the rank.
    pub fn communicators(&self) -> Vec<Arc<dyn Communicator>> {
        let health = Arc::new(Health::new(self.size));
        self.join(&health).map(|(_, communicator)| communicator).collect()
    }

    fn join(
        &self,
        health: &Arc<Health>,
    ) -> impl Iterator<Item = (Arc<Presence>, Arc<dyn Communicator>)> + use<> {
        let whole = Group::whole(self.size, health);
        let health = Arc::clone(health);
        let deadline = self.deadline;
        self.size.ranks().map(move |rank| {
            let presence = Arc::new(Presence::new(Arc::clone(&health), rank));
            let communicator =
                LocalCommunicator::new(Arc::clone(&presence), Arc::clone(&whole), rank.index(), deadline);
            (presence, Arc::new(communicator) as Arc<dyn Communicator>)
        })
    }
}
