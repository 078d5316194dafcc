//! Which cores a rank's threads run on.

use std::thread;

use zero_core::{Partition, Rank, WorldSize};

/// The cores that this process may use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cores {
    /// The processors of each core, those of one socket together; empty if the system does not say.
    cores: Vec<Vec<usize>>,
    /// How many threads can run at the same time: less than there are processors where processor time is limited.
    parallelism: usize,
}

/// A rank's part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// At least one.
    pub(super) threads: usize,
    /// Empty for all that the process may use.
    pub(super) processors: Vec<usize>,
}

impl Cores {
    pub(super) fn of_process() -> Self {
        let parallelism = thread::available_parallelism().map_or(1, usize::from);
        Self { cores: by_core(system::processors(), system::place), parallelism }
    }

    pub(super) fn share(&self, rank: Rank, size: WorldSize) -> Share {
        let processors = self.cores.iter().map(Vec::len).sum();
        let limit = (self.parallelism / size.get()).max(1);
        if self.cores.is_empty() {
            return Share { threads: limit, processors: Vec::new() };
        }
        if self.cores.len() < size.get() {
            return Share { threads: 1, processors: Vec::new() };
        }
        let own = &self.cores[Partition::new(self.cores.len(), size).range(rank)];
        let threads = if self.parallelism < processors { own.len().min(limit) } else { own.len() };
        Share { threads, processors: own.concat() }
    }
}

/// Puts processors of one core together, cores in order of their socket. One whose place is unknown is a core of its own.
fn by_core(processors: Vec<usize>, place: impl Fn(usize) -> Option<(usize, usize)>) -> Vec<Vec<usize>> {
    let mut placed: Vec<_> = processors.into_iter().map(|processor| (place(processor), processor)).collect();
    placed.sort_unstable();
    let same_core = |a: &(Option<_>, usize), b: &(Option<_>, usize)| a.0.is_some() && a.0 == b.0;
    placed.chunk_by(same_core).map(|core| core.iter().map(|&(_, processor)| processor).collect()).collect()
}

/// Keeps the calling thread on these processors, if there are any.
pub(super) fn bind(processors: &[usize]) {
    if !processors.is_empty() {
        system::bind(processors);
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// Those of the process's affinity mask; none if it cannot be read.
    pub(super) fn processors() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        (0..CpuSet::MAX_CPU).filter(|&processor| set.is_set(processor)).collect()
    }

    /// The socket, and the first processor of the core.
    pub(super) fn place(processor: usize) -> Option<(usize, usize)> {
        let first_number = |name: &str| {
            let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/{name}");
            fs::read_to_string(path).ok()?.trim().split([',', '-']).next()?.parse().ok()
        };
        Some((first_number("physical_package_id")?, first_number("thread_siblings_list")?))
    }

    pub(super) fn bind(processors: &[usize]) {
        let mut set = CpuSet::new();
        for &processor in processors {
            set.set(processor);
        }
        // Where this is forbidden, threads run wherever they may: slower at worst.
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::debug!(%error, ?processors, "a thread is not bound to its cores");
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn processors() -> Vec<usize> {
        Vec::new()
    }

    pub(super) fn place(_: usize) -> Option<(usize, usize)> {
        None
    }

    pub(super) fn bind(_: &[usize]) {}
}

#[cfg(test)]
mod tests {
    use zero_core::{Rank, WorldSize};

    use super::{Cores, Share, by_core};

    fn shares(cores: &Cores, size: usize) -> Vec<Share> {
        let size = WorldSize::new(size).unwrap();
        size.ranks().map(|rank| cores.share(rank, size)).collect()
    }

    /// Two sockets of three cores of two processors, numbered as Linux often does.
    fn machine(parallelism: usize) -> Cores {
        let place = |processor: usize| Some((processor % 2, processor % 6 / 2));
        Cores { cores: by_core((0..12).collect(), place), parallelism }
    }

    #[test]
    fn processors_of_a_core_stay_together_and_sockets_too() {
        assert_eq!(machine(12).cores, [[0, 6], [2, 8], [4, 10], [1, 7], [3, 9], [5, 11]]);
        assert_eq!(by_core(vec![5, 3], |_| None), [[3], [5]]);
    }

    #[test]
    fn ranks_get_disjoint_cores_and_together_all() {
        for size in 1..=6 {
            let shares = shares(&machine(12), size);
            let mut all: Vec<_> = shares.iter().flat_map(|share| share.processors.clone()).collect();
            all.sort_unstable();
            assert_eq!(all, (0..12).collect::<Vec<_>>(), "{size} ranks");
            assert!(shares.iter().all(|share| share.threads * 2 == share.processors.len()));
        }
        assert_eq!(shares(&machine(12), 2)[1], Share { threads: 3, processors: vec![1, 7, 3, 9, 5, 11] });
    }

    #[test]
    fn with_fewer_cores_than_ranks_each_has_one_thread_that_goes_anywhere() {
        for share in shares(&machine(12), 7) {
            assert_eq!(share, Share { threads: 1, processors: vec![] });
        }
    }

    #[test]
    fn limited_processor_time_makes_fewer_threads() {
        assert_eq!(shares(&machine(4), 2).map_threads(), [2, 2]);
        assert_eq!(shares(&machine(1), 3).map_threads(), [1, 1, 1]);
        assert_eq!(shares(&machine(11), 1).map_threads(), [6]);
    }

    #[test]
    fn a_system_that_does_not_name_its_processors_is_shared_by_number() {
        let unknown = Cores { cores: vec![], parallelism: 8 };
        assert_eq!(shares(&unknown, 3).map_threads(), [2, 2, 2]);
        assert!(shares(&unknown, 3).iter().all(|share| share.processors.is_empty()));
    }

    #[test]
    fn this_process_has_at_least_one_core() {
        let share = Cores::of_process().share(Rank::ROOT, WorldSize::ONE);
        assert!(share.threads >= 1, "{share:?}");
    }

    trait Threads {
        fn map_threads(&self) -> Vec<usize>;
    }

    impl Threads for Vec<Share> {
        fn map_threads(&self) -> Vec<usize> {
            self.iter().map(|share| share.threads).collect()
        }
    }
}
