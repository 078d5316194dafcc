//! Ranks that are processes, each with a device of its own as far as there are so many. `ZERO_DEVICE` names its kind, as in
//! `cuda` or `vulkan`; `ZERO_RANKS` how many ranks there are instead of 2.
#![cfg(feature = "cube")]

mod common;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use burn::tensor::Device;
use common::{LR, Odd, Run, Weights, cast, config, device, kind, rows, weights, with_engines_on, world};
use tempfile::tempdir;
use zero_burn::{
    Adam, DType, Fused, LossScaling, Partition, Precision, ProcessWorld, Rank, Stage, WeightDecay, Zero,
    ZeroConfig, ZeroError,
};
use zero_comm::Meeting;

const STEPS: usize = 4;

/// The variable for where the ranks meet, and find what they must come to.
const FOLDER: &str = "ZERO_BURN_TEST_FOLDER";

fn number(variable: &str, default: usize) -> usize {
    env::var(variable).map_or(default, |number| number.parse().unwrap())
}

fn ranks() -> usize {
    number("ZERO_RANKS", 2)
}

/// The weights that ranks of one process come to, and that processes must.
fn expected(stage: Stage, compute: DType) -> Weights {
    let runs = with_engines_on(&device, &config_of(stage, compute), ranks(), |_, zero| train(&zero));
    runs.into_iter().next().unwrap().weights
}

#[test]
fn ranks_that_are_processes_train_as_threads_do() {
    let folder = tempdir().unwrap();
    for (stage, compute) in all() {
        let weights: Vec<f32> = expected(stage, compute).into_iter().flat_map(|(_, values)| values).collect();
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        fs::write(folder.path().join(format!("{stage}, {compute}")), bytes).unwrap();
    }
    let start = |rank: usize| {
        let mut process = Command::new(env::current_exe().unwrap());
        process.args(["--exact", "a_process", "--ignored", "--nocapture"]);
        process.env(FOLDER, folder.path()).env("RANK", rank.to_string());
        process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let processes: Vec<_> = (0..ranks()).map(start).collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let [said, cried] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success() && said.contains("1 passed"), "{said}\n{cried}");
    }
}

#[test]
#[ignore = "run by the test above"]
fn a_process() {
    let folder = PathBuf::from(env::var_os(FOLDER).unwrap());
    let meeting = Meeting::File { path: folder.join("meeting") };
    let process = ProcessWorld::new(Rank::new(number("RANK", 0)), world(ranks()), meeting);
    let ran = process.with_deadline(Duration::from_secs(60)).run(|comm| {
        for (stage, compute) in all() {
            let run = train(&Zero::new(config_of(stage, compute), &comm, device(&comm)?)?)?;
            let weights = run.weights.into_iter().flat_map(|(_, values)| values);
            let bytes: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
            let expected = fs::read(folder.join(format!("{stage}, {compute}"))).unwrap();
            assert!(bytes == expected, "{compute} at {stage}: other weights than threads have");
            assert!(run.losses.windows(2).all(|losses| losses[1] < losses[0]), "{:?}", run.losses);
        }
        Ok::<_, ZeroError>(())
    });
    ran.unwrap();
}

/// Stages, and types that the device computes in.
fn all() -> impl Iterator<Item = (Stage, DType)> {
    let device: Device = kind().devices().unwrap().remove(0);
    let has_half = device.supports_dtype(burn::tensor::DType::F16);
    let types = [DType::F32, DType::F16].into_iter().filter(move |dtype| *dtype == DType::F32 || has_half);
    types.flat_map(|dtype| Stage::ALL.map(|stage| (stage, dtype)))
}

fn config_of(stage: Stage, compute: DType) -> ZeroConfig {
    let precision = Precision { compute, ..Precision::default() };
    let loss_scale = Some(LossScaling::Static { scale: 16.0 });
    ZeroConfig { precision, loss_scale, deadline_seconds: 60.0, ..config(stage) }
}

fn train(zero: &Zero) -> Result<Run, ZeroError> {
    let comm = zero.communicator();
    let mut model = zero.shard(Odd::new)?;
    let adamw = Adam { weight_decay: WeightDecay::Decoupled(0.01), ..Adam::ADAMW };
    let mut optimizer = zero.optimizer(Fused::new(adamw).unwrap())?;
    let share = Partition::new(12, comm.world_size()).range(comm.rank());
    let mut run = Run::new();
    for _ in 0..STEPS {
        let input = cast(rows(0, share.clone(), zero.device()), zero.config());
        zero.backward_weighted(model.loss(input, 0), share.len() as f64)?;
        run.record(&optimizer.step(LR, &mut model)?);
    }
    run.weights = weights(&zero.unshard(&model)?);
    Ok(run)
}
