//! The engine over ranks as processes have them: what goes between them is copied, and nothing else differs.

mod common;

use std::net::TcpListener;
use std::thread;

use burn::tensor::{Device, FloatDType};
use common::{LR, Odd, Run, adamw, config, rows, weights, with_engines, world};
use zero_burn::{Bytes, DType, Partition, ProcessWorld, Rank, Stage, Zero, ZeroConfig, ZeroError};
use zero_comm::{Coordinator, CoordinatorOptions, Meeting, Token};

const BATCH: usize = 6;
const STEPS: usize = 4;

/// The outcome, and the largest that windows took beside shards.
fn train(zero: &Zero) -> Result<(Run, Bytes), ZeroError> {
    let comm = zero.communicator();
    let mut model = zero.shard(Odd::new)?;
    let mut optimizer = zero.optimizer(adamw().build())?;
    let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
    let is_mixed = zero.config().precision.compute == DType::BF16;
    let float = if is_mixed { FloatDType::BF16 } else { FloatDType::F32 };
    let (mut run, mut windows) = (Run::new(), Bytes::ZERO);
    for step in 0..STEPS {
        let input = rows(step, share.clone(), zero.device()).cast(float);
        zero.backward(model.loss(input, 0))?;
        let outcome = optimizer.step(LR, &mut model)?;
        run.record(&outcome);
        windows = windows.max(outcome.memory.windows);
    }
    run.weights = weights(&zero.unshard(&model)?);
    Ok((run, windows))
}

/// Ranks that are threads, each with everything that a process has; `host` says where they seem to run.
fn over_processes(config: &ZeroConfig, size: usize, host: fn(usize) -> usize) -> Vec<(Run, Bytes)> {
    let token = Token::generate().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = CoordinatorOptions {
        size: world(size),
        token: token.clone(),
        deadline: config.deadline(),
        host: None,
    };
    let coordinator = Coordinator::new(listener, options).unwrap();
    let address = coordinator.address().to_string();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let meeting = Meeting::Coordinator { address: address.clone() };
                let process = ProcessWorld::new(Rank::new(rank), world(size), meeting)
                    .with_token(token.clone())
                    .with_host(format!("host {}", host(rank)))
                    .with_deadline(config.deadline());
                scope.spawn(move || {
                    process.run(|comm| train(&Zero::new(config.clone(), &comm, Device::default())?)).unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
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
                let processes = over_processes(&config, 3, host);
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
