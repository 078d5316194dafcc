//! From the shards of one world to the shards of another.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use zero_core::{Move, Partition, Rank, ReshardError, WorldSize, reshard};

fn rule() -> impl Strategy<Value = (usize, usize)> {
    (1..=17_usize, 1..=8_usize)
}

fn partition(numel: usize, (world, alignment): (usize, usize)) -> Partition {
    Partition::new(numel, WorldSize::new(world).unwrap())
        .with_alignment(NonZeroUsize::new(alignment).unwrap())
}

fn shards(partition: &Partition) -> Vec<Vec<usize>> {
    partition.ranges().map(|(_, range)| range.collect()).collect()
}

proptest! {
    #[test]
    fn moves_yield_exactly_the_new_shards(from in rule(), to in rule(), numel in 0..=71_usize) {
        let (from, to) = (partition(numel, from), partition(numel, to));
        let old = shards(&from);
        let mut new: Vec<Vec<usize>> = vec![Vec::new(); to.world_size().get()];
        for Move { from: sender, to: receiver, range } in reshard(&from, &to).unwrap() {
            let first = from.range(sender).start;
            new[receiver.index()].extend(&old[sender.index()][range.start - first..range.end - first]);
        }
        prop_assert_eq!(new, shards(&to));
    }

    #[test]
    fn each_element_moves_once_and_in_order(from in rule(), to in rule(), numel in 0..=71_usize) {
        let (from, to) = (partition(numel, from), partition(numel, to));
        let moved: Vec<usize> = reshard(&from, &to).unwrap().flat_map(|step| step.range).collect();
        prop_assert_eq!(moved, Vec::from_iter(0..numel));
        let moves = reshard(&from, &to).unwrap().count();
        prop_assert!(moves < from.world_size().get() + to.world_size().get());
    }

    #[test]
    fn the_same_partition_moves_nothing_to_another_rank(rule in rule(), numel in 0..=71_usize) {
        let partition = partition(numel, rule);
        prop_assert!(reshard(&partition, &partition).unwrap().all(|step| step.from == step.to));
    }
}

#[test]
fn a_huge_parameter_is_resharded_without_a_walk_over_its_ranks() {
    let world = WorldSize::new(usize::MAX).unwrap();
    let moves: Vec<_> = reshard(&Partition::new(2, world), &Partition::whole(2)).unwrap().collect();
    let step = |from, range| Move { from: Rank::new(from), to: Rank::ROOT, range };
    assert_eq!(moves, [step(0, 0..1), step(1, 1..2)]);

    let two = WorldSize::new(2).unwrap();
    let whole = Partition::whole(usize::MAX);
    let covered: usize =
        reshard(&Partition::new(usize::MAX, two), &whole).unwrap().map(|step| step.range.len()).sum();
    assert_eq!(covered, usize::MAX);
}

#[test]
fn partitions_of_different_sizes_are_refused() {
    let error = reshard(&Partition::whole(3), &Partition::whole(4)).err().unwrap();
    assert_eq!(error, ReshardError::Numel { from: 3, to: 4 });
    assert!(error.to_string().contains("3 elements into 4"), "{error}");
}
