//! Overlap, bucket sizes and look-ahead decide when things happen, not what comes out. Volumes are those of the papers.

mod common;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use common::{LR, Odd, Run, adamw, config, no_skips, rows, sharded, weights, with_engines, world};
use zero_burn::{
    Bytes, Communicator, LocalWorld, Partition, Rank, ReduceGradients, Stage, Zero, ZeroConfig, ZeroError,
};
use zero_comm::{Fault, FaultKind, FaultPlan, Faulty};

const STEPS: usize = 3;
const ROWS: usize = 12;

/// Nothing runs beside compute, and nothing ahead of it.
fn plain(stage: Stage) -> ZeroConfig {
    ZeroConfig { overlap: false, lookahead_bytes: Bytes::ZERO, ..config(stage) }
}

#[test]
fn overlap_and_bucket_sizes_change_no_bit() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2, 3].map(|size| (stage, size))) {
        let reference = sharded(&plain(stage), size, STEPS, ROWS, &no_skips);
        for overlap in [false, true] {
            // From one element to more than the model.
            for bucket_bytes in [4, 200, 1 << 30].map(Bytes::new) {
                let config = ZeroConfig { overlap, bucket_bytes, ..config(stage) };
                let run = sharded(&config, size, STEPS, ROWS, &no_skips);
                assert_eq!(
                    run, reference,
                    "{stage}, {size} ranks, overlap {overlap}, buckets of {bucket_bytes}"
                );
            }
        }
    }
}

#[test]
fn look_ahead_and_its_budgets_change_no_bit() {
    let skips = |step: usize, rank: usize| ((step * 7 + rank * 3) % 16) as u32;
    // None, of one parameter, of all.
    let budgets = [0, 120, 1 << 30].map(Bytes::new);
    for size in [2, 3] {
        let reference = sharded(&plain(Stage::Three), size, STEPS, ROWS, &skips);
        for (lookahead_bytes, live_bytes) in
            budgets.into_iter().flat_map(|ahead| [None, Some(Bytes::new(130))].map(|live| (ahead, live)))
        {
            for (reuse_bytes, persistence_threshold) in
                budgets.into_iter().flat_map(|reuse| [0, 10].map(|threshold| (reuse, threshold)))
            {
                let config = ZeroConfig {
                    lookahead_bytes,
                    live_bytes,
                    reuse_bytes,
                    persistence_threshold,
                    ..config(Stage::Three)
                };
                assert_eq!(
                    sharded(&config, size, STEPS, ROWS, &skips),
                    reference,
                    "{size} ranks, {config:?}"
                );
            }
        }
    }
}

#[test]
fn ranks_that_come_late_change_no_bit() {
    for stage in Stage::ALL {
        let reference = sharded(&plain(stage), 3, STEPS, ROWS, &no_skips);
        for seed in 0..3_u64 {
            // Some operations of each rank, spread over the run.
            let faults: Vec<_> = (0..3)
                .flat_map(|rank| {
                    (1..12_u64).map(move |number| {
                        let at = number * 23 + (seed * 13 + rank * 7 + number * 5) % 19;
                        let delay = Duration::from_millis(1 + (at * 7 + rank) % 8);
                        Fault {
                            rank: Rank::new(rank as usize),
                            operation: NonZeroU64::new(at).unwrap(),
                            kind: FaultKind::Delay(delay),
                        }
                    })
                })
                .collect();
            let plan = FaultPlan::from(faults);
            let runs = LocalWorld::new(world(3))
                .run(|comm| -> Result<Run, ZeroError> {
                    let comm = Arc::new(Faulty::new(comm, &plan).unwrap()) as Arc<dyn Communicator>;
                    let zero = Zero::new(config(stage), &comm, Device::default())?;
                    train(&zero, &Partition::new(ROWS, world(3)).range(comm.rank()))
                })
                .unwrap();
            assert!(runs.iter().all(|run| *run == reference), "{stage}, seed {seed}");
        }
    }
}

fn train(zero: &Zero, share: &std::ops::Range<usize>) -> Result<Run, ZeroError> {
    let mut model = zero.shard(Odd::new)?;
    let mut optimizer = zero.optimizer(adamw().build())?;
    let mut run = Run::new();
    for step in 0..STEPS {
        zero.backward_weighted(model.loss(rows(step, share.clone(), zero.device()), 0), share.len() as f64)?;
        run.record(&optimizer.step(LR, &mut model)?);
    }
    run.weights = weights(&zero.unshard(&model)?);
    Ok(run)
}

#[test]
fn the_bytes_that_move_are_those_of_the_papers() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2, 3, 5].map(|size| (stage, size))) {
        for overlap in [false, true] {
            // What is fetched ahead may serve two uses, which saves a gather.
            let config = ZeroConfig { overlap, lookahead_bytes: Bytes::ZERO, ..config(stage) };
            let moved = with_engines(&config, size, |_, zero| {
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adamw().build())?;
                // Replicas are renewed after the step, and all are there when the next backward ends.
                let (mut gathered, mut reduced) = (Vec::new(), Bytes::ZERO);
                for step in 0..4 {
                    zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
                    gathered.push(zero.statistics()?.gathered.get());
                    reduced = optimizer.step(LR, &mut model)?.statistics.reduced;
                }
                let layout = zero.layout()?;
                let used = |name: &str| !name.starts_with("unused");
                let psi = |name: &dyn Fn(&str) -> bool, trainable: bool| {
                    let chosen = layout.parameters().iter().filter(|parameter| name(parameter.name()));
                    let chosen = chosen.filter(|parameter| parameter.trainable() || !trainable);
                    chosen.map(|parameter| parameter.numel()).sum::<usize>() as u64 * 4
                };
                let gathered = gathered[3] - gathered[2];
                let frozen =
                    psi(&used, false) - psi(&used, true) + psi(&|name| name == "frozen.weight", false);
                Ok(([gathered, reduced.get()], frozen, psi(&|_| true, true), psi(&used, true)))
            });
            let (_, frozen, trainable, stepped) = moved[0];
            let [gathered, reduced] =
                [0, 1].map(|kind| moved.iter().map(|(moved, ..)| moved[kind]).sum::<u64>());
            let others = size as u64 - 1;
            // Summed over the ranks. What is not used is not gathered on demand, and not renewed when no rank steps it.
            // A frozen weight is needed in forward and in backward, a frozen bias in forward.
            let expected = match stage {
                Stage::Zero => 0,
                Stage::One | Stage::Two => others * stepped,
                Stage::Three => others * (2 * stepped + frozen),
            };
            assert_eq!(gathered, expected, "gathered at {stage} on {size} ranks, overlap {overlap}");
            let twice = if stage == Stage::Zero { 2 } else { 1 };
            let expected = if size == 1 { 0 } else { twice * others * trainable };
            assert_eq!(reduced, expected, "reduced at {stage} on {size} ranks, overlap {overlap}");
        }
    }
}

#[test]
fn the_second_round_finds_what_it_needs() {
    let statistics = with_engines(&config(Stage::Three), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let mut all = Vec::new();
        for step in 0..3 {
            zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
            all.push(optimizer.step(LR, &mut model)?.statistics);
        }
        Ok(all)
    });
    for rank in statistics {
        assert_eq!(
            rank[0].lookahead_misses + rank[0].lookahead_hits,
            rank[1].lookahead_misses + rank[1].lookahead_hits
        );
        for later in &rank[1..] {
            assert_eq!(later.lookahead_misses, 1, "only the first one, which nothing precedes: {later:?}");
            assert!(later.lookahead_hits > 10);
        }
    }
}

#[test]
fn what_is_kept_is_not_gathered_again() {
    let gathered = |reuse_bytes: u64| {
        let config = ZeroConfig { reuse_bytes: Bytes::new(reuse_bytes), ..config(Stage::Three) };
        let config = ZeroConfig { lookahead_bytes: Bytes::ZERO, ..config };
        let runs = with_engines(&config, 2, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let mut last = Bytes::ZERO;
            for step in 0..3 {
                zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
                last = optimizer.step(LR, &mut model)?.statistics.gathered;
            }
            Ok(last.get())
        });
        runs.into_iter().sum::<u64>()
    };
    let (none, all) = (gathered(0), gathered(1 << 30));
    // Every parameter is used in forward and again in backward.
    assert!(all * 3 < none * 2, "{all} bytes instead of {none}");
}

#[test]
fn reductions_may_wait_for_the_step_at_every_stage() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 3].map(|size| (stage, size))) {
        let policies = [ReduceGradients::EveryBackward, ReduceGradients::AtStep].map(|policy| {
            let config = ZeroConfig { reduce_gradients: Some(policy), ..config(stage) };
            sharded(&config, size, STEPS, ROWS, &no_skips)
        });
        // One backward per step: the same sums in the same order.
        assert_eq!(policies[0], policies[1], "{stage}, {size} ranks");
    }
}
