//! Loss scales: DeepSpeed's sequences, bounds, and what is stored of them.

use std::num::NonZeroU32;

use proptest::prelude::*;
use serde::Deserialize;
use zero_core::{AtMinScale, DynamicLossScale, LossScale, LossScaling, MinScaleReached};

/// One recorded run of DeepSpeed's `DynamicLossScaler`.
#[derive(Deserialize)]
struct Recorded {
    initial_scale: f64,
    min_scale: f64,
    window: NonZeroU32,
    hysteresis: NonZeroU32,
    consecutive_hysteresis: bool,
    /// `x` for a step with overflow, `.` for one without.
    steps: String,
    /// The scale after each step.
    scales: Vec<f64>,
}

#[test]
fn the_scale_follows_deepspeeds_step_by_step() {
    let recorded: Vec<Recorded> = serde_json::from_str(include_str!("vectors/loss_scale.json")).unwrap();
    assert_eq!(recorded.len(), 12);
    for (at, run) in recorded.into_iter().enumerate() {
        let mut scale = LossScale::new(LossScaling::Dynamic(DynamicLossScale {
            initial_scale: run.initial_scale,
            factor: 2.0,
            window: run.window,
            hysteresis: run.hysteresis,
            consecutive_hysteresis: run.consecutive_hysteresis,
            min_scale: run.min_scale,
            // As recorded, with DeepSpeed's `raise_error_at_min_scale` off.
            at_min: AtMinScale::Skip,
        }));
        assert_eq!(run.steps.len(), run.scales.len());
        let mut follow = |kind| scale.update(kind == 'x').map(|()| scale.scale());
        let scales: Result<Vec<f64>, MinScaleReached> = run.steps.chars().map(&mut follow).collect();
        assert_eq!(scales, Ok(run.scales), "run {at}");
    }
}

fn dynamic() -> DynamicLossScale {
    DynamicLossScale { initial_scale: 4.0, window: NonZeroU32::MIN, ..DynamicLossScale::default() }
}

#[test]
fn an_overflow_at_the_minimum_is_an_error_that_changes_nothing() {
    let mut scale = LossScale::new(LossScaling::Dynamic(dynamic()));
    for expected in [4.0, 2.0, 1.0] {
        scale.update(true).unwrap();
        assert_eq!(scale.scale(), expected);
    }
    let before = scale;
    let error = scale.update(true).unwrap_err();
    assert_eq!((error, scale), (MinScaleReached { scale: 1.0 }, before));
    assert!(error.to_string().contains("at the smallest loss scale, 1: either the model"), "{error}");
    scale.update(false).unwrap();
    scale.update(false).unwrap();
    assert_eq!(scale.scale(), 2.0);
}

#[test]
fn a_minimum_that_is_no_power_is_reached_exactly() {
    let policy = DynamicLossScale { min_scale: 3.0, hysteresis: NonZeroU32::MIN, ..dynamic() };
    let mut scale = LossScale::new(LossScaling::Dynamic(policy));
    scale.update(true).unwrap();
    assert_eq!(scale.scale(), 3.0);
    assert_eq!(scale.update(true), Err(MinScaleReached { scale: 3.0 }));
}

#[test]
fn a_static_scale_stays() {
    let mut scale = LossScale::new(LossScaling::Static { scale: 128.0 });
    for overflow in [true, true, false, true] {
        scale.update(overflow).unwrap();
        assert_eq!(scale, LossScale::new(LossScaling::Static { scale: 128.0 }));
    }
}

#[test]
fn growth_stops_at_the_largest_scale() {
    let mut scale = LossScale::new(LossScaling::Dynamic(dynamic()));
    for _ in 0..200 {
        scale.update(false).unwrap();
    }
    assert_eq!(scale.scale(), LossScaling::MAX);
    assert_eq!((1.0 / scale.scale()) as f32, f32::MIN_POSITIVE);
}

#[test]
fn another_policy_takes_over_the_scale_within_its_own_bounds() {
    let mut scale = LossScale::new(LossScaling::Dynamic(dynamic()));
    [true, true, false].into_iter().for_each(|overflow| scale.update(overflow).unwrap());
    assert_eq!(scale.with_scaling(scale.scaling()), scale);

    let longer = LossScaling::Dynamic(DynamicLossScale { window: NonZeroU32::MAX, ..dynamic() });
    assert_eq!((scale.with_scaling(longer).scale(), scale.with_scaling(longer).scaling()), (2.0, longer));
    let higher = DynamicLossScale { min_scale: 3.0, ..dynamic() };
    assert_eq!(scale.with_scaling(LossScaling::Dynamic(higher)).scale(), 3.0);
    let fixed = LossScaling::Static { scale: 8.0 };
    assert_eq!(scale.with_scaling(fixed), LossScale::new(fixed));
    let begun = scale.with_scaling(fixed).with_scaling(longer);
    assert_eq!(begun, LossScale::new(longer));
}

#[test]
fn a_state_that_no_updates_lead_to_is_not_read() {
    let stored = serde_json::to_value(LossScale::new(LossScaling::Dynamic(dynamic()))).unwrap();
    serde_json::from_value::<LossScale>(stored.clone()).unwrap();
    for (path, value) in [
        ("/scale", 0.5),
        ("/scale", -1.0),
        ("/scale", 1e300),
        ("/scaling/dynamic/factor", 1.0),
        ("/scaling/dynamic/min_scale", 8.0),
    ] {
        let mut damaged = stored.clone();
        *damaged.pointer_mut(path).unwrap() = value.into();
        serde_json::from_value::<LossScale>(damaged).unwrap_err();
    }
    for tolerance in [0, 3] {
        let mut damaged = stored.clone();
        damaged["tolerance"] = tolerance.into();
        let error = serde_json::from_value::<LossScale>(damaged).unwrap_err();
        assert!(error.to_string().contains("none that its policy leads to"), "{error}");
    }
}

/// A policy whose numbers are powers of two, so that every scale is exact, with its updates.
fn runs() -> impl Strategy<Value = (DynamicLossScale, Vec<bool>)> {
    let policy = (-126..=126_i32, -126..=126_i32, 1..=9_i32, 1..=6_u32, 1..=4_u32, any::<bool>()).prop_map(
        |(one, other, factor, window, hysteresis, consecutive_hysteresis)| DynamicLossScale {
            initial_scale: 2_f64.powi(one.max(other)),
            factor: 2_f64.powi(factor),
            window: NonZeroU32::new(window).unwrap(),
            hysteresis: NonZeroU32::new(hysteresis).unwrap(),
            consecutive_hysteresis,
            min_scale: 2_f64.powi(one.min(other)),
            at_min: AtMinScale::Skip,
        },
    );
    let overflows =
        (0.0..1.0).prop_flat_map(|often| prop::collection::vec(prop::bool::weighted(often), 0..400));
    (policy, overflows)
}

proptest! {
    #[test]
    fn a_scale_is_a_power_of_the_factor_away_from_where_it_began_or_was_held_up(
        (policy, overflows) in runs(),
    ) {
        let mut scale = LossScale::new(LossScaling::Dynamic(policy));
        let powers = |from: f64, scale: f64| {
            let power = (scale / from).log2() / policy.factor.log2();
            power.fract() == 0.0
        };
        let mut base = policy.initial_scale;
        for overflow in overflows {
            let before = scale.scale();
            scale.update(overflow).unwrap();
            let after = scale.scale();
            prop_assert!((policy.min_scale..=LossScaling::MAX).contains(&after));
            prop_assert!(after == before || overflow == (after < before));
            if after == policy.min_scale {
                base = policy.min_scale;
            }
            prop_assert!(powers(base, after), "{base} to {after}");
        }
    }

    #[test]
    fn any_policy_keeps_the_scale_finite_and_within_its_bounds(
        (one, other) in (LossScaling::MIN..=LossScaling::MAX, LossScaling::MIN..=LossScaling::MAX),
        factor in 1.000_001..1e38_f64,
        overflows in prop::collection::vec(any::<bool>(), 0..200),
    ) {
        let policy = DynamicLossScale {
            initial_scale: one.max(other),
            min_scale: one.min(other),
            factor,
            at_min: AtMinScale::Skip,
            ..dynamic()
        };
        let mut scale = LossScale::new(LossScaling::Dynamic(policy));
        for overflow in overflows {
            scale.update(overflow).unwrap();
            prop_assert!((policy.min_scale..=LossScaling::MAX).contains(&scale.scale()));
        }
    }

    #[test]
    fn a_scale_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(
        (policy, overflows) in runs(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut scale = LossScale::new(LossScaling::Dynamic(policy));
        let cut = cut.index(overflows.len() + 1);
        overflows[..cut].iter().for_each(|&overflow| scale.update(overflow).unwrap());
        let mut restored: LossScale =
            serde_json::from_str(&serde_json::to_string(&scale).unwrap()).unwrap();
        prop_assert_eq!(restored, scale);
        for &overflow in &overflows[cut..] {
            scale.update(overflow).unwrap();
            restored.update(overflow).unwrap();
            prop_assert_eq!(restored, scale);
        }
    }
}
