//! Bytes per rank.

use proptest::prelude::*;
use zero_core::{
    Bytes, DType, Layout, LayoutOptions, LookAheadOptions, MemoryPlan, MemorySetup, Offload, OptimizerCost,
    ParameterSpec, Placement, Precision, Rank, ReduceGradients, Stage, StateBytes, Tier, WorldSize,
    ZeroConfig,
};

fn spec(name: &str, numel: usize, trainable: bool) -> ParameterSpec {
    ParameterSpec { name: name.into(), shape: vec![numel], dtype: DType::F32, trainable, aliases: vec![] }
}

/// Over two ranks: 10 trainable elements (5 and 5) and 3 persistent ones (2 and 1) in one unit, 7 frozen ones
/// (4 and 3) in another.
fn example(world: usize) -> Layout {
    let specs = vec![spec("fc.weight", 10, true), spec("fc.bias", 3, true), spec("embed.weight", 7, false)];
    let options =
        LayoutOptions { bucket_bytes: Bytes::new(40), persistence_threshold: 3, ..LayoutOptions::default() };
    Layout::new(specs, WorldSize::new(world).unwrap(), options).unwrap()
}

fn expected(parameters: u64, gradients: u64, optimizer: u64, gathered: u64, bucket: u64) -> MemoryPlan {
    let [parameters, gradients, optimizer, gathered, bucket] =
        [parameters, gradients, optimizer, gathered, bucket].map(Bytes::new);
    MemoryPlan {
        state: StateBytes { parameters, gradients, optimizer },
        gathered,
        bucket,
        ..MemoryPlan::default()
    }
}

/// The setup of the defaults at a stage, without look-ahead.
fn setup(stage: Stage) -> MemorySetup {
    let config = ZeroConfig { stage, ..ZeroConfig::default() };
    MemorySetup { lookahead: None, ..MemorySetup::new(&config, OptimizerCost::ADAMW) }
}

fn in_bf16(stage: Stage) -> MemorySetup {
    let precision = Precision { compute: DType::BF16, ..Precision::default() };
    MemorySetup { precision, ..setup(stage) }
}

#[test]
fn a_bf16_plan_is_what_one_counts_by_hand() {
    let layout = example(2);
    let plan = |stage, rank| in_bf16(stage).plan(&layout, Rank::new(rank));
    for rank in [0, 1] {
        assert_eq!(plan(Stage::Zero, rank), expected(20 * 4 + 20 * 2, 13 * 4, 13 * 8, 0, 0));
    }
    assert_eq!(plan(Stage::One, 0), expected(20 * 2 + 11 * 4, 13 * 4, 7 * 8, 0, 0));
    assert_eq!(plan(Stage::One, 1), expected(20 * 2 + 9 * 4, 13 * 4, 6 * 8, 0, 0));
    assert_eq!(plan(Stage::Two, 0), expected(20 * 2 + 11 * 4, 7 * 4, 7 * 8, 0, 10 * 2));
    assert_eq!(plan(Stage::Two, 1), expected(20 * 2 + 9 * 4, 6 * 4, 6 * 8, 0, 10 * 2));
    assert_eq!(plan(Stage::Three, 0), expected(9 * 6 + 3 * 2 + 2 * 4, 7 * 4, 7 * 8, (10 + 7) * 2, 10 * 2));
    assert_eq!(plan(Stage::Three, 1), expected(8 * 6 + 3 * 2 + 4, 6 * 4, 6 * 8, (10 + 7) * 2, 10 * 2));
}

#[test]
fn an_f32_plan_counts_no_masters_beside_the_replica() {
    let layout = example(2);
    let plan =
        |stage| MemorySetup { optimizer: OptimizerCost::MOMENTUM, ..setup(stage) }.plan(&layout, Rank::ROOT);
    assert_eq!(plan(Stage::Zero), expected(20 * 4, 13 * 4, 13 * 4, 0, 0));
    assert_eq!(plan(Stage::One), expected(20 * 4, 13 * 4, 7 * 4, 0, 0));
    assert_eq!(plan(Stage::Two), expected(20 * 4, 7 * 4, 7 * 4, 0, 10 * 4));
    assert_eq!(plan(Stage::Three), expected(9 * 4 + 3 * 4, 7 * 4, 7 * 4, (10 + 7) * 4, 10 * 4));
}

#[test]
fn in_a_world_of_one_every_stage_needs_the_same_in_f32() {
    let plans = Stage::ALL.map(|stage| setup(stage).plan_largest(&example(1)));
    assert_eq!(plans, [expected(20 * 4, 13 * 4, 13 * 8, 0, 0); 4]);
}

#[test]
fn each_policy_of_reduction_costs_what_it_says() {
    let gradients = |stage, reduce_gradients| {
        let plan = MemorySetup { reduce_gradients, ..setup(stage) }.plan_largest(&example(2));
        (plan.state.gradients.get() / 4, plan.bucket.get() / 4)
    };
    use ReduceGradients::{AtStep, EveryBackward};
    for stage in Stage::ALL {
        assert_eq!(gradients(stage, AtStep), (13, 0));
        let owned = if stage == Stage::Zero { 13 } else { 7 };
        assert_eq!(gradients(stage, EveryBackward), (owned, 10));
    }
}

#[test]
fn every_dtype_counts_where_it_is_held() {
    let precision = Precision {
        compute: DType::F32,
        reduce: Some(DType::BF16),
        accumulate: DType::F16,
        optimizer_state: DType::BF16,
    };
    let plan = MemorySetup { precision, ..setup(Stage::Three) }.plan_largest(&example(2));
    assert_eq!(plan, expected(9 * 4 + 3 * 4, 7 * 2, 7 * 4, (10 + 7) * 4, 10 * 2));
}

#[test]
fn half_of_an_odd_state_is_rounded_up() {
    let odd = OptimizerCost { bytes_per_element: 5 };
    assert_eq!(odd.in_dtype(3, DType::BF16), Bytes::new(8));
    assert_eq!(odd.in_dtype(3, DType::F32), Bytes::new(15));
    assert_eq!(odd.in_dtype(usize::MAX, DType::F64), Bytes::new(u64::MAX));
}

#[test]
fn look_ahead_adds_at_most_its_budgets_and_the_rest_of_the_model() {
    let ahead = |lookahead: u64, live: Option<u64>, reuse: u64| {
        let lookahead = LookAheadOptions {
            lookahead_bytes: Bytes::new(lookahead),
            live_bytes: live.map(Bytes::new),
            reuse_bytes: Bytes::new(reuse),
        };
        // The window is the unit of 10 elements; 5 elements are left to look ahead to.
        let specs = vec![spec("a.w", 10, true), spec("b.w", 5, true)];
        let layout = Layout::new(specs, WorldSize::new(2).unwrap(), LayoutOptions::default()).unwrap();
        let plans = Stage::ALL.map(|stage| {
            let plan = MemorySetup { lookahead: Some(lookahead), ..setup(stage) }.plan_largest(&layout);
            plan.ahead.get()
        });
        assert_eq!(plans[..3], [0, 0, 0]);
        plans[3]
    };
    assert_eq!(ahead(0, None, 0), 0);
    assert_eq!(ahead(8, None, 0), 8);
    assert_eq!(ahead(8, Some(44), 0), 4);
    assert_eq!(ahead(8, Some(0), 0), 0);
    assert_eq!(ahead(8, None, 1), 20);
    assert_eq!(ahead(u64::MAX, None, u64::MAX), 20);
}

#[test]
fn without_overlap_nothing_is_planned_to_be_fetched_ahead() {
    let specs = vec![spec("a.w", 10, true), spec("b.w", 5, true)];
    let layout = Layout::new(specs, WorldSize::new(2).unwrap(), LayoutOptions::default()).unwrap();
    let ahead = |overlap, reuse| {
        let config = ZeroConfig { overlap, reuse_bytes: Bytes::new(reuse), ..ZeroConfig::default() };
        MemorySetup::new(&config, OptimizerCost::ADAMW).plan_largest(&layout).ahead.get()
    };
    assert_eq!((ahead(true, 0), ahead(false, 0)), (20, 0));
    // What is kept does not need it.
    assert_eq!(ahead(false, 1), 20);
}

#[test]
fn plain_sgd_has_no_optimizer_state() {
    for stage in Stage::ALL {
        let plan = MemorySetup { optimizer: OptimizerCost::SGD, ..setup(stage) }.plan_largest(&example(2));
        assert_eq!(plan.state.optimizer, Bytes::ZERO);
    }
}

#[test]
fn a_rank_outside_of_the_world_owns_no_shards() {
    let plan = setup(Stage::Three).plan(&example(2), Rank::new(2));
    assert_eq!(plan.state, expected(3 * 4, 0, 0, 0, 0).state);
}

#[test]
fn the_largest_model_saturates() {
    let specs = vec![spec("a", usize::MAX, true)];
    let layout = Layout::new(specs, WorldSize::ONE, LayoutOptions::default()).unwrap();
    let plan = in_bf16(Stage::Zero).plan_largest(&layout);
    assert_eq!(plan.state.total(), Bytes::new(u64::MAX));
}

fn bytes(parameters: u64, gradients: u64, optimizer: u64) -> StateBytes {
    let [parameters, gradients, optimizer] = [parameters, gradients, optimizer].map(Bytes::new);
    StateBytes { parameters, gradients, optimizer }
}

#[test]
fn what_is_on_a_disk_leaves_memory_and_takes_twice_its_size_there() {
    let layout = example(2);
    let placed = |tier, fraction| Placement { tier, path: None, fraction };
    let offload = Offload {
        optimizer: placed(Tier::Nvme, 0.5),
        gradients: placed(Tier::Nvme, 1.0),
        parameters: placed(Tier::Host, 0.25),
        buffer_bytes: Bytes::new(99),
        ..Offload::default()
    };
    let setup = |stage, offload: &Offload| MemorySetup { offload: offload.clone(), ..in_bf16(stage) };
    let plan = |stage, rank| setup(stage, &offload).plan(&layout, Rank::new(rank));

    // Of rank 0's 5 and 2 elements, 3 and 1 states and all gradients; 2 and 1 masters are on the host, and 1 frozen.
    let expected_disk = bytes(0, 2 * 7 * 4, 2 * 4 * 8);
    let in_memory = in_bf16(Stage::Three).plan(&layout, Rank::ROOT);
    let expected = MemoryPlan {
        state: bytes(9 * 6 + 3 * 2 + 2 * 4, 0, 3 * 8),
        host: bytes(4 * 4, 0, 0),
        buffers: Bytes::new(99),
        disk: expected_disk,
        ..in_memory
    };
    assert_eq!(plan(Stage::Three, 0), expected);
    let beside = Offload { delayed_update: true, ..offload.clone() };
    let beside = setup(Stage::Three, &beside).plan(&layout, Rank::ROOT);
    assert_eq!(beside.disk, bytes(0, 2 * 2 * 7 * 4, 2 * 4 * 8));
    // Of rank 1's 5 and 1: 3 and 1 states.
    assert_eq!(plan(Stage::Three, 1).disk, bytes(0, 2 * 6 * 4, 2 * 4 * 8));
    assert_eq!(plan(Stage::Two, 0).disk, expected_disk);
    // Whole gradients, of 13 elements, stay until the step at stage 1.
    let first = plan(Stage::One, 0);
    assert_eq!((first.state.gradients, first.disk), (Bytes::new(13 * 4), bytes(0, 0, 2 * 4 * 8)));
    // At stage 0 each rank has all: of 10 and 3, 5 and 2 states, 3 and 1 masters, and 2 of the 7 frozen.
    let none = plan(Stage::Zero, 1);
    assert_eq!((none.host, none.disk), (bytes(6 * 4, 0, 0), bytes(0, 0, 2 * 7 * 8)));
    assert_eq!(none.state, bytes(20 * 4 + 20 * 2, 13 * 4, 6 * 8));

    // In f32 the masters are what ranks read; frozen parameters have masters alone to offload.
    let f32s = MemorySetup { precision: Precision::default(), ..setup(Stage::Three, &offload) };
    let f32s = f32s.plan(&layout, Rank::ROOT);
    assert_eq!((f32s.host, f32s.disk), (StateBytes::default(), expected_disk));
    let frozen = Layout::new(vec![spec("w", 8, false)], WorldSize::ONE, LayoutOptions::default()).unwrap();
    let plan = setup(Stage::Three, &offload).plan(&frozen, Rank::ROOT);
    assert_eq!((plan.disk, plan.buffers), (StateBytes::default(), Bytes::ZERO));
}

#[test]
fn what_is_on_the_host_is_memory_and_told_apart() {
    let layout = example(2);
    let placed = |tier, fraction| Placement { tier, path: None, fraction };
    let offload = Offload {
        optimizer: placed(Tier::Host, 0.5),
        gradients: placed(Tier::Auto, 1.0),
        parameters: placed(Tier::Host, 1.0),
        ..Offload::default()
    };
    let plan = MemorySetup { offload, ..in_bf16(Stage::Two) }.plan(&layout, Rank::ROOT);
    let expected = in_bf16(Stage::Two).plan(&layout, Rank::ROOT);
    assert_eq!(plan, MemoryPlan { host: bytes(11 * 4, 0, 4 * 8), ..expected });

    // On a disk the masters leave memory: of 5, 2 and the frozen 4, 3 and 1 and 2.
    let on_disk = |fraction| placed(Tier::Nvme, fraction);
    let offload = Offload { optimizer: on_disk(1.0), parameters: on_disk(0.5), ..Offload::default() };
    let plan = MemorySetup { offload, ..in_bf16(Stage::Two) }.plan(&layout, Rank::ROOT);
    let parameters = Bytes::new(expected.state.parameters.get() - 6 * 4);
    assert_eq!((plan.state.parameters, plan.disk), (parameters, bytes(2 * 6 * 4, 0, 2 * 7 * 8)));
}

#[test]
fn the_setup_of_a_configuration_has_its_offload() {
    let text = "offload.buffer_bytes = 4194304
offload.optimizer = { tier = \"nvme\", path = \"/nvme\" }";
    let config = ZeroConfig::from_toml(text).unwrap();
    let plan = MemorySetup::new(&config, OptimizerCost::ADAMW).plan_largest(&example(2));
    assert_eq!((plan.state.optimizer, plan.disk.optimizer), (Bytes::ZERO, Bytes::new(2 * 7 * 8)));
    assert_eq!(plan.buffers, config.offload.buffer_bytes);
    let stateless = MemorySetup::new(&config, OptimizerCost::SGD).plan_largest(&example(2));
    assert_eq!(stateless.buffers, Bytes::ZERO);
}

fn maximum(plans: &[MemoryPlan]) -> MemoryPlan {
    let most = |field: fn(&MemoryPlan) -> Bytes| plans.iter().map(field).max().unwrap();
    let most_state = |field: fn(&MemoryPlan) -> StateBytes| StateBytes {
        parameters: plans.iter().map(|plan| field(plan).parameters).max().unwrap(),
        gradients: plans.iter().map(|plan| field(plan).gradients).max().unwrap(),
        optimizer: plans.iter().map(|plan| field(plan).optimizer).max().unwrap(),
    };
    MemoryPlan {
        state: most_state(|plan| plan.state),
        host: most_state(|plan| plan.host),
        disk: most_state(|plan| plan.disk),
        buffers: most(|plan| plan.buffers),
        gathered: most(|plan| plan.gathered),
        ahead: most(|plan| plan.ahead),
        bucket: most(|plan| plan.bucket),
    }
}

proptest! {
    #[test]
    fn shards_of_all_ranks_sum_to_one_whole_and_none_exceeds_the_largest_plan(
        world in 1..=17_usize,
        alignment in 1..=8_usize,
        numels in prop::collection::vec((0..=71_usize, any::<bool>()), 0..6),
        compute in prop::sample::select(vec![DType::F32, DType::BF16]),
        (tier, fraction) in (prop::sample::select(Tier::ALL.to_vec()), 0.0..=1.0),
    ) {
        let specs = numels.iter().enumerate().map(|(at, &(numel, trainable))| {
            spec(&format!("m{}.p{at}", at / 2), numel, trainable)
        });
        let options = LayoutOptions { alignment: alignment.try_into().unwrap(), ..LayoutOptions::default() };
        let layout = Layout::new(specs.collect(), WorldSize::new(world).unwrap(), options).unwrap();
        for stage in Stage::ALL {
            let setup = if compute == DType::F32 { setup(stage) } else { in_bf16(stage) };
            let plans: Vec<_> = layout
                .world_size()
                .ranks()
                .map(|rank| setup.plan(&layout, rank))
                .collect();
            prop_assert_eq!(setup.plan_largest(&layout), maximum(&plans));
            let placement = Placement { tier, path: None, fraction };
            let offload = Offload {
                optimizer: placement.clone(),
                gradients: placement.clone(),
                // On a disk there are none.
                parameters: Placement { tier: if tier == Tier::Nvme { Tier::Host } else { tier }, ..placement },
                ..Offload::default()
            };
            let setup = MemorySetup { offload, ..setup };
            let offloaded: Vec<_> = layout.world_size().ranks().map(|rank| setup.plan(&layout, rank)).collect();
            prop_assert_eq!(setup.plan_largest(&layout), maximum(&offloaded));
            // Nothing is lost on the way to the disk.
            for (plan, moved) in plans.iter().zip(&offloaded) {
                let all = moved.state.total().get() + moved.disk.total().get() / 2;
                prop_assert_eq!(all, plan.state.total().get());
            }

            let sum = |field: fn(&StateBytes) -> Bytes| -> Bytes {
                plans.iter().map(|plan| field(&plan.state)).sum()
            };
            let whole = |numel: usize, bytes: usize, sharded: bool| {
                Bytes::new((numel * bytes * if sharded { 1 } else { world }) as u64)
            };
            let (all, trainable) = (layout.numel(), layout.trainable_numel());
            prop_assert_eq!(sum(|state| state.optimizer), whole(trainable, 8, stage.shards_optimizer()));
            prop_assert_eq!(sum(|state| state.gradients), whole(trainable, 4, stage.shards_gradients()));
            if stage.shards_parameters() {
                let read_by_gathers = if compute == DType::F32 { 0 } else { 2 };
                prop_assert_eq!(sum(|state| state.parameters), whole(all, 4 + read_by_gathers, true));
            } else if compute == DType::F32 {
                prop_assert_eq!(sum(|state| state.parameters), whole(all, 4, false));
            } else {
                let masters = whole(all, 4, stage.shards_optimizer());
                prop_assert_eq!(sum(|state| state.parameters), masters + whole(all, 2, false));
            }
        }
    }
    #[test]
    fn a_narrower_dtype_takes_no_more_and_a_later_reduction_no_less(
        world in 1..=9_usize,
        numels in prop::collection::vec((0..=71_usize, any::<bool>()), 0..6),
        threshold in 0..=40_usize,
        (compute, reduce, accumulate) in (floats(), prop::option::of(floats()), floats()),
        optimizer_state in prop::sample::select(vec![DType::F32, DType::BF16]),
        stage in prop::sample::select(Stage::ALL.to_vec()),
    ) {
        let specs = numels.iter().enumerate().map(|(at, &(numel, trainable))| {
            spec(&format!("m{}.p{at}", at / 2), numel, trainable)
        });
        let options = LayoutOptions { persistence_threshold: threshold, ..LayoutOptions::default() };
        let layout = Layout::new(specs.collect(), WorldSize::new(world).unwrap(), options).unwrap();
        let precision = Precision { compute, reduce, accumulate, optimizer_state };
        let setup = |precision, reduce_gradients| MemorySetup { precision, reduce_gradients, ..setup(stage) };
        for rank in layout.world_size().ranks() {
            let [early, late] = [ReduceGradients::EveryBackward, ReduceGradients::AtStep]
                .map(|reduce_gradients| setup(precision, reduce_gradients).plan(&layout, rank));
            prop_assert!(early.state.gradients <= late.state.gradients);
            prop_assert_eq!(late.bucket, Bytes::ZERO);
            let rest = |plan: MemoryPlan| (plan.state.parameters, plan.state.optimizer, plan.gathered);
            prop_assert_eq!(rest(early), rest(late));

            let wide = setup(Precision::default(), ReduceGradients::EveryBackward).plan(&layout, rank);
            prop_assert!(early.state.gradients <= wide.state.gradients);
            prop_assert!(early.state.optimizer <= wide.state.optimizer);
            prop_assert!(early.bucket <= wide.bucket);
        }
    }
}

fn floats() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::BF16, DType::F16])
}
