//! Which cores a rank's threads run on.

use std::ops::Range;
use std::thread;

use zero_core::{Partition, Rank, WorldSize};

/// The cores that this process may use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cores {
    /// The processors of each core, node after node; empty if the system does not say.
    cores: Vec<Vec<usize>>,
    /// The number of cores of each node.
    nodes: Vec<usize>,
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

/// Where a processor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    socket: usize,
    /// The NUMA node, of which a socket may have several.
    node: usize,
    /// The first processor of the core.
    core: usize,
}

impl Cores {
    pub(super) fn of_process() -> Self {
        let parallelism = thread::available_parallelism().map_or(1, usize::from);
        Self::new(system::processors(), system::place, parallelism)
    }

    /// Puts processors of one core together, and cores of one node. A processor whose place is unknown is a core of its
    /// own; all of these are one node.
    fn new(processors: Vec<usize>, place: impl Fn(usize) -> Option<Place>, parallelism: usize) -> Self {
        type Placed = (Option<Place>, usize);

        let mut placed: Vec<Placed> =
            processors.into_iter().map(|processor| (place(processor), processor)).collect();
        placed.sort_unstable();
        let cores: Vec<&[Placed]> = placed.chunk_by(|a, b| a.0.is_some() && a.0 == b.0).collect();
        let node = |core: &[Placed]| core[0].0.map(|place| (place.socket, place.node));
        let nodes = cores.chunk_by(|a, b| node(a) == node(b)).map(<[_]>::len).collect();
        let processors = |core: &&[Placed]| core.iter().map(|&(_, processor)| processor).collect();
        Self { cores: cores.iter().map(processors).collect(), nodes, parallelism }
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
        let own = &self.cores[range(&self.nodes, rank, size)];
        let threads = if self.parallelism < processors { own.len().min(limit) } else { own.len() };
        Share { threads, processors: own.concat() }
    }
}

/// A rank's range of the cores of all nodes, given the number of cores of each; there are at least as many as ranks.
///
/// Ranks together have all cores. A rank has cores of one node only, unless that left a node without ranks, or the
/// poorest rank with less than three quarters of an even share: then shares are even.
fn range(nodes: &[usize], rank: Rank, size: WorldSize) -> Range<usize> {
    let total = nodes.iter().sum();
    let Some(sizes) = ranks_of_nodes(nodes, size.get()) else {
        return Partition::new(total, size).range(rank);
    };
    let (mut first_core, mut first_rank) = (0, 0);
    for (&cores, ranks) in nodes.iter().zip(sizes) {
        if rank.index() < first_rank + ranks.get() {
            let own = Partition::new(cores, ranks).range(Rank::new(rank.index() - first_rank));
            return first_core + own.start..first_core + own.end;
        }
        first_core += cores;
        first_rank += ranks.get();
    }
    total..total
}

/// How many ranks each node has; none if nodes are better shared.
fn ranks_of_nodes(nodes: &[usize], ranks: usize) -> Option<Vec<WorldSize>> {
    let even = nodes.iter().sum::<usize>() / ranks;
    let mut counts = vec![0; nodes.len()];
    let mut poorest = 0;
    for _ in 0..ranks {
        // Each rank goes where it leaves the most cores to the poorest, of several such nodes to the first.
        let share = |node: &usize| nodes[*node] / (counts[*node] + 1);
        let node = (0..nodes.len()).rev().max_by_key(share)?;
        poorest = share(&node);
        counts[node] += 1;
    }
    let sizes = counts.into_iter().map(WorldSize::new).collect();
    if 4 * poorest >= 3 * even { sizes } else { None }
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

    use super::Place;

    /// Those of the process's affinity mask; none if it cannot be read.
    pub(super) fn processors() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        (0..CpuSet::MAX_CPU).filter(|&processor| set.is_set(processor)).collect()
    }

    pub(super) fn place(processor: usize) -> Option<Place> {
        let folder = format!("/sys/devices/system/cpu/cpu{processor}");
        let first_number = |name: &str| {
            let text = fs::read_to_string(format!("{folder}/topology/{name}")).ok()?;
            text.trim().split([',', '-']).next()?.parse().ok()
        };
        // A link to the node; there is none in a kernel without NUMA.
        let links =
            fs::read_dir(&folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let node = links.filter_map(|name| name.strip_prefix("node")?.parse().ok()).next().unwrap_or(0);
        let (socket, core) = (first_number("physical_package_id")?, first_number("thread_siblings_list")?);
        Some(Place { socket, node, core })
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
    use super::Place;

    pub(super) fn processors() -> Vec<usize> {
        Vec::new()
    }

    pub(super) fn place(_: usize) -> Option<Place> {
        None
    }

    pub(super) fn bind(_: &[usize]) {}
}

#[cfg(test)]
mod tests {
    use zero_core::{Rank, WorldSize};

    use super::{Cores, Place, Share, range};

    fn shares(cores: &Cores, size: usize) -> Vec<Share> {
        let size = WorldSize::new(size).unwrap();
        size.ranks().map(|rank| cores.share(rank, size)).collect()
    }

    /// Two sockets of three cores of two processors, numbered as Linux often does.
    fn machine(parallelism: usize) -> Cores {
        let place =
            |processor| Some(Place { socket: processor % 2, node: processor % 2, core: processor % 6 });
        Cores::new((0..12).collect(), place, parallelism)
    }

    /// How many cores each rank has, and whether they are of one node.
    fn dealt(nodes: &[usize], ranks: usize) -> Vec<(usize, bool)> {
        let size = WorldSize::new(ranks).unwrap();
        let node = |core| (1..=nodes.len()).find(|&end| core < nodes[..end].iter().sum());
        let mut next = 0;
        let dealt = size.ranks().map(|rank| {
            let own = range(nodes, rank, size);
            assert!(own.start == next && !own.is_empty(), "{nodes:?}, {rank}: {own:?}");
            next = own.end;
            (own.len(), node(own.start) == node(own.end - 1))
        });
        let dealt = dealt.collect();
        assert_eq!(next, nodes.iter().sum::<usize>(), "{nodes:?}, {ranks} ranks");
        dealt
    }

    #[test]
    fn processors_of_a_core_stay_together_and_nodes_too() {
        let two = machine(12);
        assert_eq!(two.cores, [[0, 6], [2, 8], [4, 10], [1, 7], [3, 9], [5, 11]]);
        assert_eq!(two.nodes, [3, 3]);
        // Two nodes in each socket, cores numbered across them.
        let place = |core| Some(Place { socket: core / 4, node: 2 * (core / 4) + core % 2, core });
        let four = Cores::new((0..8).collect(), place, 8);
        assert_eq!(four.cores, [[0], [2], [1], [3], [4], [6], [5], [7]]);
        assert_eq!(four.nodes, [2, 2, 2, 2]);
        let unknown = Cores::new(vec![5, 3], |_| None, 2);
        assert_eq!((unknown.cores, unknown.nodes), (vec![vec![3], vec![5]], vec![2]));
    }

    #[test]
    fn ranks_stay_on_a_node_if_that_is_fair() {
        let on_one = |cores: &[usize]| cores.iter().map(|&cores| (cores, true)).collect::<Vec<_>>();
        assert_eq!(dealt(&[8], 3), on_one(&[3, 3, 2]));
        assert_eq!(dealt(&[8, 8], 2), on_one(&[8, 8]));
        assert_eq!(dealt(&[8, 8], 3), on_one(&[4, 4, 8]));
        assert_eq!(dealt(&[5, 5], 4), on_one(&[3, 2, 3, 2]));
        assert_eq!(dealt(&[4, 4, 4, 4], 8), on_one(&[2; 8]));
        assert_eq!(dealt(&[8, 8, 8, 8], 7), on_one(&[4, 4, 4, 4, 4, 4, 8]));
        // What an affinity mask may leave of nodes.
        assert_eq!(dealt(&[2, 6], 4), on_one(&[2, 2, 2, 2]));
        assert_eq!(dealt(&[6, 3], 3), on_one(&[3, 3, 3]));
    }

    #[test]
    fn shares_are_even_where_nodes_are_too_few_or_too_unlike() {
        let cores =
            |nodes: &[usize], ranks| dealt(nodes, ranks).iter().map(|rank| rank.0).collect::<Vec<_>>();
        assert_eq!(cores(&[8, 8], 1), [16]);
        assert_eq!(cores(&[8, 8, 8, 8], 2), [16, 16]);
        assert_eq!(cores(&[4, 4, 4, 4], 3), [6, 5, 5]);
        assert_eq!(cores(&[3, 3], 3), [2, 2, 2]);
        assert_eq!(cores(&[8, 8, 8, 8], 5), [7, 7, 6, 6, 6]);
        assert_eq!(cores(&[1, 15], 2), [8, 8]);
    }

    #[test]
    fn every_core_is_one_ranks() {
        for nodes in [&[1][..], &[6], &[4, 4], &[1, 7], &[5, 3], &[4, 4, 4, 4], &[1, 2, 3, 9]] {
            for ranks in 1..=nodes.iter().sum() {
                dealt(nodes, ranks);
            }
        }
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
        let unknown = Cores::new(vec![], |_| None, 8);
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
