//! Layouts: names, buckets, units.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use zero_core::{
    Bytes, DType, Layout, LayoutError, LayoutOptions, ParameterIndex, ParameterSpec, Rank, WorldSize,
};

fn spec(name: &str, shape: &[usize]) -> ParameterSpec {
    ParameterSpec {
        name: name.into(),
        shape: shape.into(),
        dtype: DType::F32,
        trainable: true,
        aliases: vec![],
    }
}

fn frozen(name: &str, shape: &[usize]) -> ParameterSpec {
    ParameterSpec { trainable: false, ..spec(name, shape) }
}

fn tied(name: &str, shape: &[usize], aliases: &[&str]) -> ParameterSpec {
    ParameterSpec { aliases: aliases.iter().map(|&alias| alias.into()).collect(), ..spec(name, shape) }
}

fn options(bucket_elements: u64) -> LayoutOptions {
    LayoutOptions { bucket_bytes: Bytes::new(4 * bucket_elements), ..LayoutOptions::default() }
}

fn layout(specs: Vec<ParameterSpec>, world: usize, options: LayoutOptions) -> Layout {
    Layout::new(specs, WorldSize::new(world).unwrap(), options).unwrap()
}

fn refusal(specs: Vec<ParameterSpec>) -> LayoutError {
    Layout::new(specs, WorldSize::ONE, LayoutOptions::default()).unwrap_err()
}

/// The parameters of each bucket, as positions.
fn grouping(layout: &Layout) -> Vec<Vec<usize>> {
    let positions = |parameters: &[ParameterIndex]| parameters.iter().map(|index| index.index()).collect();
    layout.buckets().iter().map(|bucket| positions(bucket.parameters())).collect()
}

#[test]
fn a_tied_parameter_is_one_entry_found_by_each_of_its_paths() {
    let layout = layout(vec![tied("embed.weight", &[4, 2], &["head.weight"])], 2, LayoutOptions::default());
    assert_eq!(layout.numel(), 8);
    assert_eq!(layout.find("head.weight"), layout.find("embed.weight"));
    assert_eq!(layout.find("head.weight").unwrap().aliases(), ["head.weight"]);
    assert_eq!(layout.find("head"), None);
}

#[test]
fn a_frozen_parameter_is_sharded_but_in_no_bucket() {
    let layout = layout(vec![frozen("a.w", &[6]), spec("a.b", &[4])], 2, LayoutOptions::default());
    assert_eq!((layout.numel(), layout.trainable_numel()), (10, 4));
    assert_eq!(layout.shard_numel(Rank::new(1)), 5);
    assert_eq!(layout.trainable_shard_numel(Rank::new(1)), 2);
    assert_eq!(layout.bucket_of(ParameterIndex::new(0)), None);
    assert_eq!(layout.bucket_of(ParameterIndex::new(1)), Some(0));
    assert_eq!(layout.bucket_of(ParameterIndex::new(2)), None);
}

#[test]
fn a_scalar_has_one_element_and_an_empty_parameter_none() {
    let layout = layout(vec![spec("scale", &[]), spec("none", &[3, 0])], 3, LayoutOptions::default());
    let numel: Vec<_> = layout.parameters().iter().map(|parameter| parameter.numel()).collect();
    assert_eq!(numel, [1, 0]);
    assert_eq!(layout.bucket_of(ParameterIndex::new(1)), Some(0));
    assert_eq!(layout.buckets()[0].segments(ParameterIndex::new(1)), []);
}

#[test]
fn an_empty_dim_makes_a_parameter_empty_however_large_the_others_are() {
    let layout = layout(vec![spec("none", &[usize::MAX, 2, 0])], 1, LayoutOptions::default());
    assert_eq!(layout.numel(), 0);
}

#[test]
fn a_model_without_parameters_has_a_layout() {
    let layout = layout(vec![], 3, LayoutOptions::default());
    assert_eq!((layout.numel(), layout.largest_unit()), (0, 0));
    assert!(layout.buckets().is_empty() && layout.units().is_empty());
}

#[test]
fn buckets_fill_in_backward_order_up_to_their_limit() {
    let specs = [3, 4, 2, 2].iter().enumerate().map(|(at, &numel)| spec(&format!("p{at}"), &[numel]));
    let layout = layout(specs.collect(), 2, options(7));
    assert_eq!(grouping(&layout), [vec![3, 2], vec![1, 0]]);
}

#[test]
fn a_parameter_larger_than_a_bucket_stands_alone() {
    let specs = [1, 9, 1, 1].iter().enumerate().map(|(at, &numel)| spec(&format!("p{at}"), &[numel]));
    let layout = layout(specs.collect(), 2, options(4));
    assert_eq!(grouping(&layout), [vec![3, 2], vec![1], vec![0]]);
    assert_eq!(layout.buckets()[1].numel(), 9);
}

#[test]
fn an_empty_parameter_rides_along_so_that_no_bucket_is_empty() {
    let specs = [0, 9, 0, 9, 0].iter().enumerate().map(|(at, &numel)| spec(&format!("p{at}"), &[numel]));
    let layout = layout(specs.collect(), 2, options(4));
    assert_eq!(grouping(&layout), [vec![4, 3, 2], vec![1, 0]]);
}

#[test]
fn a_bucket_is_rank_major() {
    let layout = layout(vec![spec("a", &[5]), spec("b", &[3])], 2, LayoutOptions::default());
    let bucket = &layout.buckets()[0];
    assert_eq!((bucket.counts(), bucket.numel()), (&[5, 3][..], 8));
    let places = |index| {
        let segments = bucket.segments(ParameterIndex::new(index)).iter();
        segments
            .map(|segment| (segment.rank.index(), segment.source.clone(), segment.offset))
            .collect::<Vec<_>>()
    };
    assert_eq!(places(1), [(0, 0..2, 0), (1, 2..3, 5)]);
    assert_eq!(places(0), [(0, 0..3, 2), (1, 3..5, 6)]);
    assert_eq!(places(2), []);
    let parts = [0, 1, 2].map(|rank| bucket.part(Rank::new(rank)));
    assert_eq!(parts, [0..5, 5..8, 8..8]);
}

#[test]
fn units_are_the_modules_in_model_order() {
    let specs = vec![
        spec("embed", &[7]),
        spec("blocks.0.fc.weight", &[2, 2]),
        spec("norm.weight", &[2]),
        spec("blocks.0.fc.bias", &[2]),
    ];
    let layout = layout(specs, 2, LayoutOptions::default());
    let units: Vec<_> = layout
        .units()
        .iter()
        .map(|unit| {
            let positions: Vec<_> = unit.parameters().iter().map(|index| index.index()).collect();
            (unit.name(), positions, unit.numel())
        })
        .collect();
    assert_eq!(units, [("", vec![0], 7), ("blocks.0.fc", vec![1, 3], 6), ("norm", vec![2], 2)]);
    assert_eq!(layout.largest_unit(), 7);
    assert_eq!(layout.unit_of(ParameterIndex::new(3)), Some(1));
    assert_eq!(layout.unit_of(ParameterIndex::new(4)), None);
}

#[test]
fn small_parameters_are_persistent_up_to_the_threshold_but_never_empty_ones() {
    let persistent = |persistence_threshold| {
        let specs = vec![spec("a", &[0]), spec("b", &[3]), spec("c", &[4])];
        let options = LayoutOptions { persistence_threshold, ..LayoutOptions::default() };
        let layout = layout(specs, 2, options);
        layout.parameters().iter().map(|parameter| parameter.persistent()).collect::<Vec<_>>()
    };
    assert_eq!(persistent(0), [false, false, false]);
    assert_eq!(persistent(3), [false, true, false]);
    assert_eq!(persistent(usize::MAX), [false, true, true]);
}

#[test]
fn a_path_claimed_twice_is_refused_with_both_names() {
    let duplicate = |first: &str, second: &str, path: &str| LayoutError::Duplicate {
        path: path.into(),
        first: first.into(),
        second: second.into(),
    };
    assert_eq!(refusal(vec![spec("a", &[1]), spec("a", &[1])]), duplicate("a", "a", "a"));
    assert_eq!(refusal(vec![tied("a", &[1], &["b"]), spec("b", &[1])]), duplicate("a", "b", "b"));
    assert_eq!(refusal(vec![tied("a", &[1], &["c"]), tied("b", &[1], &["c"])]), duplicate("a", "b", "c"));
    assert_eq!(refusal(vec![tied("a", &[1], &["a"])]), duplicate("a", "a", "a"));
}

#[test]
fn empty_names_and_aliases_are_refused() {
    let index = ParameterIndex::new(1);
    assert_eq!(refusal(vec![spec("a", &[1]), spec("", &[1])]), LayoutError::EmptyName { index });
    assert_eq!(refusal(vec![tied("a", &[1], &[""])]), LayoutError::EmptyAlias { name: "a".into() });
}

#[test]
fn elements_that_cannot_be_counted_are_refused() {
    let shape = vec![usize::MAX, 2];
    let error = refusal(vec![spec("a", &shape)]);
    assert_eq!(error, LayoutError::ShapeOverflow { name: "a".into(), shape });
    let error = refusal(vec![spec("a", &[usize::MAX]), spec("b", &[1])]);
    assert_eq!(error, LayoutError::ModelOverflow { name: "b".into() });
}

#[test]
fn a_world_beyond_the_tables_is_refused() {
    let world = WorldSize::new(Layout::MAX_WORLD_SIZE + 1).unwrap();
    let error = Layout::new(vec![], world, LayoutOptions::default()).unwrap_err();
    assert_eq!(error, LayoutError::WorldTooLarge { world });
}

#[test]
fn the_largest_model_that_can_be_counted_has_a_layout() {
    let options = LayoutOptions {
        alignment: NonZeroUsize::MAX,
        bucket_bytes: Bytes::new(u64::MAX),
        persistence_threshold: usize::MAX,
    };
    let layout = layout(vec![spec("a", &[usize::MAX - 1]), spec("b", &[1])], 3, options);
    assert_eq!(layout.shard_numel(Rank::ROOT), usize::MAX);
    assert_eq!(layout.buckets().iter().map(|bucket| bucket.numel()).max(), Some(usize::MAX - 1));
}

#[test]
fn a_spec_reads_back_as_written() {
    let text = serde_json::to_string(&spec("a.w", &[4, 2])).unwrap();
    assert_eq!(text, r#"{"name":"a.w","shape":[4,2],"dtype":"f32","trainable":true}"#);
    assert_eq!(serde_json::from_str::<ParameterSpec>(&text).unwrap(), spec("a.w", &[4, 2]));
}

fn some_layout() -> impl Strategy<Value = Layout> {
    (1..=17_usize, 1..=8_usize, 0..=80_u64).prop_flat_map(|(world, alignment, limit)| {
        prop::collection::vec((0..=4 * world + 3, any::<bool>()), 0..8).prop_map(move |parameters| {
            let specs = parameters.iter().enumerate().map(|(at, &(numel, trainable))| ParameterSpec {
                trainable,
                ..spec(&format!("p{at}"), &[numel])
            });
            let alignment = NonZeroUsize::new(alignment).unwrap();
            layout(specs.collect(), world, LayoutOptions { alignment, ..options(limit) })
        })
    })
}

proptest! {
    #[test]
    fn every_trainable_parameter_is_in_exactly_one_bucket(layout in some_layout()) {
        let mut bucketed: Vec<_> =
            layout.buckets().iter().flat_map(|bucket| bucket.parameters().iter().copied()).collect();
        bucketed.reverse();
        let trainable: Vec<_> =
            layout.parameters().iter().filter(|each| each.trainable()).map(|each| each.index()).collect();
        prop_assert_eq!(&bucketed, &trainable);
        for index in trainable {
            let position = layout.bucket_of(index).unwrap();
            prop_assert!(layout.buckets()[position].parameters().contains(&index));
        }
    }

    #[test]
    fn only_a_parameter_alone_exceeds_the_bucket_limit(layout in some_layout()) {
        let limit = layout.options().bucket_bytes.get() / 4;
        for bucket in layout.buckets() {
            let has_elements = |index: &&ParameterIndex| layout.parameter(**index).unwrap().numel() > 0;
            let filled = bucket.parameters().iter().filter(has_elements);
            prop_assert!(bucket.numel() as u64 <= limit || filled.count() == 1);
        }
    }

    #[test]
    fn what_is_scattered_into_a_bucket_comes_back_from_its_parts(layout in some_layout()) {
        for bucket in layout.buckets() {
            let value = |index: ParameterIndex, element: usize| index.index() * 1000 + element;
            let mut buffer = vec![usize::MAX; bucket.numel()];
            for &index in bucket.parameters() {
                for segment in bucket.segments(index) {
                    for (place, element) in segment.source.clone().enumerate() {
                        prop_assert_eq!(buffer[segment.offset + place], usize::MAX, "written twice");
                        buffer[segment.offset + place] = value(index, element);
                    }
                }
            }

            let world = layout.world_size();
            let counts: Vec<_> = world.ranks().map(|rank| bucket.part(rank).len()).collect();
            prop_assert_eq!(bucket.counts(), counts);
            let parts: Vec<_> = world.ranks().map(|rank| buffer[bucket.part(rank)].to_vec()).collect();
            prop_assert_eq!(parts.concat(), buffer);

            for &index in bucket.parameters() {
                let parameter = layout.parameter(index).unwrap();
                let mut back: Vec<usize> = Vec::new();
                for segment in bucket.segments(index) {
                    prop_assert_eq!(parameter.partition().range(segment.rank), segment.source.clone());
                    let first = segment.offset - bucket.part(segment.rank).start;
                    back.extend(&parts[segment.rank.index()][first..first + segment.source.len()]);
                }
                prop_assert_eq!(back, (0..parameter.numel()).map(|at| value(index, at)).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_shards_of_all_ranks_make_the_model(layout in some_layout()) {
        let ranks = || layout.world_size().ranks();
        prop_assert_eq!(ranks().map(|rank| layout.shard_numel(rank)).sum::<usize>(), layout.numel());
        let trainable: usize = ranks().map(|rank| layout.trainable_shard_numel(rank)).sum();
        prop_assert_eq!(trainable, layout.trainable_numel());
    }
}
