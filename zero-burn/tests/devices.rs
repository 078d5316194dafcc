//! The engine on a CubeCL device, and on the same device with state elsewhere. `ZERO_DEVICE` names its kind, as in `cuda` or
//! `vulkan`; `ZERO_RANKS` how many ranks there are instead of 1, 2 and 4.
#![cfg(feature = "cube")]

mod common;
#[path = "common/recording.rs"]
mod recording;

use std::env;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use common::{
    DeviceOf, INPUT, LR, Odd, Run, Weights, cast, config, device, kind, rows, weights, with_engines_on, world,
};
use gpt::GptConfig;
use recording::{BF16, Bounds, F16, Recording, SAME_TYPE};
use tempfile::TempDir;
use zero_burn::{
    Adagrad, Adam, Bytes, Communicator, DType, Fused, Lion, LoadOptions, LocalStorage, LocalWorld,
    LossScaling, MemorySetup, Notes, OptimizerConfig, OptimizerCost, Partition, Placement, Precision,
    SaverOptions, Sgd, Stage, Storage, Tier, WeightDecay, WorldSize, Zero, ZeroConfig, ZeroError,
};

fn on_the_cpu(_: &Arc<dyn Communicator>) -> Result<Device, ZeroError> {
    Ok(Device::flex())
}

fn world_sizes() -> Vec<usize> {
    match env::var("ZERO_RANKS") {
        Ok(ranks) => vec![ranks.parse().unwrap()],
        Err(_) => vec![1, 2, 4],
    }
}

/// Types of 16 bits that the device computes in.
fn narrow_types() -> Vec<DType> {
    let device = kind().devices().unwrap().remove(0);
    let known = [(DType::F16, burn::tensor::DType::F16), (DType::BF16, burn::tensor::DType::BF16)];
    known.into_iter().filter(|(_, dtype)| device.supports_dtype(*dtype)).map(|(dtype, _)| dtype).collect()
}

/// Devices have their own exponentials and error functions, and gradients are off by 1e-5 of the largest: where that is all
/// there is of one, Adam's steps are others.
const ON_A_DEVICE: Bounds = Bounds { outliers: 5e-3, ..SAME_TYPE };

fn parity(stage: Stage) {
    let recording = Recording::read("gpt");
    for size in world_sizes() {
        // With buckets as small as those of the recording, software spends all of its time on launches.
        let device_transport = size < 4 || env::var("ZERO_RANKS").is_ok();
        let config =
            ZeroConfig { stage, persistence_threshold: 0, device_transport, ..ZeroConfig::default() };
        recording.replay_fused(&config, world(size), &ON_A_DEVICE, &device);
    }
}

// One by one, for software takes its time.
#[test]
fn a_gpt_trains_as_in_pytorch_at_stage_0() {
    parity(Stage::Zero);
}

#[test]
fn a_gpt_trains_as_in_pytorch_at_stage_1() {
    parity(Stage::One);
}

#[test]
fn a_gpt_trains_as_in_pytorch_at_stage_2() {
    parity(Stage::Two);
}

#[test]
fn a_gpt_trains_as_in_pytorch_at_stage_3() {
    parity(Stage::Three);
}

#[test]
fn a_tied_gpt_trains_as_in_pytorch_by_burns_optimizer_too() {
    let size = *world_sizes().last().unwrap();
    let config = ZeroConfig { stage: Stage::Three, persistence_threshold: 200, ..ZeroConfig::default() };
    Recording::read("gpt_tied").replay(&config, world(size), &ON_A_DEVICE, &device);
}

#[test]
fn training_in_sixteen_bits_follows_pytorch_in_thirty_two() {
    let recording = Recording::read("gpt");
    for compute in narrow_types() {
        let bounds = if compute == DType::F16 { F16 } else { BF16 };
        for size in world_sizes().into_iter().filter(|size| *size < 4) {
            for stage in [Stage::One, Stage::Three] {
                let precision = Precision { compute, ..Precision::default() };
                let config = ZeroConfig { stage, precision, ..ZeroConfig::default() };
                recording.replay_fused(&config, world(size), &bounds, &device);
            }
        }
    }
}

/// Sets all values to what no generator has a part in, which would be another one on each device.
struct Known;

impl ModuleMapper for Known {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, _) = param.consume();
        let (shape, device) = (value.shape(), value.device());
        let numel = shape.num_elements();
        let values: Vec<f32> = (0..numel).map(|at| ((at * 7 + numel) as f32 * 0.37).sin() * 0.4).collect();
        let known = Tensor::from_data(TensorData::new(values, shape), &device);
        Param::initialized(id, known.set_require_grad(value.is_require_grad()))
    }
}

const ROWS: usize = 12;

/// Trains the odd model for some steps.
fn train(optimizer: Fused, config: &ZeroConfig, size: usize, steps: usize, device: DeviceOf<'_>) -> Run {
    let mut runs = with_engines_on(device, config, size, |comm, zero| {
        let mut model = zero.shard(|device| Odd::new(device).map(&mut Known))?;
        let mut optimizer = zero.optimizer(optimizer)?;
        let share = Partition::new(ROWS, world(size)).range(comm.rank());
        let mut run = Run::new();
        for step in 0..steps {
            let input = cast(rows(step, share.clone(), zero.device()), config);
            // Blocks that are skipped have no gradient in some steps.
            zero.backward_weighted(model.loss(input, 1 << (step % 5)), share.len() as f64)?;
            run.record(&optimizer.step(LR, &mut model)?);
        }
        run.weights = weights(&zero.unshard(&model)?);
        Ok(run)
    });
    let first = runs.remove(0);
    assert!(runs.iter().all(|other| *other == first), "every rank sees the same run");
    first
}

fn adamw() -> Fused {
    Fused::new(Adam { weight_decay: WeightDecay::Decoupled(0.01), ..Adam::ADAMW }).unwrap()
}

fn optimizers() -> Vec<Fused> {
    let decay = WeightDecay::Decoupled(0.01);
    let configs: [OptimizerConfig; 5] = [
        Adam { weight_decay: WeightDecay::L2(0.01), ..Adam::ADAM }.into(),
        Adagrad::default().into(),
        Lion { weight_decay: decay, ..Lion::default() }.into(),
        Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }.into(),
        Sgd::default().into(),
    ];
    let fused = configs.into_iter().map(|config| Fused::new(config).unwrap());
    fused.chain([adamw()]).collect()
}

#[test]
fn every_fused_optimizer_trains_as_on_the_cpu() {
    for (nth, optimizer) in optimizers().into_iter().enumerate() {
        for size in world_sizes() {
            // One stage for each number of ranks; AdamW, the last, at all of them.
            for stage in if nth == 5 { &Stage::ALL[..] } else { &Stage::ALL[(nth + size) % 4..][..1] } {
                let config = config(*stage);
                let here = train(optimizer, &config, size, 4, &device);
                let there = train(optimizer, &config, size, 4, &on_the_cpu);
                here.assert_close(&there, 1e-4, &format!("{:?}, {stage}, {size} ranks", optimizer.config()));
            }
        }
    }
}

#[test]
fn states_in_sixteen_bits_train_as_on_the_cpu() {
    for size in world_sizes() {
        let precision = Precision { optimizer_state: DType::BF16, ..Precision::default() };
        let config = ZeroConfig { precision, ..config(Stage::Two) };
        let adam = Fused::new(Adam { beta2: 0.95, ..Adam::ADAMW }).unwrap();
        let here = train(adam, &config, size, 4, &device);
        let there = train(adam, &config, size, 4, &on_the_cpu);
        here.assert_close(&there, 1e-3, &format!("{size} ranks"));
    }
}

/// Weights after each of some steps whose gradients do not depend on weights.
fn weights_by_step(config: &ZeroConfig, size: usize) -> Vec<Weights> {
    let mut runs = with_engines_on(&device, config, size, |comm, zero| {
        let mut model: Linear =
            zero.shard(|device| LinearConfig::new(INPUT, 33).init(device).map(&mut Known))?;
        let mut optimizer = zero.optimizer(adamw())?;
        let share = Partition::new(ROWS, world(size)).range(comm.rank());
        let steps = (0..4).map(|step| {
            let input = cast(rows(step, share.clone(), zero.device()), config);
            zero.backward_weighted(model.forward(input).sum(), share.len() as f64)?;
            optimizer.step(LR, &mut model)?;
            optimizer.flush()?;
            Ok(weights(&zero.unshard(&model)?))
        });
        steps.collect::<Result<Vec<_>, ZeroError>>()
    });
    runs.swap_remove(0)
}

#[test]
fn states_on_the_host_or_on_a_disk_train_as_states_on_the_device() {
    let folder = TempDir::new().unwrap();
    for (size, stage) in world_sizes().into_iter().flat_map(|size| Stage::ALL.map(|stage| (size, stage))) {
        for compute in [DType::F32].into_iter().chain(narrow_types()) {
            let precision = Precision { compute, ..Precision::default() };
            let config = ZeroConfig { precision, loss_scale: Some(LossScaling::NONE), ..config(stage) };
            let on_device = weights_by_step(&config, size);
            for tier in [Tier::Host, Tier::Nvme] {
                let path = (tier == Tier::Nvme).then(|| folder.path().to_owned());
                let mut config = config.clone();
                config.offload.optimizer = Placement { tier, path, ..Placement::default() };
                let elsewhere = weights_by_step(&config, size);
                for (step, (here, there)) in on_device.iter().zip(&elsewhere).enumerate() {
                    for ((path, here), (_, there)) in here.iter().zip(there) {
                        for (here, there) in here.iter().zip(there) {
                            let ulp = f64::from(here.abs().max(LR as f32)) * f64::from(f32::EPSILON);
                            let allowed = 2.0 * (step + 1) as f64 * ulp;
                            let off = f64::from((here - there).abs());
                            assert!(
                                off <= allowed,
                                "{path} after step {step}, {stage}, {size} ranks, {compute}, {tier}: {here} and {there}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_delayed_update_trains_as_on_the_cpu() {
    for size in world_sizes() {
        let mut config = config(Stage::Three);
        config.offload.delayed_update = true;
        config.offload.optimizer.tier = Tier::Host;
        let run = |device| {
            let mut runs = with_engines_on(device, &config, size, |comm, zero| {
                let mut model = zero.shard(|device| Odd::new(device).map(&mut Known))?;
                let mut optimizer = zero.optimizer(adamw())?;
                let share = Partition::new(ROWS, world(size)).range(comm.rank());
                let mut run = Run::new();
                for step in 0..4 {
                    let loss = model.loss(rows(step, share.clone(), zero.device()), 0);
                    zero.backward_weighted(loss, share.len() as f64)?;
                    run.record(&optimizer.step(LR, &mut model)?);
                }
                optimizer.flush()?;
                run.weights = weights(&zero.unshard(&model)?);
                Ok(run)
            });
            runs.swap_remove(0)
        };
        run(&device as DeviceOf<'_>).assert_close(&run(&on_the_cpu), 1e-4, &format!("{size} ranks"));
    }
}

const GPT: GptConfig = GptConfig { vocab: 256, context: 16, dim: 64, heads: 4, layers: 2, tied: false };

fn tokens(rows: Range<usize>, device: &Device) -> Tensor<2, Int> {
    let values: Vec<i32> =
        rows.clone().flat_map(|row| (0..16).map(move |at| ((row * 37 + at * 11) % 256) as i32)).collect();
    Tensor::from_data(TensorData::new(values, [rows.len(), 16]), device)
}

#[test]
fn sharded_training_is_burns_own_on_the_device() {
    let alone = kind().devices().unwrap().remove(0).autodiff();
    let mut model = GPT.init(&alone).map(&mut Known);
    let mut optimizer = AdamWConfig::new().init();
    let mut plain = Vec::new();
    for step in 0..4 {
        let rows = 4 * step..4 * (step + 1);
        let loss = model.loss(tokens(rows.clone(), &alone), tokens(rows, &alone));
        plain.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
    }
    for (size, stage) in world_sizes().into_iter().flat_map(|size| Stage::ALL.map(|stage| (size, stage))) {
        let losses = with_engines_on(&device, &config(stage), size, |comm, zero| {
            let mut model = zero.shard(|device| GPT.init(device).map(&mut Known))?;
            let mut optimizer = zero.optimizer(AdamWConfig::new().build())?;
            let steps = (0..4).map(|step| {
                let share = Partition::new(4, world(size)).range(comm.rank());
                let rows = 4 * step + share.start..4 * step + share.end;
                let loss = model.loss(tokens(rows.clone(), zero.device()), tokens(rows, zero.device()));
                zero.backward_weighted(loss, share.len() as f64)?;
                Ok(optimizer.step(1e-3, &mut model)?.loss)
            });
            steps.collect::<Result<Vec<_>, ZeroError>>()
        });
        for (here, there) in losses[0].iter().zip(&plain) {
            assert!((here - there).abs() <= 1e-4 * there, "{stage}, {size} ranks: {here} and {there}");
        }
    }
}

#[test]
fn what_is_held_on_the_device_is_what_was_planned() {
    for (size, stage) in world_sizes().into_iter().flat_map(|size| Stage::ALL.map(|stage| (size, stage))) {
        let config = ZeroConfig {
            stage,
            persistence_threshold: 0,
            bucket_bytes: Bytes::new(128 * 1024),
            // Nothing is gathered but what is in use.
            lookahead_bytes: Bytes::ZERO,
            ..ZeroConfig::default()
        };
        with_engines_on(&device, &config, size, |_, zero| {
            let mut model = zero.shard(|device| GPT.init(device))?;
            let mut optimizer = zero.optimizer(adamw())?;
            let plan = MemorySetup::new(&config, OptimizerCost::ADAMW).plan_largest(&*zero.layout()?);
            for step in 0..3 {
                zero.reset_gathered_peak()?;
                let tokens =
                    || Tensor::<1, Int>::arange(0..(GPT.context as i64), zero.device()).unsqueeze::<2>();
                zero.backward(model.loss(tokens(), tokens()))?;
                optimizer.step(1e-3, &mut model)?;
                let memory = zero.memory_of_largest_rank()?;
                let at = format!("step {step}, {stage}, {size} ranks");
                let (most, planned) = (memory.gathered_peak, plan.gathered);
                assert!(most <= planned, "{at}: {most} gathered, planned {planned}");
                assert_eq!(most > Bytes::ZERO, planned > Bytes::ZERO, "{at}: {most} gathered");
                assert_eq!(memory.gathered, Bytes::ZERO, "{at}");
                let state = memory.state;
                for (what, measured, planned) in [
                    ("parameters", state.parameters, plan.state.parameters),
                    ("gradients", state.gradients, plan.state.gradients),
                    ("optimizer", state.optimizer, plan.state.optimizer),
                ] {
                    let off = measured.get().abs_diff(planned.get()) as f64;
                    assert!(
                        off <= 0.02 * planned.get() as f64,
                        "{what} after {at}: measured {measured}, planned {planned}"
                    );
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_run_saved_on_the_device_goes_on_there_and_on_the_cpu() {
    let size = *world_sizes().last().unwrap();
    let folder = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    // Whether to save after three steps, or to begin with what was saved.
    let run = |device: DeviceOf<'_>, resumes: bool| {
        let mut runs = with_engines_on(device, &config(Stage::Three), size, |comm, zero| {
            let mut model = zero.shard(|device| Odd::new(device).map(&mut Known))?;
            let mut optimizer = zero.optimizer(adamw())?;
            let mut checkpoints = zero.checkpoints(Arc::clone(&storage), SaverOptions::default())?;
            let share = Partition::new(ROWS, world(size)).range(comm.rank());
            if resumes {
                checkpoints.load(&mut optimizer, Some(3), &LoadOptions::default())?;
            }
            let mut run = Run::new();
            for step in if resumes { 3..6 } else { 0..6 } {
                let loss = model.loss(rows(step, share.clone(), zero.device()), 0);
                zero.backward_weighted(loss, share.len() as f64)?;
                let outcome = optimizer.step(LR, &mut model)?;
                if step >= 3 {
                    run.record(&outcome);
                }
                if !resumes && step == 2 {
                    checkpoints.save(&mut optimizer, &Notes::default())?;
                }
            }
            run.weights = weights(&zero.unshard(&model)?);
            Ok(run)
        });
        runs.swap_remove(0)
    };
    let whole = run(&device, false);
    assert_eq!(run(&device, true), whole, "on the device");
    run(&on_the_cpu, true).assert_close(&whole, 1e-4, "on the CPU");
}

#[test]
fn what_comes_from_devices_is_what_comes_through_the_host() {
    for (size, stage) in world_sizes().into_iter().flat_map(|size| Stage::ALL.map(|stage| (size, stage))) {
        for (overlap, compute) in [(true, DType::F32), (false, DType::F32), (true, DType::F16)] {
            if compute != DType::F32 && !narrow_types().contains(&compute) {
                continue;
            }
            let run = |device_transport| {
                let precision = Precision { compute, ..Precision::default() };
                let loss_scale = Some(LossScaling::Static { scale: 16.0 });
                let config = ZeroConfig { overlap, precision, loss_scale, device_transport, ..config(stage) };
                let mut runs = with_engines_on(&device, &config, size, |comm, zero| {
                    let mut model = zero.shard(|device| Odd::new(device).map(&mut Known))?;
                    let mut optimizer = zero.optimizer(adamw())?;
                    let share = Partition::new(ROWS, world(size)).range(comm.rank());
                    let (mut run, mut skipped) = (Run::new(), Vec::new());
                    for step in 0..6 {
                        // Once gradients are not finite, and once two backwards make a step.
                        let rows = cast(rows(step, share.clone(), zero.device()), &config);
                        let rows = if step == 3 { rows * f32::INFINITY } else { rows };
                        zero.backward_weighted(model.loss(rows.clone(), 0), share.len() as f64)?;
                        if step == 4 {
                            zero.backward_weighted(model.loss(rows, 5), 1.0)?;
                        }
                        let outcome = optimizer.step(LR, &mut model)?;
                        match outcome.not_finite {
                            None => run.record(&outcome),
                            Some(found) => skipped.push((step, format!("{found:?}"))),
                        }
                    }
                    let report = zero.memory()?;
                    run.weights = weights(&zero.unshard(&model)?);
                    Ok((run, skipped, report))
                });
                runs.swap_remove(0)
            };
            let what = format!("{stage}, {size} ranks, overlap {overlap}, {compute}");
            let ((taken, skipped, report), (through, skipped_too, staged)) = (run(true), run(false));
            assert_eq!((taken.weights.clone(), &skipped), (through.weights.clone(), &skipped_too), "{what}");
            assert!(matches!(&skipped[..], [(3, _)]), "{what}: {skipped:?}");
            taken.assert_close(&through, 1e-6, &what);
            // What is taken from a device needs no copy on the host.
            let windows = [report.windows, staged.windows].map(|bytes| bytes > Bytes::ZERO);
            assert_eq!(windows, [false, size > 1 && stage != Stage::Zero], "{what}");
            if size > 1 && stage == Stage::Three {
                assert!(report.gathered_peak > Bytes::ZERO, "{what}");
            }
        }
    }
}

#[test]
fn a_type_that_the_device_does_not_compute_in_is_refused() {
    let device = kind().devices().unwrap().remove(0);
    let unknown = [(DType::F16, burn::tensor::DType::F16), (DType::BF16, burn::tensor::DType::BF16)];
    for (compute, _) in unknown.into_iter().filter(|(_, dtype)| !device.supports_dtype(*dtype)) {
        let precision = Precision { compute, ..Precision::default() };
        let refused = LocalWorld::new(WorldSize::ONE).run(|comm| {
            Zero::new(ZeroConfig { precision, ..ZeroConfig::default() }, &comm, device.clone()).map(drop)
        });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(compute.name()) && error.contains("precision.compute"), "{error}");
    }
}

#[test]
fn a_rank_that_gives_up_is_named_by_all() {
    for size in world_sizes().into_iter().filter(|size| *size > 1) {
        for (stage, overlap) in [(Stage::Zero, true), (Stage::Two, false), (Stage::Three, true)] {
            let config = ZeroConfig { overlap, ..config(stage) };
            let outcome = LocalWorld::new(world(size)).with_deadline(config.deadline()).run(|comm| {
                let zero = Zero::new(config.clone(), &comm, device(&comm)?)?;
                let mut model = zero.shard(Odd::new)?;
                let mut optimizer = zero.optimizer(adamw())?;
                for step in 0..3 {
                    let loss = model.loss(rows(step, 0..2, zero.device()), 0);
                    if step == 1 && comm.rank().index() == 1 {
                        comm.abort("gives up");
                    }
                    zero.backward(loss)?;
                    optimizer.step(LR, &mut model)?;
                }
                Ok::<_, ZeroError>(())
            });
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains("gives up"), "{stage}, {size} ranks: {error}");
        }
    }
}

#[test]
fn blocks_that_are_run_again_give_the_same_training() {
    for (size, stage) in
        world_sizes().into_iter().flat_map(|size| [Stage::One, Stage::Three].map(|stage| (size, stage)))
    {
        let run = |again| {
            let mut runs = with_engines_on(&device, &config(stage), size, |comm, zero| {
                let mut model =
                    zero.shard(|device| GPT.init(device).map(&mut Known).with_recompute(again))?;
                // Adam would make large steps of what rounding leaves of a gradient.
                let mut optimizer = zero.optimizer(Fused::new(Sgd::default())?)?;
                let mut run = Run::new();
                for step in 0..3 {
                    let row = step * size + comm.rank().index();
                    let rows = || tokens(row..row + 1, zero.device());
                    zero.backward(model.loss(rows(), rows()))?;
                    run.record(&optimizer.step(0.1, &mut model)?);
                }
                run.weights = weights(&zero.unshard(&model)?);
                Ok(run)
            });
            runs.swap_remove(0)
        };
        // Fused, the two runs of a block need not be the same kernels.
        let relative = if cfg!(feature = "fusion") { 1e-5 } else { 1e-6 };
        run(true).assert_close(&run(false), relative, &format!("{stage}, {size} ranks"));
    }
}

#[test]
fn parameters_may_be_frozen_for_a_while() {
    for (size, stage) in world_sizes().into_iter().flat_map(|size| Stage::ALL.map(|stage| (size, stage))) {
        let run = |device: DeviceOf<'_>| {
            let mut runs = with_engines_on(device, &config(stage), size, |comm, zero| {
                let mut model = zero.shard(|device| Odd::new(device).map(&mut Known))?;
                let mut optimizer = zero.optimizer(adamw())?;
                let share = Partition::new(ROWS, world(size)).range(comm.rank());
                let mut run = Run::new();
                for step in 0..9 {
                    model = match step {
                        3 => zero.freeze(model, "blocks*")?,
                        6 => zero.unfreeze(model, "blocks*")?,
                        _ => model,
                    };
                    let loss = model.loss(rows(step, share.clone(), zero.device()), 0);
                    zero.backward_weighted(loss, share.len() as f64)?;
                    run.record(&optimizer.step(LR, &mut model)?);
                }
                run.weights = weights(&zero.unshard(&model)?);
                Ok(run)
            });
            runs.swap_remove(0)
        };
        run(&device).assert_close(&run(&on_the_cpu), 1e-4, &format!("{stage}, {size} ranks"));
    }
}

#[test]
fn tiers_are_not_chosen_for_a_device_that_does_not_tell_its_memory() {
    let mut config = config(Stage::Two);
    config.offload.optimizer.tier = Tier::Auto;
    let refused = LocalWorld::new(world(1)).run(|comm| -> Result<(), ZeroError> {
        let zero = Zero::new(config.clone(), &comm, device(&comm)?)?;
        zero.shard(Odd::new).map(drop)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("name the tiers"), "{error}");
}

#[test]
fn ranks_are_dealt_out_to_the_devices_of_a_kind() {
    let devices = kind().devices().unwrap();
    let taken = LocalWorld::new(world(3)).run(|comm| device(&comm)).unwrap();
    for (rank, taken) in taken.into_iter().enumerate() {
        assert_eq!(taken, devices[rank % devices.len()]);
    }
}
