//! Parameter groups, and engines side by side.

mod common;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use common::{LR, Odd, Run, adamw, config, rows, weights, with_engines};
use zero_burn::{GroupRate, Stage, Zero, ZeroError};

fn decaying(decay: f32) -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(decay)
}

#[test]
fn a_group_has_its_own_decay_and_rate() {
    for stage in Stage::ALL {
        let runs = with_engines(&config(stage), 2, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let before = weights(&zero.unshard(&model)?);
            let mut optimizer = zero
                .optimizer(decaying(0.1).build())?
                .group("blocks.?.bias", decaying(0.0).build(), GroupRate::Times(0.0))?
                .group("input.*", decaying(0.0).build(), GroupRate::Own(0.5))?;
            zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
            optimizer.step(0.0, &mut model)?;
            let first = weights(&zero.unshard(&model)?);
            optimizer.set_rate("input.*", GroupRate::Own(0.0))?;
            optimizer.set_rate("*", GroupRate::Times(1.0))?;
            zero.backward(model.loss(rows(1, 0..4, zero.device()), 0))?;
            optimizer.step(LR, &mut model)?;
            Ok([before, first, weights(&zero.unshard(&model)?)])
        });
        for [before, first, second] in runs {
            for ((path, before), ((_, first), (_, second))) in before.iter().zip(first.iter().zip(&second)) {
                let is_input = path.starts_with("input");
                let is_group = is_input || (path.starts_with("blocks") && path.ends_with("bias"));
                let is_used = !path.starts_with("frozen") && !path.starts_with("unused") && path != "nothing";
                assert_eq!(
                    before == first,
                    !is_input,
                    "{stage}, {path}: only the group with a rate of its own moves"
                );
                assert_eq!(first == second, is_group || !is_used, "{stage}, {path}: all others move");
            }
        }
    }
}

#[test]
fn groups_of_equal_optimizers_are_one_group() {
    let train = |grouped: bool| {
        let mut runs = with_engines(&config(Stage::Three), 3, |_, zero| {
            let mut model = zero.shard(Odd::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            if grouped {
                optimizer = optimizer.group("*bias", adamw().build(), GroupRate::Times(1.0))?;
            }
            // Burn's schedules give the rate of the step.
            let mut schedule = CosineAnnealingLrSchedulerConfig::new(LR, 5).init().unwrap();
            let mut run = Run::new();
            for step in 0..4 {
                zero.backward(model.loss(rows(step, 0..4, zero.device()), 0))?;
                run.record(&optimizer.step(schedule.step(), &mut model)?);
            }
            run.weights = weights(&zero.unshard(&model)?);
            Ok(run)
        });
        runs.swap_remove(0)
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn a_group_without_parameters_is_refused() {
    with_engines(&config(Stage::Two), 1, |_, zero| {
        let mut model = zero.shard(Odd::new)?;
        let group = |pattern: &str| {
            let rate = GroupRate::Times(1.0);
            zero.optimizer(adamw().build())?.group("*bias", adamw().build(), rate)?.group(
                pattern,
                adamw().build(),
                rate,
            )
        };
        for pattern in ["*.biases", "input.bias"] {
            let error = group(pattern).unwrap_err();
            assert!(error.to_string().contains(&format!("`{pattern}`")), "{error}");
        }
        let nan = zero.optimizer(adamw().build())?.group("*", adamw().build(), GroupRate::Own(f64::NAN));
        assert!(matches!(nan, Err(ZeroError::InvalidLearningRate { .. })));
        let mut optimizer = zero.optimizer(adamw().build())?;
        assert!(matches!(
            optimizer.set_rate("*bias", GroupRate::Own(0.1)),
            Err(ZeroError::NoSuchGroup { groups, .. }) if groups == ["*"]
        ));
        zero.backward(model.loss(rows(0, 0..4, zero.device()), 0))?;
        optimizer.step(LR, &mut model)?;
        let late = optimizer.group("*", adamw().build(), GroupRate::Times(1.0));
        assert!(matches!(late, Err(ZeroError::GroupTooLate { .. })));
        Ok(())
    });
}

#[test]
fn a_teacher_and_a_student_learn_from_each_other() {
    // A teacher at stage 3 and a student at stage 1, each learning from the other.
    let outcomes = with_engines(&config(Stage::Three), 2, |comm, teacher| {
        let student = Zero::new(config(Stage::One), comm, Device::default())?;
        let mut old = teacher.shard(Odd::new)?;
        let mut young = student.shard(Odd::new)?;
        let mut guide = teacher.optimizer(adamw().build())?;
        let mut learn = student.optimizer(adamw().build())?;
        let mut losses = Vec::new();
        for step in 0..3 {
            let output = |model: &Odd, device: &Device| model.input.forward(rows(step, 0..4, device)).tanh();
            let target: Tensor<2> = output(&old.valid(), &teacher.device().clone().inner());
            let aim = Tensor::from_inner(target);
            student.backward(
                (output(&young, student.device()) - aim).square().mean()
                    + young.loss(rows(step, 0..4, student.device()), 0),
            )?;
            losses.push(learn.step(LR, &mut young)?.loss);
            teacher.backward(old.loss(rows(step, 0..4, teacher.device()), 0))?;
            losses.push(guide.step(LR, &mut old)?.loss);
        }
        Ok(losses)
    });
    assert_eq!(outcomes[0], outcomes[1]);
    // They began with the same values, so the first distance is none.
    assert_eq!(outcomes[0][0], outcomes[0][1]);
    assert!(outcomes[0].iter().all(|loss| loss.is_finite()));
}
