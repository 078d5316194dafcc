//! An update that runs beside the next step equals the algorithm written down plainly, to the bit.

mod common;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use common::{INPUT, LR, Odd, SEED, Weights, cast, config, rows, weights, with_engines};
use zero_burn::{
    Adam, DType, Fused, Offload, Partition, Placement, ReduceGradients, Stage, Tier, ZeroConfig, ZeroError,
    materialize,
};
use zero_offload::{HostOptimizer, Update, Workers};

const STEPS: usize = 7;
const BATCH: usize = 6;
const EXACT: u64 = 2;

fn layer(device: &Device) -> Linear {
    LinearConfig::new(INPUT, 3).init(device)
}

fn loss(model: &Linear, step: usize, device: &Device) -> Tensor<1> {
    model.forward(rows(step, 0..BATCH, device)).square().mean()
}

/// Gives a module other values, in its order.
struct Put<'a>(std::slice::Iter<'a, Vec<f32>>);

impl ModuleMapper for Put<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.0.next().expect("one for each parameter");
        param.map(|old| {
            let new = Tensor::<1>::from_floats(values.as_slice(), &old.device().inner()).reshape(old.shape());
            Tensor::from_inner(new).require_grad()
        })
    }
}

/// What layers compute with is one update behind what the optimizer has.
fn plainly() -> (Vec<f64>, Vec<Vec<f32>>) {
    let device = Device::default().autodiff();
    let model = materialize(&device, SEED, layer);
    let optimizer = HostOptimizer::new(Adam::ADAMW).unwrap();
    let mut masters: Vec<Vec<f32>> = weights(&model).into_iter().map(|(_, values)| values).collect();
    let mut visible = masters.clone();
    let mut states: Vec<_> =
        masters.iter().map(|values| [vec![0.0_f32; values.len()], vec![0.0; values.len()]]).collect();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let model = model.clone().map(&mut Put(visible.iter()));
        let loss = loss(&model, step, &device);
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = loss.backward();
        let gradients = [
            model.weight.val().grad(&gradients).unwrap().into_data().iter::<f32>().collect::<Vec<_>>(),
            model.bias.as_ref().unwrap().val().grad(&gradients).unwrap().into_data().iter().collect(),
        ];
        let is_exact = (step as u64) < EXACT;
        if !is_exact {
            visible = masters.clone();
        }
        for ((values, [first, second]), gradient) in masters.iter_mut().zip(&mut states).zip(&gradients) {
            let update = Update { lr: LR, step: step as u64 + 1, gradient_factor: 1.0 };
            let mut states = [first.as_mut_slice().into(), second.as_mut_slice().into()];
            let gradient = gradient[..].into();
            optimizer.update(&Workers::alone(), update, values, gradient, &mut states, None).unwrap();
        }
        if is_exact {
            visible = masters.clone();
        }
    }
    (losses, masters)
}

fn delayed(config: ZeroConfig) -> ZeroConfig {
    let offload = Offload { delayed_update: true, exact_steps: EXACT, ..config.offload.clone() };
    ZeroConfig { offload, ..config }
}

#[test]
fn a_delayed_update_is_the_algorithm_of_the_paper() {
    let (expected, masters) = plainly();
    for stage in Stage::ALL {
        let runs = with_engines(&delayed(config(stage)), 1, |_, zero| {
            let mut model = zero.shard(layer)?;
            let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                zero.backward(loss(&model, step, zero.device()))?;
                losses.push(optimizer.step(LR, &mut model)?.loss);
            }
            optimizer.flush()?;
            Ok((losses, weights(&zero.unshard(&model)?)))
        });
        let (losses, weights) = &runs[0];
        assert_eq!(*losses, expected, "{stage}");
        let weights: Vec<_> = weights.iter().map(|(_, values)| values.clone()).collect();
        assert_eq!(weights, masters, "{stage}");
    }
}

fn train(config: &ZeroConfig, size: usize) -> (Vec<f64>, Weights) {
    let mut runs = with_engines(config, size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        let share = Partition::new(BATCH, comm.world_size()).range(comm.rank());
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let input = cast(rows(step, share.clone(), zero.device()), config);
            zero.backward(model.loss(input, 0))?;
            losses.push(optimizer.step(LR, &mut model)?.loss);
            if step == 4 {
                optimizer.flush()?;
                drop(zero.unshard(&model)?);
            }
        }
        optimizer.flush()?;
        Ok((losses, weights(&zero.unshard(&model)?)))
    });
    runs.remove(0)
}

#[test]
fn delayed_updates_give_the_same_bits_at_every_stage_and_on_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    for compute in [DType::F32, DType::BF16] {
        for size in [1, 3] {
            let configured = |stage| {
                let mut config = delayed(config(stage));
                config.precision.compute = compute;
                config.precision.reduce = Some(DType::F32);
                config
            };
            let expected = train(&configured(Stage::Zero), size);
            let mut exact = configured(Stage::Zero);
            exact.offload.delayed_update = false;
            assert_ne!(train(&exact, size), expected, "it is another algorithm");
            for stage in Stage::ALL {
                assert_eq!(train(&configured(stage), size), expected, "{compute} at {stage} on {size} ranks");
                let mut on_disk = configured(stage);
                let path = Some(directory.path().to_path_buf());
                on_disk.offload.optimizer = Placement { tier: Tier::Nvme, path, fraction: 0.5 };
                assert_eq!(
                    train(&on_disk, size),
                    expected,
                    "{compute} at {stage} on {size} ranks, on a disk"
                );
                // An update reads its gradients while those of the next step are written.
                on_disk.offload.gradients = on_disk.offload.optimizer.clone();
                on_disk.reduce_gradients = Some(ReduceGradients::EveryBackward);
                for fraction in [1.0, 0.4] {
                    on_disk.offload.gradients.fraction = fraction;
                    assert_eq!(
                        train(&on_disk, size),
                        expected,
                        "{compute} at {stage} on {size} ranks, {fraction} of the gradients on a disk"
                    );
                }
            }
        }
    }
}

#[test]
fn nothing_is_given_out_while_an_update_is_under_way() {
    with_engines(&delayed(config(Stage::Three)), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        for step in 0..=EXACT as usize {
            zero.backward(model.loss(rows(step, 0..2, zero.device()), 0))?;
            optimizer.step(LR, &mut model)?;
        }
        assert!(matches!(zero.unshard(&model), Err(ZeroError::UpdatePending)));
        assert!(matches!(zero.freeze(model.clone(), "input.*"), Err(ZeroError::UpdatePending)));
        drop(model.clone().into_record());
        assert!(matches!(zero.check(), Err(ZeroError::UpdatePending)));
        optimizer.flush()?;
        optimizer.flush()?;
        drop(zero.unshard(&model)?);
        drop(zero.freeze(model, "input.*")?);
        Ok(())
    });
}

#[test]
fn an_optimizer_may_go_while_its_update_is_under_way() {
    with_engines(&delayed(config(Stage::Two)), 2, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        for step in 0..=EXACT as usize {
            zero.backward(model.loss(rows(step, 0..2, zero.device()), 0))?;
            optimizer.step(LR, &mut model)?;
        }
        drop(optimizer);
        let before = weights(&zero.unshard(&model)?);
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        zero.backward(model.loss(rows(9, 0..2, zero.device()), 0))?;
        optimizer.step(LR, &mut model)?;
        assert_ne!(weights(&zero.unshard(&model)?), before);
        Ok(())
    });
}
