//! Eight ranks, thousands of mixed operations, and now and then a rank that dies.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use zero_comm::{CommError, Communicator, CommunicatorExt, LocalWorld, ReduceOp, WindowKey, WorldError};
use zero_core::{Rank, WorldSize};

const RANKS: usize = 8;

/// SplitMix64: the same numbers on all ranks, which is how they agree on what to do.
struct Script(u64);

impl Script {
    fn next(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) % bound as u64) as usize
    }
}

/// One random operation, with its result checked.
fn operate(comm: &dyn Communicator, script: &mut Script, step: usize) -> Result<(), CommError> {
    let (world, rank) = (comm.world_size().get(), comm.rank().index());
    let label = format!("step {step}");
    let length = script.next(200);
    match script.next(8) {
        0 => {
            let mut buffer = vec![rank as f32; length];
            comm.all_reduce(&mut buffer, ReduceOp::Sum, &label)?;
            assert!(buffer.iter().all(|sum| *sum == (world * (world - 1) / 2) as f32));
        }
        1 => {
            let counts: Vec<_> = (0..world).map(|_| script.next(20)).collect();
            let mut all = vec![-1; counts.iter().sum()];
            comm.all_gather_uneven(&vec![rank as i32; counts[rank]], &mut all, &counts, &label)?;
            let expected = counts.iter().enumerate().flat_map(|(rank, count)| vec![rank as i32; *count]);
            assert!(all.iter().copied().eq(expected));
        }
        2 => {
            let mut part = vec![0.0_f64; length];
            comm.reduce_scatter(&vec![1.0; length * world], &mut part, ReduceOp::Sum, &label)?;
            assert!(part.iter().all(|sum| *sum == world as f64));
        }
        3 => {
            let root = script.next(world);
            let mut buffer = vec![rank as u8; length];
            comm.broadcast(&mut buffer, Rank::new(root), &label)?;
            assert!(buffer.iter().all(|byte| usize::from(*byte) == root));
        }
        4 => {
            let mut received = vec![0; world];
            comm.all_to_all(&vec![rank as i64; world], &mut received, &label)?;
            assert!(received.iter().copied().eq(0..world as i64));
        }
        5 => {
            let (from, to) = (script.next(world), script.next(world));
            let content = vec![step as i32; length];
            if from != to && rank == from {
                comm.send(Rank::new(to), &content, &label)?;
            } else if from != to && rank == to {
                let mut buffer = vec![0; length];
                comm.receive(Rank::new(from), &mut buffer, &label)?;
                assert_eq!(buffer, content);
            }
        }
        6 => {
            let key = WindowKey::new(script.next(4) as u64);
            comm.expose(key, Arc::new(vec![(step + rank) as u8; length]))?;
            comm.fence(&label)?;
            let peer = script.next(world);
            let mut bytes = vec![0; length];
            comm.read(Rank::new(peer), key, 0, &mut bytes, &label)?;
            assert!(bytes.iter().all(|byte| *byte == (step + peer) as u8));
            comm.fence(&label)?;
        }
        _ => {
            let colors = 1 + script.next(3);
            let group = comm.split(Some((rank % colors) as u64), 0, &label)?.unwrap();
            let members = (0..world).filter(|other| other % colors == rank % colors).count();
            assert_eq!(group.all_reduce_value(1_i32, ReduceOp::Sum, &label)?, members as i32);
        }
    }
    Ok(())
}

#[test]
fn thousands_of_mixed_operations_agree() {
    let world = LocalWorld::new(WorldSize::new(RANKS).unwrap()).with_deadline(Duration::from_secs(60));
    let ran = world.run(|comm| {
        let mut script = Script(17);
        (0..5000).try_for_each(|step| operate(&*comm, &mut script, step))
    });
    assert!(ran.is_ok(), "{}", ran.unwrap_err());
}

#[derive(Clone, Copy, PartialEq)]
enum Death {
    Panic,
    Error,
    Abort,
    Finish,
}

#[test]
fn a_dying_rank_is_named_by_every_error() {
    let world = LocalWorld::new(WorldSize::new(RANKS).unwrap()).with_deadline(Duration::from_secs(60));
    for seed in 0..120 {
        let mut fate = Script(seed);
        let (victim, hour) = (Rank::new(fate.next(RANKS)), fate.next(60));
        let death = [Death::Panic, Death::Error, Death::Abort, Death::Finish][fate.next(4)];
        let ran = world.run(|comm| {
            let mut script = Script(seed.wrapping_mul(31));
            for step in 0..100 {
                if comm.rank() == victim && step == hour {
                    match death {
                        Death::Panic => resume_unwind(Box::new("unlucky")),
                        Death::Error => return Err("unlucky".to_owned()),
                        Death::Abort => comm.abort("unlucky"),
                        Death::Finish => return Ok(()),
                    }
                }
                operate(&*comm, &mut script, step).map_err(|error| error.to_string())?;
            }
            // A rank that skipped all operations since would come this far; all need the victim here.
            comm.barrier("end").map_err(|error| error.to_string())
        });
        let error = ran.unwrap_err();
        let (first, others) = match &error {
            WorldError::Panicked { rank, others, .. } => {
                assert!(death == Death::Panic && *rank == victim, "seed {seed}: {error}");
                (None, others)
            }
            WorldError::Failed { rank, source, others } => {
                assert!(death != Death::Panic, "seed {seed}: {error}");
                assert!(death != Death::Error || *rank == victim, "seed {seed}: {error}");
                (Some(source), others)
            }
            other => panic!("seed {seed}: {other}"),
        };
        assert!(death == Death::Error || first.is_none_or(|first| first.contains(&victim.to_string())));
        assert_eq!(others.len(), RANKS - 1 - usize::from(death == Death::Finish), "seed {seed}: {error}");
        for (rank, failure) in others {
            let zero_comm::RankFailure::Error(message) = failure else { panic!("seed {seed}: {failure:?}") };
            assert!(message.contains(&victim.to_string()), "seed {seed}: {rank} says {message}");
        }
    }
}

#[test]
fn a_late_rank_finds_all_gone_at_every_deadline() {
    let world = LocalWorld::new(WorldSize::new(RANKS).unwrap()).with_deadline(Duration::from_millis(5));
    for seed in 0..40 {
        let late = Rank::new(Script(seed).next(RANKS));
        let ran = world.run(|comm| {
            if comm.rank() == late {
                // Comes about when the others give up.
                let waited = std::time::Instant::now();
                while waited.elapsed() < Duration::from_micros(4700 + seed * 15) {
                    std::thread::yield_now();
                }
            }
            Ok::<_, CommError>(comm.all_reduce(&mut vec![1.0_f32; 1000], ReduceOp::Sum, "close"))
        });
        let results = ran.unwrap();
        // Either all met, or all were told of one cause.
        assert!(results.iter().all(|result| result == &results[0]), "seed {seed}: {results:?}");
    }
}
