//! Initial values depend on the seed and the model alone.

mod common;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LinearConfig, conv::Conv2dConfig};
use burn::tensor::{Device, Tensor};
use common::{Odd, SEED, Weights, config, weights, with_engines};
use zero_burn::{LocalWorld, Stage, Zero, ZeroConfig, ZeroError, materialize};

fn reference() -> Weights {
    let device = Device::default();
    weights(&materialize(&device, SEED, Odd::new))
}

#[test]
fn initial_values_are_those_of_the_unsharded_model() {
    let expected = reference();
    assert!(expected.iter().any(|(path, _)| path == "blocks.3.weight"));
    for size in [1, 2, 3, 5, 8] {
        for stage in Stage::ALL {
            let models = with_engines(&config(stage), size, |_comm, zero| {
                let model = zero.shard(Odd::new)?;
                Ok(weights(&zero.unshard(&model)?))
            });
            for model in models {
                assert_eq!(model, expected, "{stage} on {size} ranks");
            }
        }
    }
}

#[test]
fn values_drawn_early_are_those_of_rank_zero_everywhere() {
    // `from_tensor` draws when the model is built, not when a parameter is used.
    fn build(device: &Device) -> Odd {
        let mut model = Odd::new(device);
        model.scale = Param::from_tensor(Tensor::random([1], burn::tensor::Distribution::Default, device));
        model
    }
    let models = with_engines(&config(Stage::Three), 4, |_comm, zero| {
        let model = zero.shard(build)?;
        Ok(weights(&zero.unshard(&model)?))
    });
    let device = Device::default();
    let expected = weights(&materialize(&device, SEED, build));
    for model in models {
        assert_eq!(model, expected);
    }
}

#[test]
fn shapes_are_whole_and_what_is_owned_is_split() {
    let owned = with_engines(&config(Stage::Three), 3, |comm, zero| {
        let model = zero.shard(|device| LinearConfig::new(7, 5).init(device))?;
        assert_eq!((model.weight.dims(), model.weight.val().dims()), ([7, 5], [7, 5]));
        assert_eq!(model.num_params(), 7 * 5 + 5);
        Ok(zero.layout()?.shard_numel(comm.rank()))
    });
    assert_eq!(owned.iter().sum::<usize>(), 7 * 5 + 5);
    assert!(owned.iter().all(|&shard| shard < 20));
}

#[test]
fn layers_that_ask_for_a_shape_before_the_value_work() {
    use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
    use burn::nn::{BatchNormConfig, RmsNormConfig};
    let expected = {
        let device = Device::default();
        let encoder = materialize(&device, SEED, |device| {
            TransformerEncoderConfig::new(8, 16, 2, 1).with_dropout(0.0).init(device)
        });
        let x = Tensor::<3>::ones([2, 3, 8], &device);
        encoder.forward(TransformerEncoderInput::new(x)).into_data().iter::<f32>().collect::<Vec<_>>()
    };
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |comm, zero| {
            let encoder = zero
                .shard(|device| TransformerEncoderConfig::new(8, 16, 2, 1).with_dropout(0.0).init(device))?;
            let x = Tensor::<3>::ones([2, 3, 8], zero.device());
            let y = encoder.forward(TransformerEncoderInput::new(x.clone()));
            let values: Vec<f32> = y.clone().into_data().iter::<f32>().collect();
            assert_eq!(values.len(), expected.len());
            // Without autodiff, Burn computes attention in another order.
            assert!(
                values.iter().zip(&expected).all(|(value, expected)| (value - expected).abs() < 1e-5),
                "{stage}"
            );
            zero.backward(y.square().mean())?;

            let zero = Zero::new(config(stage), comm, Device::default())?;
            let (batch, rms) = zero
                .shard(|device| (BatchNormConfig::new(3).init(device), RmsNormConfig::new(8).init(device)))?;
            let y = rms.forward(batch.forward(x));
            zero.backward(y.square().mean())?;
            Ok(())
        });
    }
}

#[test]
fn records_are_those_of_the_whole_model() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 3, |_comm, zero| {
            let model = zero.shard(Odd::new)?;
            let expected = weights(&zero.unshard(&model)?);
            let record = model.clone().into_record();
            let device = Device::default();
            let restored = Odd::new(&device).load_record(record);
            assert_eq!(weights(&restored), expected, "{stage}");
            // So are records of a whole model made from it, after training went on.
            let whole = zero.unshard(&model)?;
            assert_eq!(weights(&Odd::new(&device).load_record(whole.into_record())), expected, "{stage}");
            Ok(())
        });
    }
}

#[test]
fn parameters_of_any_rank_are_sharded() {
    with_engines(&config(Stage::Three), 3, |_comm, zero| {
        let model = zero.shard(|device| Conv2dConfig::new([2, 3], [3, 3]).init(device))?;
        let image = Tensor::<4>::ones([1, 2, 5, 5], zero.device());
        zero.backward(model.forward(image).square().mean())?;
        let mut model = model;
        let outcome = zero.optimizer(common::adamw().build())?.step(0.1, &mut model)?;
        assert!(outcome.applied && outcome.grad_norm > 0.0);
        Ok(())
    });
}

#[test]
fn running_statistics_stay_with_their_layer() {
    use burn::nn::BatchNormConfig;
    with_engines(&config(Stage::Three), 2, |_comm, zero| {
        zero.shard(|device| BatchNormConfig::new(3).init(device))?;
        let names: Vec<_> =
            zero.layout()?.parameters().iter().map(|parameter| parameter.name().to_owned()).collect();
        assert_eq!(names, ["gamma", "beta"]);
        Ok(())
    });
}

#[test]
fn a_second_model_needs_a_second_engine() {
    with_engines(&config(Stage::Two), 2, |_comm, zero| {
        zero.shard(Odd::new)?;
        assert!(matches!(zero.shard(Odd::new), Err(ZeroError::AlreadySharded)));
        Ok(())
    });
}

#[test]
fn another_model_on_one_rank_is_named() {
    let error = LocalWorld::new(common::world(3))
        .run(|comm| {
            let zero = Zero::new(config(Stage::Three), &comm, Device::default())?;
            let inputs = if comm.rank().index() == 2 { 6 } else { 7 };
            zero.shard(|device| LinearConfig::new(inputs, 5).init(device)).map(drop)
        })
        .expect_err("the models differ");
    let text = error.to_string();
    assert!(
        text.contains("rank 2")
            && text.contains("parameter weight [6, 5]")
            && text.contains("parameter weight [7, 5]"),
        "{text}"
    );
}

#[test]
fn another_configuration_on_one_rank_is_named() {
    let error = LocalWorld::new(common::world(2))
        .run(|comm| {
            let clip_norm = (comm.rank().index() == 1).then_some(0.5);
            let zero = Zero::new(ZeroConfig { clip_norm, ..config(Stage::Zero) }, &comm, Device::default())?;
            zero.shard(Odd::new).map(drop)
        })
        .expect_err("the configurations differ");
    let text = error.to_string();
    assert!(text.contains("rank 1") && text.contains("clip_norm = 0.5"), "{text}");
}

#[test]
fn a_rank_that_does_not_overlap_is_named() {
    let error = LocalWorld::new(common::world(2))
        .run(|comm| {
            let overlap = comm.rank().index() == 0;
            let zero = Zero::new(ZeroConfig { overlap, ..config(Stage::Three) }, &comm, Device::default())?;
            zero.shard(Odd::new).map(drop)
        })
        .expect_err("the configurations differ");
    let text = error.to_string();
    assert!(text.contains("rank 1") && text.contains("overlap = false"), "{text}");
}

#[test]
fn a_model_of_another_engine_is_refused() {
    with_engines(&config(Stage::Three), 1, |comm, zero| {
        let model = zero.shard(Odd::new)?;
        let other = Zero::new(config(Stage::One), comm, Device::default())?;
        let error = other.shard(|_| model).map(drop).expect_err("it is another engine's");
        let text = error.to_string();
        assert!(text.contains("`input.weight`") && text.contains("another engine"), "{text}");
        Ok(())
    });
}

#[test]
fn what_is_drawn_beside_parameters_is_equal_on_all_ranks() {
    use burn::tensor::Distribution;
    #[derive(Module, Debug)]
    struct WithConstant {
        layer: burn::nn::Linear,
        constant: Tensor<1>,
    }
    let constants = with_engines(&config(Stage::Three), 4, |_comm, zero| {
        let model = zero.shard(|device| WithConstant {
            layer: LinearConfig::new(2, 2).init(device),
            constant: Tensor::random([5], Distribution::Default, device),
        })?;
        Ok(model.constant.into_data().iter::<f32>().collect::<Vec<_>>())
    });
    assert!(constants.iter().all(|constant| *constant == constants[0]), "{constants:?}");
}

#[test]
fn the_function_given_to_shard_may_materialize() {
    let expected = reference();
    let models = with_engines(&config(Stage::Three), 2, |_comm, zero| {
        let model = zero.shard(|device| materialize(device, SEED, Odd::new))?;
        Ok(weights(&zero.unshard(&model)?))
    });
    assert_eq!(models, [expected.clone(), expected]);
}

#[test]
fn what_cannot_be_sharded_is_refused_with_the_reason() {
    struct Half;
    impl ModuleMapper for Half {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let value = param.val().inner().cast(burn::tensor::FloatDType::BF16);
            Param::initialized(param.id, Tensor::from_inner(value).require_grad())
        }
    }
    let refused = |build: fn(&Device) -> burn::nn::Linear| {
        LocalWorld::new(common::world(2))
            .run(|comm| Zero::new(config(Stage::Three), &comm, Device::default())?.shard(build).map(drop))
            .expect_err("it is refused")
            .to_string()
    };
    let text = refused(|device| LinearConfig::new(3, 2).init(device).map(&mut Half));
    assert!(text.contains("`weight`") && text.contains("BF16") && text.contains("f32"), "{text}");
    let text =
        refused(|device| LinearConfig::new(3, 2).init(device).apply_lora(burn::module::Lora::new(1, 1.0)));
    assert!(text.contains("reparameterization"), "{text}");
    let text =
        refused(|device| LinearConfig::new(3, 2).with_layout(burn::nn::LinearLayout::Col).init(device));
    assert!(text.contains("`weight`") && text.contains("layout"), "{text}");
    let text = refused(|device| LinearConfig::new(3, 2).init(&device.clone().inner()));
    assert!(text.contains("device"), "{text}");
}
