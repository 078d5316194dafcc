//! Batch plans: what follows from what, and what does not fit.

use proptest::prelude::*;
use serde_json::json;
use zero_core::{
    BatchError, BatchPlan, DeepSpeedError, DeepSpeedGiven, DeepSpeedSource, WorldSize, ZeroConfig,
};

#[test]
fn batch_sizes_follow_from_each_other() {
    let world = WorldSize::new(4).unwrap();
    let plan = |train, micro, steps| BatchPlan::new(train, micro, steps, world);
    let expected = BatchPlan { train_batch_size: 24, micro_batch_size_per_rank: 2, accumulation_steps: 3 };
    for (train, micro, steps) in [
        (Some(24), Some(2), Some(3)),
        (Some(24), Some(2), None),
        (Some(24), None, Some(3)),
        (None, Some(2), Some(3)),
    ] {
        assert_eq!(plan(train, micro, steps), Ok(expected));
    }
    let single = BatchPlan { accumulation_steps: 1, train_batch_size: 8, ..expected };
    assert_eq!((plan(Some(8), None, None), plan(None, Some(2), None)), (Ok(single), Ok(single)));

    assert_eq!(
        plan(Some(25), Some(2), Some(3)).unwrap_err().to_string(),
        "train_batch_size is 25, but 2 samples per rank and backward, 3 backwards and 4 ranks make 24; change one \
         of them, or leave one out"
    );
    assert!(matches!(plan(Some(25), None, Some(3)), Err(BatchError::Mismatch { samples: 24, .. })));
    assert!(matches!(plan(Some(3), None, None), Err(BatchError::TooSmall { least: 4, .. })));
    assert!(matches!(plan(Some(7), Some(2), None), Err(BatchError::TooSmall { least: 8, .. })));
    assert!(matches!(plan(None, Some(usize::MAX), None), Err(BatchError::TooLarge { .. })));
    assert!(matches!(plan(None, None, Some(2)), Err(BatchError::Unknown)));
    for key in ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"] {
        let mut file = json!({"train_micro_batch_size_per_gpu": 1});
        file[key] = json!(0);
        assert_eq!(
            ZeroConfig::from_deepspeed(&file.to_string(), &DeepSpeedGiven::new(world))
                .unwrap_err()
                .to_string(),
            format!("the DeepSpeed configuration cannot be followed:\n  `{key}` = 0: must be at least 1")
        );
    }
}

#[test]
fn a_batch_that_does_not_fit_is_told_with_all_else() {
    let file = json!({"train_batch_size": 7, "stage": 3});
    let given = DeepSpeedGiven::new(WorldSize::new(4).unwrap());
    let error = ZeroConfig::from_deepspeed(&file.to_string(), &given).unwrap_err();
    let message = error.to_string();
    assert_eq!(message.lines().count(), 3, "{message}");
    assert!(message.contains("`train_batch_size` = 7: train_batch_size is 7, but 1 samples"), "{message}");
    assert!(matches!(error, DeepSpeedError::Refused { batch: Some(BatchError::Mismatch { .. }), .. }));

    // A key that is refused itself is not told twice.
    let file = json!({"train_batch_size": [7]});
    let error = ZeroConfig::from_deepspeed(&file.to_string(), &given).unwrap_err();
    assert_eq!(error.to_string().lines().count(), 2, "{error}");
    assert!(matches!(error, DeepSpeedError::Refused { batch: None, .. }));
}

#[test]
fn a_key_left_open_and_not_given_follows_as_a_missing_one_does() {
    let world = WorldSize::new(4).unwrap();
    let read = |given: DeepSpeedGiven| {
        let file = json!({
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": "auto"
        });
        ZeroConfig::from_deepspeed(&file.to_string(), &given)
    };
    let import = read(DeepSpeedGiven { accumulation_steps: Some(3), ..DeepSpeedGiven::new(world) }).unwrap();
    let expected = BatchPlan { train_batch_size: 24, micro_batch_size_per_rank: 2, accumulation_steps: 3 };
    assert_eq!(import.batch, expected);
    let entry = |key| {
        let entry = import.report.find(key).unwrap();
        (entry.value.as_str(), entry.source)
    };
    assert_eq!(entry("train_batch_size"), ("24", DeepSpeedSource::Default));
    assert_eq!(entry("gradient_accumulation_steps"), ("3", DeepSpeedSource::Given("accumulation_steps")));
    let plan = read(DeepSpeedGiven::new(world)).unwrap().batch;
    assert_eq!((plan.train_batch_size, plan.accumulation_steps), (8, 1));
}

proptest! {
    #[test]
    fn sizes_that_are_planned_multiply(
        train in prop::option::of(1_usize..5000), micro in prop::option::of(1_usize..50),
        steps in prop::option::of(1_usize..50), ranks in 1_usize..20,
    ) {
        let world = WorldSize::new(ranks).unwrap();
        if let Ok(plan) = BatchPlan::new(train, micro, steps, world) {
            let product = plan.micro_batch_size_per_rank * plan.accumulation_steps * ranks;
            prop_assert_eq!(plan.train_batch_size, product);
            prop_assert!(train.is_none_or(|train| train == plan.train_batch_size));
            prop_assert!(micro.is_none_or(|micro| micro == plan.micro_batch_size_per_rank));
            prop_assert!(steps.is_none_or(|steps| steps == plan.accumulation_steps));
        }
    }
}
