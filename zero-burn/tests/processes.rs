//! The engine over ranks as processes have them: what goes between them is copied, and nothing else differs.

mod common;

use burn::tensor::Device;
use common::{LR, Odd, Run, adamw, cast, config, processes, rows, weights, with_engines};
use zero_burn::{Bytes, DType, Partition, Stage, Zero, ZeroError};

const BATCH: usize = 6;
const STEPS: usize = 4;

/// The outcome, and the largest that windows took beside shards.
fn train(zero: &Zero) -> Result<(Run, Bytes), ZeroError> {
    let comm = zero.communicator();
    let mut model = zero.shard(Odd::new)?;
    let mut optimizer = zero.optimizer(adamw().build())?;
    let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
    let (mut run, mut windows) = (Run::new(), Bytes::ZERO);
    for step in 0..STEPS {
        let input = cast(rows(step, share.clone(), zero.device()), zero.config());
        zero.backward(model.loss(input, 0))?;
        let outcome = optimizer.step(LR, &mut model)?;
        run.record(&outcome);
        windows = windows.max(outcome.memory.windows);
    }
    run.weights = weights(&zero.unshard(&model)?);
    Ok((run, windows))
}

#[test]
fn ranks_that_are_processes_train_as_threads_do() {
    for stage in Stage::ALL {
        for compute in [DType::F32, DType::BF16] {
            let mut config = config(stage);
            config.precision.compute = compute;
            let threads = with_engines(&config, 3, |_, zero| train(&zero));
            assert!(
                threads.iter().all(|(_, windows)| *windows == Bytes::ZERO),
                "threads show shards themselves"
            );
            // All on one host, two of three, and each on its own.
            for (host, shares) in [((|_| 0) as fn(usize) -> usize, 3), (|rank| rank / 2, 2), (|rank| rank, 0)]
            {
                let train = |comm: &_| train(&Zero::new(config.clone(), comm, Device::default())?);
                let processes = processes(&config, 3, &train, host);
                for (rank, ((run, windows), (expected, _))) in processes.iter().zip(&threads).enumerate() {
                    assert_eq!(run, expected, "{compute} at {stage} on rank {rank}, {shares} on a host");
                    let copies = stage != Stage::Zero && rank < shares;
                    assert_eq!(
                        *windows > Bytes::ZERO,
                        copies,
                        "{compute} at {stage} on rank {rank}: {windows}"
                    );
                }
            }
        }
    }
}
