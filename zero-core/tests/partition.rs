//! Who owns which elements: every small case, and random huge ones.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use zero_core::{Partition, Rank, WorldSize};

fn partition(numel: usize, world: usize, alignment: usize) -> Partition {
    Partition::new(numel, WorldSize::new(world).unwrap())
        .with_alignment(NonZeroUsize::new(alignment).unwrap())
}

/// World sizes 1 to 17, alignments 1 to 8, and up to three more elements than four full rounds.
fn small_cases() -> impl Iterator<Item = Partition> {
    (1..=17).flat_map(|world| {
        (1..=8).flat_map(move |alignment| {
            (0..=4 * world + 3).map(move |numel| partition(numel, world, alignment))
        })
    })
}

#[test]
fn shards_tile_the_elements_in_rank_order() {
    for partition in small_cases() {
        let mut end = 0;
        for (position, (rank, range)) in partition.ranges().enumerate() {
            assert_eq!((rank.index(), range.start), (position, end), "{partition:?}");
            assert_eq!(partition.range(rank), range, "{partition:?}");
            assert_eq!(partition.len(rank), range.len(), "{partition:?}");
            end = range.end;
        }
        assert_eq!(end, partition.numel(), "{partition:?}");
        assert_eq!(partition.ranges().len(), partition.world_size().get());
    }
}

#[test]
fn every_element_has_exactly_one_owner() {
    for partition in small_cases() {
        for index in 0..partition.numel() {
            let owners: Vec<_> = partition
                .ranges()
                .filter(|(_, range)| range.contains(&index))
                .map(|(rank, _)| rank)
                .collect();
            assert_eq!(owners, Vec::from_iter(partition.owner(index)), "{index} of {partition:?}");
        }
        assert_eq!(partition.owner(partition.numel()), None);
    }
}

#[test]
fn shards_differ_by_at_most_one_grain_and_the_first_is_the_largest() {
    for partition in small_cases() {
        let alignment = partition.alignment().get();
        let grains: Vec<_> = partition.ranges().map(|(_, range)| range.len().div_ceil(alignment)).collect();
        assert!(
            grains.iter().max().unwrap() - grains.iter().min().unwrap() <= 1,
            "{partition:?}: {grains:?}"
        );
        let largest = partition.ranges().map(|(_, range)| range.len()).max();
        assert_eq!(largest, Some(partition.max_len()), "{partition:?}");
    }
}

#[test]
fn shards_begin_at_multiples_of_the_alignment() {
    for partition in small_cases() {
        for (_, range) in partition.ranges().filter(|(_, range)| !range.is_empty()) {
            assert_eq!(range.start % partition.alignment().get(), 0, "{partition:?}");
        }
    }
}

#[test]
fn the_pieces_of_a_range_are_what_its_elements_owners_say() {
    for partition in small_cases().filter(|partition| partition.numel() <= 24) {
        for start in 0..=partition.numel() + 1 {
            for end in start..=partition.numel() + 2 {
                let pieces: Vec<_> = partition.intersect(start..end).collect();
                assert!(pieces.iter().all(|(_, piece)| !piece.is_empty()), "{partition:?}");
                let owners: Vec<_> = pieces
                    .into_iter()
                    .flat_map(|(rank, piece)| piece.map(move |index| (index, rank)))
                    .collect();
                let expected: Vec<_> =
                    (start..end).filter_map(|index| Some((index, partition.owner(index)?))).collect();
                assert_eq!(owners, expected, "{start}..{end} of {partition:?}");
            }
        }
    }
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "a caller may compute one")]
fn a_range_that_ends_before_it_begins_has_no_pieces() {
    assert_eq!(partition(10, 3, 1).intersect(7..2).count(), 0);
}

#[test]
fn a_shard_may_be_empty() {
    let partition = partition(2, 4, 1);
    let shards: Vec<_> = partition.ranges().map(|(_, range)| range).collect();
    assert_eq!(shards, [0..1, 1..2, 2..2, 2..2]);
}

#[test]
fn a_rank_outside_of_the_world_owns_nothing() {
    let partition = partition(10, 4, 1);
    assert_eq!(partition.range(Rank::new(4)), 10..10);
    assert_eq!(partition.range(Rank::new(usize::MAX)), 10..10);
}

#[test]
fn a_whole_has_one_owner() {
    let whole = Partition::whole(7);
    assert_eq!((whole.world_size(), whole.range(Rank::ROOT)), (WorldSize::ONE, 0..7));
    assert!(!whole.is_empty());
    assert!(Partition::whole(0).is_empty());
}

#[test]
fn a_partition_reads_back_as_written_and_refuses_an_alignment_of_zero() {
    let text = serde_json::to_string(&partition(10, 3, 4)).unwrap();
    assert_eq!(text, r#"{"numel":10,"world":3,"alignment":4}"#);
    assert_eq!(serde_json::from_str::<Partition>(&text).unwrap(), partition(10, 3, 4));
    assert!(serde_json::from_str::<Partition>(r#"{"numel":10,"world":3,"alignment":0}"#).is_err());
}

fn near_the_end() -> impl Strategy<Value = usize> {
    prop_oneof![Just(usize::MAX), usize::MAX - 1000..=usize::MAX, any::<usize>()]
}

fn at_least_one() -> impl Strategy<Value = usize> {
    prop_oneof![1..=17_usize, Just(usize::MAX), 1..=usize::MAX]
}

proptest! {
    #[test]
    fn nothing_overflows(
        numel in near_the_end(),
        world in at_least_one(),
        alignment in at_least_one(),
        probe in any::<usize>(),
    ) {
        let partition = partition(numel, world, alignment);
        for rank in [0, 1, world / 2, world - 1, world, probe].map(Rank::new) {
            let range = partition.range(rank);
            prop_assert!(range.start <= range.end && range.end <= numel);
            prop_assert!(range.len() <= partition.max_len());
            if !range.is_empty() {
                prop_assert_eq!(partition.owner(range.start), Some(rank));
                prop_assert_eq!(partition.owner(range.end - 1), Some(rank));
            }
        }
        prop_assert_eq!(partition.range(Rank::new(world - 1)).end, numel);
        if let Some(owner) = partition.owner(probe) {
            prop_assert!(partition.range(owner).contains(&probe));
            let pieces: Vec<_> = partition.intersect(probe..probe + 1).collect();
            prop_assert_eq!(pieces, [(owner, probe..probe + 1)]);
        }
    }
}
