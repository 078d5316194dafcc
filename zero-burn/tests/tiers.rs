//! Every combination of tiers trains to the same bits.

mod common;

use std::fs;

use common::{LR, Odd, Run, cast, config, rows, weights, whole, with_engines};
use zero_burn::{
    Adam, Bytes, DType, Fused, LossScaling, Offload, Placement, ReduceGradients, Stage, Tier, ZeroConfig,
};

const SIZE: usize = 2;

/// Two steps of two backwards each.
fn run(config: &ZeroConfig) -> Run {
    let mut runs = with_engines(config, SIZE, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        let first = 2 * comm.rank().index();
        let mut run = Run::new();
        for step in 0..2 {
            for micro in 0..2 {
                let rows = cast(rows(2 * step + micro, first..first + 2, zero.device()), config);
                zero.backward(model.loss(rows, 0))?;
            }
            run.record(&optimizer.step(LR, &mut model)?);
        }
        run.weights = weights(&whole(&zero, &model)?);
        Ok(run)
    });
    runs.remove(0)
}

#[test]
fn every_combination_of_tiers_trains_to_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let place = |tier, fraction| {
        let path = (tier == Tier::Nvme).then(|| directory.path().to_path_buf());
        Placement { tier, path, fraction }
    };
    let places = || {
        [(Tier::Device, 1.0), (Tier::Host, 0.7), (Tier::Nvme, 1.0), (Tier::Nvme, 0.4)]
            .map(|(tier, fraction)| place(tier, fraction))
    };
    let (mut ran, mut refused) = (0, 0);
    for stage in Stage::ALL {
        for compute in [DType::F32, DType::BF16, DType::F16] {
            for reduce in [ReduceGradients::AtStep, ReduceGradients::EveryBackward] {
                let mut plain = config(stage);
                (plain.precision.compute, plain.reduce_gradients) = (compute, Some(reduce));
                plain.loss_scale = (compute == DType::F16).then_some(LossScaling::Static { scale: 8.0 });
                let expected = run(&plain);
                assert!(expected.norms.iter().all(|norm| norm.is_finite()));
                for (optimizer, gradients, parameters) in places().into_iter().flat_map(|optimizer| {
                    places().into_iter().flat_map(move |gradients| {
                        let optimizer = optimizer.clone();
                        places().map(move |parameters| (optimizer.clone(), gradients.clone(), parameters))
                    })
                }) {
                    let what = format!(
                        "{optimizer:?}, {gradients:?}, {parameters:?} at {stage} in {compute}, {reduce:?}"
                    );
                    let (buffer_bytes, block_bytes) = (Bytes::new(64 << 10), Bytes::new(4096));
                    let default = Offload::default();
                    let offload =
                        Offload { optimizer, gradients, parameters, buffer_bytes, block_bytes, ..default };
                    let config = ZeroConfig { offload, ..plain.clone() };
                    match config.validate() {
                        Ok(()) => assert_eq!(run(&config), expected, "{what}"),
                        Err(error) => {
                            let error = error.to_string();
                            assert!(error.contains("but"), "a reason: {error}");
                            refused += 1;
                            continue;
                        }
                    }
                    ran += 1;
                }
            }
        }
    }
    // With states in each of 4 places, in f32 masters have 1, and in 16 bits 11 pairs of both are legal; gradients have 2
    // places if they are reduced at the step, else 4.
    assert_eq!(ran, 4 * (2 + 4) * (4 + 11 + 11));
    assert_eq!(ran + refused, 4 * 3 * 2 * 4 * 4 * 4);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left behind");
}
