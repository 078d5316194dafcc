//! The learning rates that a file describes.

use std::f64::consts::PI;
use std::num::NonZeroU64;

use super::DeepSpeedVerdict;

/// The learning rates that a file describes.
///
/// Source: `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.6.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeepSpeedScheduler {
    /// Up to a rate, and on at it.
    WarmupLr {
        /// The way up.
        warmup: DeepSpeedWarmup,
        /// The first rate.
        min_lr: f64,
        /// The last rate.
        max_lr: f64,
    },
    /// Up to a rate, and back down in a line.
    WarmupDecayLr {
        /// The way up.
        warmup: DeepSpeedWarmup,
        /// The first rate, and the last.
        min_lr: f64,
        /// The highest rate.
        max_lr: f64,
        /// The step after which the rate is `min_lr` again.
        total_steps: u64,
    },
    /// Up to a rate, and down in half a cosine.
    WarmupCosineLr {
        /// The way up.
        warmup: DeepSpeedWarmup,
        /// The highest rate.
        lr: f64,
        /// What of `lr` the way up begins with.
        min_ratio: f64,
        /// What of `lr` remains in the end.
        cos_min_ratio: f64,
        /// The step at which that is reached.
        total_steps: u64,
    },
    /// Up and down once, and on at decaying rates.
    OneCycle {
        /// The rate at both ends of the cycle.
        min_lr: f64,
        /// The rate in between.
        max_lr: f64,
        /// Steps on the way up.
        first_steps: NonZeroU64,
        /// Steps on the way down.
        second_steps: u64,
        /// In how many stairs the rate goes up; 0 for none.
        first_stairs: u64,
        /// In how many stairs the rate goes down; 0 for none.
        second_stairs: u64,
        /// Steps after the cycle to which `decay_rate` belongs; 0 for no decay.
        decay_steps: u64,
        /// How the rate decays: after `n * decay_steps` it is `min_lr / (1 + n * decay_rate)`.
        decay_rate: f64,
    },
    /// Up without end, to find the rate at which training diverges.
    LrRangeTest {
        /// The first rate.
        min_lr: f64,
        /// Steps to which `step_rate` belongs.
        step_size: NonZeroU64,
        /// By how much of `min_lr` the rate grows.
        step_rate: f64,
        /// Whether it grows once in `step_size` steps, or at each.
        staircase: bool,
    },
}

/// The way up to a learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeepSpeedWarmup {
    /// Steps; fewer than 2 are 2.
    pub steps: u64,
    /// Whether the rate grows in a line, or with the logarithm of the steps.
    pub linear: bool,
}

impl DeepSpeedWarmup {
    /// The steps that it takes.
    fn steps(self) -> u64 {
        self.steps.max(2)
    }

    fn gamma(self, iteration: u64) -> Option<f64> {
        let steps = self.steps();
        if iteration >= steps {
            return None;
        }
        let (iteration, steps) = (iteration as f64, steps as f64);
        Some(if self.linear { iteration / steps } else { 1.0 / steps.ln() * (iteration + 1.0).ln() })
    }
}

impl DeepSpeedScheduler {
    /// The learning rate of an optimizer's step, counted from 0 without those skipped for an overflow.
    ///
    /// DeepSpeed sets the schedule's first rate before training and moves on after each step, so that step `n`
    /// is taken with the rate of its iteration `n - 1`.
    ///
    /// ```
    /// use zero_core::{DeepSpeedScheduler, DeepSpeedWarmup};
    ///
    /// let warmup = DeepSpeedWarmup { steps: 10, linear: true };
    /// let scheduler = DeepSpeedScheduler::WarmupDecayLr { warmup, min_lr: 0.0, max_lr: 1.0, total_steps: 20 };
    /// assert_eq!([0, 1, 6, 11, 16, 99].map(|step| scheduler.lr(step)), [0.0, 0.0, 0.5, 1.0, 0.5, 0.0]);
    /// ```
    pub fn lr(&self, step: u64) -> f64 {
        let Some(iteration) = step.checked_sub(1) else { return self.first_lr() };
        match *self {
            Self::WarmupLr { warmup, min_lr, max_lr } => {
                min_lr + (max_lr - min_lr) * warmup.gamma(iteration).unwrap_or(1.0)
            }
            Self::WarmupDecayLr { warmup, min_lr, max_lr, total_steps } => {
                let gamma = warmup.gamma(iteration).unwrap_or_else(|| {
                    let left = total_steps as f64 - iteration as f64;
                    let decay = total_steps as f64 - warmup.steps() as f64;
                    (left / decay.max(1.0)).max(0.0)
                });
                min_lr + (max_lr - min_lr) * gamma
            }
            Self::WarmupCosineLr { warmup, lr, min_ratio, cos_min_ratio, total_steps } => {
                let ratio = match warmup.gamma(iteration) {
                    Some(gamma) => min_ratio + gamma * (1.0 - min_ratio),
                    None => {
                        let done = (iteration - warmup.steps()) as f64 + 1.0;
                        let progress =
                            (done / total_steps.saturating_sub(warmup.steps()).max(1) as f64).min(1.0);
                        let cosine = (1.0 + (PI * progress).cos()) / 2.0;
                        (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                    }
                };
                lr * ratio
            }
            Self::OneCycle { min_lr, max_lr, first_steps, second_steps, decay_steps, decay_rate, .. } => {
                let total = first_steps.get() as f64 + second_steps as f64;
                if (iteration as f64) < total {
                    return min_lr + (max_lr - min_lr) * self.cycle(step as f64);
                }
                if decay_steps == 0 || decay_rate == 0.0 {
                    return min_lr;
                }
                min_lr / (1.0 + decay_rate * ((step as f64 - total) / decay_steps as f64))
            }
            Self::LrRangeTest { min_lr, step_size, step_rate, staircase } => {
                let interval = step as f64 / step_size.get() as f64;
                min_lr * (1.0 + step_rate * if staircase { interval.floor() } else { interval })
            }
        }
    }

    /// What DeepSpeed sets before training.
    fn first_lr(&self) -> f64 {
        match *self {
            Self::WarmupCosineLr { .. } => 0.0,
            Self::WarmupLr { min_lr, .. }
            | Self::WarmupDecayLr { min_lr, .. }
            | Self::OneCycle { min_lr, .. }
            | Self::LrRangeTest { min_lr, .. } => min_lr,
        }
    }

    /// How high in its cycle a step is, from 0 to 1.
    fn cycle(&self, step: f64) -> f64 {
        let Self::OneCycle { first_steps, second_steps, first_stairs, second_stairs, .. } = *self else {
            return 0.0;
        };
        let (first_steps, second_steps) = (first_steps.get() as f64, second_steps as f64);
        let total = first_steps + second_steps;
        let ratio = first_steps / total;
        let x = 1.0 + step / total - (1.0 + step / total).floor();
        let up = x <= ratio;
        let stairs = if up { first_stairs } else { second_stairs } as f64;
        if stairs == 0.0 {
            return if up { x / ratio } else { (x - 1.0) / (ratio - 1.0) };
        }
        let within = step % total;
        let position = if within <= first_steps {
            within * stairs / first_steps
        } else {
            (total - within) * stairs / second_steps
        };
        position.floor() / stairs
    }
}

/// A `scheduler.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SchedulerKind {
    WarmupLr,
    WarmupDecayLr,
    WarmupCosineLr,
    OneCycle,
    LrRangeTest,
}

impl SchedulerKind {
    pub(super) const NAMES: &'static [(&'static str, Self)] = &[
        ("WarmupLR", Self::WarmupLr),
        ("WarmupDecayLR", Self::WarmupDecayLr),
        ("WarmupCosineLR", Self::WarmupCosineLr),
        ("OneCycle", Self::OneCycle),
        ("LRRangeTest", Self::LrRangeTest),
    ];
    pub(super) const WARMUPS: &'static [Self] = &[Self::WarmupLr, Self::WarmupDecayLr, Self::WarmupCosineLr];
    pub(super) const WITH_RATES: &'static [Self] = &[Self::WarmupLr, Self::WarmupDecayLr];
    pub(super) const WITH_TOTAL: &'static [Self] = &[Self::WarmupDecayLr, Self::WarmupCosineLr];
    pub(super) const COSINE: &'static [Self] = &[Self::WarmupCosineLr];
    pub(super) const CYCLE: &'static [Self] = &[Self::OneCycle];
    pub(super) const RANGE: &'static [Self] = &[Self::LrRangeTest];
}

/// What a file says about the scheduler, with DeepSpeed's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SchedulerDraft {
    /// Whether the file has anything about it.
    pub(super) present: bool,
    pub(super) kind: Option<SchedulerKind>,
    pub(super) min_lr: f64,
    pub(super) max_lr: Option<f64>,
    pub(super) warmup_steps: u64,
    pub(super) linear: bool,
    pub(super) total_steps: Option<u64>,
    pub(super) min_ratio: f64,
    pub(super) cos_min_ratio: f64,
    pub(super) cycle_min_lr: Option<f64>,
    pub(super) cycle_max_lr: Option<f64>,
    /// Above 0.
    pub(super) first_steps: u64,
    pub(super) second_steps: Option<u64>,
    pub(super) first_stairs: u64,
    pub(super) second_stairs: Option<u64>,
    pub(super) decay_steps: u64,
    pub(super) decay_rate: f64,
    pub(super) cycle_momentum: bool,
    pub(super) range_min_lr: f64,
    /// Above 0.
    pub(super) step_size: u64,
    pub(super) step_rate: f64,
    pub(super) staircase: bool,
}

impl SchedulerDraft {
    /// The rate that a warm-up leads to.
    pub(super) fn peak_lr(&self, optimizer_lr: Option<f64>) -> Option<f64> {
        let default = match self.kind {
            Some(SchedulerKind::WarmupDecayLr) => Some(0.001),
            _ => optimizer_lr,
        };
        self.max_lr.or(default)
    }

    pub(super) fn second_steps(&self) -> u64 {
        self.second_steps.unwrap_or(self.first_steps)
    }

    pub(super) fn second_stairs(&self) -> u64 {
        self.second_stairs.unwrap_or(self.first_stairs)
    }

    pub(super) fn together(&self, optimizer_lr: Option<f64>) -> Vec<(&'static str, DeepSpeedVerdict)> {
        let mut verdicts = Vec::new();
        let mut refuse = |key, why: &str| verdicts.push((key, DeepSpeedVerdict::refused(why)));
        let Some(kind) = self.kind else {
            if self.present {
                let names: Vec<_> = SchedulerKind::NAMES.iter().map(|(name, _)| *name).collect();
                refuse(
                    "scheduler.type",
                    &format!("the scheduler has no type; write one of {}", names.join(", ")),
                );
            }
            return verdicts;
        };
        if SchedulerKind::WITH_TOTAL.contains(&kind) && self.total_steps.is_none() {
            refuse(
                "scheduler.params.total_num_steps",
                "the scheduler needs it; write the steps of the training",
            );
        }
        if kind == SchedulerKind::WarmupLr && self.peak_lr(optimizer_lr).is_none() {
            refuse(
                "scheduler.params.warmup_max_lr",
                "is the optimizer's rate, which nothing says; write it, or set `lr` of DeepSpeedGiven",
            );
        }
        if kind == SchedulerKind::WarmupCosineLr && optimizer_lr.is_none() {
            refuse(
                "optimizer.params.lr",
                "the scheduler needs it; write an optimizer with it, or set `lr` of DeepSpeedGiven",
            );
        }
        if kind == SchedulerKind::OneCycle {
            for (key, lr) in [
                ("scheduler.params.cycle_min_lr", self.cycle_min_lr),
                ("scheduler.params.cycle_max_lr", self.cycle_max_lr),
            ] {
                if lr.is_none() {
                    refuse(key, "the scheduler needs it; write a learning rate");
                }
            }
            if self.cycle_momentum {
                let how = "the learning rate cycles, the optimizer's momentum stays";
                verdicts.push(("scheduler.params.cycle_momentum", DeepSpeedVerdict::approximated(how)));
            }
        }
        verdicts
    }

    /// The scheduler; `None` also if something is missing that [`together`](Self::together) refuses.
    pub(super) fn build(&self, optimizer_lr: Option<f64>) -> Option<DeepSpeedScheduler> {
        let warmup = DeepSpeedWarmup { steps: self.warmup_steps, linear: self.linear };
        Some(match self.kind? {
            SchedulerKind::WarmupLr => DeepSpeedScheduler::WarmupLr {
                warmup,
                min_lr: self.min_lr,
                max_lr: self.peak_lr(optimizer_lr)?,
            },
            SchedulerKind::WarmupDecayLr => DeepSpeedScheduler::WarmupDecayLr {
                warmup,
                min_lr: self.min_lr,
                max_lr: self.peak_lr(optimizer_lr)?,
                total_steps: self.total_steps?,
            },
            SchedulerKind::WarmupCosineLr => DeepSpeedScheduler::WarmupCosineLr {
                warmup,
                lr: optimizer_lr?,
                min_ratio: self.min_ratio,
                cos_min_ratio: self.cos_min_ratio,
                total_steps: self.total_steps?,
            },
            SchedulerKind::OneCycle => DeepSpeedScheduler::OneCycle {
                min_lr: self.cycle_min_lr?,
                max_lr: self.cycle_max_lr?,
                first_steps: NonZeroU64::new(self.first_steps)?,
                second_steps: self.second_steps(),
                first_stairs: self.first_stairs,
                second_stairs: self.second_stairs(),
                decay_steps: self.decay_steps,
                decay_rate: self.decay_rate,
            },
            SchedulerKind::LrRangeTest => DeepSpeedScheduler::LrRangeTest {
                min_lr: self.range_min_lr,
                step_size: NonZeroU64::new(self.step_size)?,
                step_rate: self.step_rate,
                staircase: self.staircase,
            },
        })
    }
}
