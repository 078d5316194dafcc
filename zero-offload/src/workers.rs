//! The threads that work on host memory.

mod cores;

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Mutex;

use rayon_core::{ThreadPool, ThreadPoolBuilder};
use zero_core::{Rank, WorldSize};

use crate::lock::lock;
use crate::simd::{InstructionSet, Operation, Simd};
use cores::Cores;

/// Elements of one piece of work: its streams take a few memory pages each, and claiming it costs nothing beside it.
pub(crate) const TILE: usize = 1 << 15;

/// With less than this for each thread, waking it takes longer than it helps.
const LEAST: usize = 1 << 16;

/// Threads that share the work on one rank's slices, and the instruction set that they use.
///
/// The thread that calls takes part, so there is one thread fewer of the pool's own. A slice is cut into tiles at fixed
/// places; each thread goes through a range of its own and then helps others to finish theirs. Neither the number of
/// threads nor the instruction set changes any result. Slices of less than 128 Ki elements are the caller's alone, and
/// nobody is woken for them.
///
/// ```
/// use zero_core::{Rank, WorldSize};
/// use zero_offload::Workers;
///
/// # fn main() -> Result<(), zero_offload::WorkersError> {
/// // The first of two ranks on this host gets the first half of its cores.
/// let workers = Workers::for_rank(Rank::new(0), WorldSize::new(2).unwrap_or(WorldSize::ONE))?;
/// assert!(workers.threads() >= 1);
/// # Ok(())
/// # }
/// ```
pub struct Workers {
    simd: Simd,
    /// All threads but the caller's; none if there would be none.
    pool: Option<ThreadPool>,
    /// The processors that the threads stay on; empty if they go anywhere.
    processors: Vec<usize>,
}

/// Why there are no workers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkersError {
    /// The system gave no thread.
    #[error("cannot start {threads} threads: {source}; use fewer, or raise the limit of the process")]
    Start {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        source: io::Error,
    },

    /// No such rank on this host.
    #[error("local {rank} is not one of the {size} ranks of this host; ranks count from 0")]
    Rank {
        /// The rank.
        rank: Rank,
        /// The number of ranks on the host.
        size: WorldSize,
    },

    /// The machine lacks the instructions.
    #[error("this machine has no {0}; InstructionSet::available says what it has")]
    InstructionSet(InstructionSet),
}

impl Workers {
    /// The calling thread and no other.
    pub fn alone() -> Self {
        Self { simd: Simd::best(), pool: None, processors: Vec::new() }
    }

    /// So many threads, the caller's among them, which go wherever the process may.
    ///
    /// # Errors
    ///
    /// [`WorkersError::Start`] if the system gives no more threads.
    pub fn new(threads: NonZeroUsize) -> Result<Self, WorkersError> {
        Self::on(threads.get(), Vec::new())
    }

    /// A thread for each core that this process may use: for a process that shares its cores with no other rank, because
    /// there is none on this host, or because the launcher has given each its own.
    ///
    /// # Errors
    ///
    /// [`WorkersError::Start`] if the system gives no more threads.
    pub fn for_process() -> Result<Self, WorkersError> {
        Self::for_rank(Rank::ROOT, WorldSize::ONE)
    }

    /// A thread for each core of this rank's share, where all `local_size` ranks of the host may use the same cores.
    ///
    /// On Linux, the cores of the process's affinity mask are dealt out, the two processors of a core together, and threads
    /// stay on their rank's: no two ranks share a core. A rank's cores are of one NUMA node if every node then has a
    /// rank, and every rank at least three quarters of an even share; else shares are even. A limit on processor time
    /// below the number of processors (a container's) makes fewer threads, not fewer cores. With fewer cores than ranks, and
    /// on other systems, threads go wherever the process may; with fewer cores than ranks there is one, the caller's.
    ///
    /// The calling thread is left where it is; [`bind_caller`](Self::bind_caller) puts it on the rank's cores too. Memory
    /// is on the node of the thread that first writes to it: [`HostPool::take_near`](crate::HostPool::take_near) has one of
    /// these do so.
    ///
    /// # Errors
    ///
    /// [`WorkersError::Rank`] if there is no such rank, [`WorkersError::Start`] if the system gives no more threads.
    pub fn for_rank(local_rank: Rank, local_size: WorldSize) -> Result<Self, WorkersError> {
        if !local_size.contains(local_rank) {
            return Err(WorkersError::Rank { rank: local_rank, size: local_size });
        }
        let share = Cores::of_process().share(local_rank, local_size);
        Self::on(share.threads, share.processors)
    }

    /// The same threads with another instruction set than the fastest, to compare them.
    ///
    /// # Errors
    ///
    /// [`WorkersError::InstructionSet`] if this machine lacks it.
    pub fn with_instruction_set(self, set: InstructionSet) -> Result<Self, WorkersError> {
        let simd = Simd::new(set).ok_or(WorkersError::InstructionSet(set))?;
        Ok(Self { simd, ..self })
    }

    /// How many threads work, the caller's among them.
    pub fn threads(&self) -> usize {
        1 + self.pool.as_ref().map_or(0, ThreadPool::current_num_threads)
    }

    /// What the threads use.
    pub const fn instruction_set(&self) -> InstructionSet {
        self.simd.set()
    }

    /// The processors that the threads stay on, by the system's numbers; empty if they go wherever the process may.
    pub fn processors(&self) -> &[usize] {
        &self.processors
    }

    /// Keeps the calling thread on the processors of the others, until it is told otherwise. Of no effect where those go
    /// wherever the process may.
    pub fn bind_caller(&self) {
        cores::bind(&self.processors);
    }

    fn on(threads: usize, processors: Vec<usize>) -> Result<Self, WorkersError> {
        let pool = match threads {
            0 | 1 => None,
            _ => {
                let own = processors.clone();
                let builder = ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .thread_name(|index| format!("offload-{}", index + 1))
                    .start_handler(move |_| cores::bind(&own));
                Some(builder.build().map_err(|error| WorkersError::Start {
                    threads: threads - 1,
                    source: io::Error::other(error),
                })?)
            }
        };
        Ok(Self { pool, processors, ..Self::alone() })
    }

    /// Does something on a thread that stays on the rank's cores; on the caller's, if that is the only one.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Does an operation on this thread, with the instruction set of the workers.
    pub(crate) fn compute<O: Operation>(&self, operation: O) -> O::Output {
        self.simd.run(operation)
    }

    /// Has `each` called on every tile of the work, by several threads if that is worth it, and waits until all is done.
    ///
    /// # Panics
    ///
    /// If a call of `each` does, after all threads have ended theirs.
    pub(crate) fn run<W: Split + Send>(&self, work: W, each: impl Fn(W) + Sync) {
        let Some(pool) = self.pool.as_ref().filter(|_| work.len() >= 2 * LEAST) else {
            return Span(Some(work)).for_each(each);
        };
        // Not more ranges than it is worth to wake threads for; they begin where a tile does.
        let ranges = self.threads().min(work.len() / LEAST);
        let length = work.len().div_ceil(ranges).next_multiple_of(TILE);
        let mut rest = Some(work);
        let spans: Vec<_> = (0..ranges).map(|_| Mutex::new(Span(take(&mut rest, length)))).collect();
        let drain = |first: usize| {
            for span in spans[first..].iter().chain(&spans[..first]) {
                // The lock is held for the time of a split alone, which leaves no half-made span behind.
                let next = || lock(span).next();
                while let Some(tile) = next() {
                    each(tile);
                }
            }
        };
        pool.in_place_scope(|scope| {
            for first in 1..ranges {
                let drain = &drain;
                scope.spawn(move |_| drain(first));
            }
            drain(0);
        });
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("threads", &self.threads())
            .field("processors", &self.processors)
            .field("instruction_set", &self.instruction_set())
            .finish()
    }
}

/// Work that can be cut at an element.
pub(crate) trait Split: Sized {
    /// Elements of it.
    fn len(&self) -> usize;

    /// What is before the element and what begins with it.
    fn split(self, at: usize) -> (Self, Self);
}

/// Takes the first `length` elements, or all if there are fewer.
fn take<W: Split>(rest: &mut Option<W>, length: usize) -> Option<W> {
    let work = rest.take()?;
    if work.len() <= length {
        return Some(work).filter(|work| work.len() > 0);
    }
    let (first, others) = work.split(length);
    *rest = Some(others);
    Some(first)
}

/// What is left of a range of the work, tile by tile.
struct Span<W>(Option<W>);

impl<W: Split> Iterator for Span<W> {
    type Item = W;

    fn next(&mut self) -> Option<W> {
        take(&mut self.0, TILE)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Barrier, Condvar, Mutex};
    use std::thread;

    use zero_core::{Rank, WorldSize};

    use super::{LEAST, Split, TILE, Workers, WorkersError};

    /// Elements from one to before another.
    struct Numbers(usize, usize);

    impl Split for Numbers {
        fn len(&self) -> usize {
            self.1 - self.0
        }

        fn split(self, at: usize) -> (Self, Self) {
            (Self(self.0, self.0 + at), Self(self.0 + at, self.1))
        }
    }

    fn threads(threads: usize) -> Workers {
        Workers::new(NonZeroUsize::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_element_is_worked_on_once_in_tiles_at_fixed_places() {
        for count in [1, 2, 3, 8] {
            let workers = threads(count);
            assert_eq!(workers.threads(), count);
            for len in [0, 1, TILE - 1, TILE, TILE + 1, 2 * LEAST, 9 * TILE + 5, 40 * TILE] {
                let tiles = Mutex::new(Vec::new());
                workers.run(Numbers(0, len), |Numbers(from, to)| tiles.lock().unwrap().push((from, to)));
                let mut tiles = tiles.into_inner().unwrap();
                tiles.sort_unstable();
                let expected: Vec<_> =
                    (0..len).step_by(TILE).map(|from| (from, len.min(from + TILE))).collect();
                assert_eq!(tiles, expected, "{count} threads, {len} elements");
            }
        }
    }

    #[test]
    fn little_work_stays_on_the_calling_thread() {
        let (workers, here) = (threads(4), thread::current().id());
        workers.run(Numbers(0, 2 * LEAST - 1), |_| assert_eq!(thread::current().id(), here));
    }

    #[test]
    fn much_work_is_shared_with_the_caller() {
        let workers = threads(2);
        let (ids, both) = (Mutex::new(BTreeSet::new()), Barrier::new(2));
        workers.run(Numbers(0, 4 * LEAST), |_| {
            let id = format!("{:?}", thread::current().id());
            // Each thread waits in its first tile for the other's.
            if ids.lock().unwrap().insert(id) {
                both.wait();
            }
        });
        assert_eq!(ids.into_inner().unwrap().len(), 2);
    }

    #[test]
    fn nobody_waits_for_a_thread_that_is_late_with_its_tile() {
        const TILES: usize = 12;
        let workers = threads(2);
        let (done, changed) = (Mutex::new(0), Condvar::new());
        workers.run(Numbers(0, TILES * TILE), |Numbers(from, _)| {
            let mut done = done.lock().unwrap();
            if from == 0 {
                // Until the other thread has done all other tiles, those of this range too.
                while *done < TILES - 1 {
                    done = changed.wait(done).unwrap();
                }
            }
            *done += 1;
            changed.notify_one();
        });
        assert_eq!(done.into_inner().unwrap(), TILES);
    }

    #[test]
    fn a_panic_in_any_thread_reaches_the_caller_and_the_workers_go_on() {
        let workers = threads(3);
        for tile in [0, 20, 39] {
            let run = || {
                workers
                    .run(Numbers(0, 40 * TILE), |Numbers(from, _)| assert_ne!(from, tile * TILE, "this one"));
            };
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            let sum = Mutex::new(0);
            workers.run(Numbers(0, 40 * TILE), |numbers| *sum.lock().unwrap() += numbers.len());
            assert_eq!(sum.into_inner().unwrap(), 40 * TILE);
        }
    }

    #[test]
    fn workers_may_be_called_from_several_threads_at_once() {
        let workers = threads(2);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let sum = Mutex::new(0);
                    workers.run(Numbers(0, 12 * TILE), |numbers| *sum.lock().unwrap() += numbers.len());
                    assert_eq!(sum.into_inner().unwrap(), 12 * TILE);
                });
            }
        });
    }

    #[test]
    fn a_rank_that_is_not_of_this_host_is_named() {
        let error = Workers::for_rank(Rank::new(2), WorldSize::new(2).unwrap()).unwrap_err();
        assert!(matches!(error, WorkersError::Rank { .. }));
        assert_eq!(
            error.to_string(),
            "local rank 2 is not one of the 2 ranks of this host; ranks count from 0"
        );
    }

    #[test]
    fn an_instruction_set_of_other_machines_is_refused() {
        let refused = super::InstructionSet::ALL
            .into_iter()
            .filter(|set| Workers::alone().with_instruction_set(*set).is_err())
            .collect::<Vec<_>>();
        let available = super::InstructionSet::available();
        assert_eq!(refused.len() + available.len(), 4);
        assert_eq!(available.last(), Some(&Workers::alone().instruction_set()));
        assert!(!refused.is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_of_two_ranks_stay_on_cores_of_their_own() {
        let size = WorldSize::new(2).unwrap();
        let ranks: Vec<_> = size.ranks().map(|rank| Workers::for_rank(rank, size).unwrap()).collect();
        let cores: Vec<BTreeSet<_>> =
            ranks.iter().map(|workers| workers.processors().iter().copied().collect()).collect();
        assert!(cores[0].is_disjoint(&cores[1]));
        assert_eq!(cores[0].is_empty(), cores[1].is_empty());
        for workers in &ranks {
            // On a thread of its own, which is bound and not set free again.
            thread::scope(|scope| {
                scope.spawn(|| {
                    workers.bind_caller();
                    let set = rustix::thread::sched_getaffinity(None).unwrap();
                    let all = workers.processors();
                    assert!(all.is_empty() || set.count() as usize == all.len());
                    assert!(all.iter().all(|&processor| set.is_set(processor)));
                    workers.install(|| assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), set));
                });
            });
        }
    }
}
