//! Learning rates: the numbers of DeepSpeed's own schedulers.

use serde_json::{Value, json};
use zero_core::{DeepSpeedGiven, DeepSpeedScheduler, DeepSpeedWarmup, WorldSize, ZeroConfig};

#[derive(serde::Deserialize)]
struct Schedules {
    schedules: Vec<Schedule>,
}

#[derive(serde::Deserialize)]
struct Schedule {
    r#type: String,
    params: Value,
    optimizer_lr: f64,
    lr: Vec<f64>,
}

#[test]
fn rates_are_those_of_deepspeed() {
    let Schedules { schedules } =
        serde_json::from_str(include_str!("vectors/deepspeed_schedules.json")).unwrap();
    assert_eq!(schedules.len(), 14);
    for Schedule { r#type, params, optimizer_lr, lr } in schedules {
        assert_eq!(lr.len(), 40);
        let text = json!({
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": optimizer_lr}},
            "scheduler": {"type": r#type, "params": params},
        });
        let import =
            ZeroConfig::from_deepspeed(&text.to_string(), &DeepSpeedGiven::new(WorldSize::ONE)).unwrap();
        let scheduler = import.scheduler.unwrap();
        for (step, expected) in lr.into_iter().enumerate() {
            let found = scheduler.lr(step as u64);
            // Logarithms and cosines are a library's, which may differ in the last bit.
            let near = (found - expected).abs() <= 4.0 * f64::EPSILON * expected.abs();
            assert!(near, "{type} {params}, step {step}: {found} is not {expected}", type = r#type);
        }
    }
}

#[test]
fn a_decay_ends_at_its_lowest_rate_after_the_last_step() {
    for steps in [0, 1, 2] {
        let warmup = DeepSpeedWarmup { steps, linear: true };
        let decay = DeepSpeedScheduler::WarmupDecayLr { warmup, min_lr: 0.5, max_lr: 1.0, total_steps: 10 };
        assert_eq!([2, 3, 11, 12].map(|step| decay.lr(step)), [0.75, 1.0, 0.5, 0.5], "{steps}");
        assert!(decay.lr(10) > 0.5);
    }
}

#[test]
fn the_last_step_there_is_has_a_rate() {
    for text in [
        r#"{"type": "WarmupDecayLR", "params": {"total_num_steps": 9223372036854775807}}"#,
        r#"{"type": "WarmupCosineLR", "params": {"total_num_steps": 1}}"#,
        r#"{"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_step_size": 1, "decay_lr_rate": 1}}"#,
        r#"{"type": "LRRangeTest", "params": {"lr_range_test_staircase": true}}"#,
    ] {
        let text = format!(r#"{{"train_batch_size": 1, "scheduler": {text}}}"#);
        let given = DeepSpeedGiven { lr: Some(1e-3), ..DeepSpeedGiven::new(WorldSize::ONE) };
        let scheduler = ZeroConfig::from_deepspeed(&text, &given).unwrap().scheduler.unwrap();
        assert!(scheduler.lr(u64::MAX).is_finite(), "{text}");
    }
}
