//! The values of a file, in DeepSpeed's terms.

use std::num::NonZeroU32;

use super::DeepSpeedVerdict;
use super::optimizer::OptimizerDraft;
use super::scheduler::SchedulerDraft;
use crate::{
    AtMinScale, Bytes, ConfigError, DType, DynamicLossScale, LossScaling, Precision, Stage, ZeroConfig,
};

/// The values of a file in DeepSpeed's terms, with DeepSpeed's defaults for what it does not say.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Draft {
    pub(super) stage: Stage,
    /// `None`: at stage 3.
    pub(super) overlap: Option<bool>,
    pub(super) bucket_elements: u64,
    pub(super) prefetch_elements: u64,
    pub(super) persistence_threshold: u64,
    pub(super) live_elements: u64,
    pub(super) reuse_elements: u64,
    pub(super) fp16: bool,
    pub(super) bf16: bool,
    /// 0 for a dynamic one.
    pub(super) loss_scale: f64,
    pub(super) initial_scale_power: i32,
    pub(super) window: NonZeroU32,
    pub(super) hysteresis: NonZeroU32,
    pub(super) consecutive_hysteresis: bool,
    pub(super) min_scale: f64,
    pub(super) bf16_states: bool,
    pub(super) parameters: Option<DType>,
    pub(super) reduce: Option<DType>,
    /// `None`: what layers compute in.
    pub(super) accumulate: Option<DType>,
    /// 0 for none.
    pub(super) clip_norm: f64,
    pub(super) train_batch_size: Option<usize>,
    pub(super) micro_batch_size: Option<usize>,
    pub(super) accumulation_steps: Option<usize>,
    pub(super) optimizer: OptimizerDraft,
    pub(super) scheduler: SchedulerDraft,
}

impl Default for Draft {
    fn default() -> Self {
        let scale = DynamicLossScale::default();
        Self {
            stage: Stage::Zero,
            overlap: None,
            bucket_elements: 500_000_000,
            prefetch_elements: 50_000_000,
            persistence_threshold: 100_000,
            live_elements: 1_000_000_000,
            reuse_elements: 1_000_000_000,
            fp16: false,
            bf16: false,
            loss_scale: 0.0,
            initial_scale_power: 16,
            window: scale.window,
            hysteresis: scale.hysteresis,
            consecutive_hysteresis: scale.consecutive_hysteresis,
            min_scale: scale.min_scale,
            bf16_states: false,
            parameters: None,
            reduce: None,
            accumulate: None,
            clip_norm: 1.0,
            train_batch_size: None,
            micro_batch_size: None,
            accumulation_steps: None,
            optimizer: OptimizerDraft::default(),
            scheduler: SchedulerDraft::default(),
        }
    }
}

impl Draft {
    /// What layers compute in.
    pub(super) fn compute(&self) -> DType {
        match (self.fp16, self.bf16) {
            (true, _) => DType::F16,
            (false, true) => DType::BF16,
            (false, false) => DType::F32,
        }
    }

    /// Verdicts that depend on several keys, by the key that they are about.
    pub(super) fn together(&self) -> Vec<(&'static str, DeepSpeedVerdict)> {
        let mut verdicts = Vec::new();
        let mut refuse = |key, why: String| verdicts.push((key, DeepSpeedVerdict::refused(why)));
        if self.fp16 && self.bf16 {
            refuse("bf16.enabled", "`fp16.enabled` is true too; choose one of them".into());
        }
        if let Some(dtype) = self.parameters.filter(|dtype| *dtype != self.compute()) {
            let compute = self.compute();
            refuse(
                "data_types.param_dtype",
                format!("layers compute in {compute}, not in {dtype}; enable what fits, or remove it"),
            );
        }
        let initial = f64::from(self.initial_scale_power).exp2();
        if self.fp16 && self.loss_scale == 0.0 && self.min_scale > initial {
            refuse("fp16.min_loss_scale", format!("the first scale is {initial}, which is less; lower it"));
        }
        verdicts.extend(self.optimizer.together());
        verdicts.extend(self.scheduler.together());
        verdicts
    }

    /// The configuration that trains as the values ask for.
    pub(super) fn config(&self) -> Result<ZeroConfig, ConfigError> {
        let compute = self.compute();
        // More bytes than a configuration can hold are no limit either way.
        let bytes = |elements: u64, dtype: DType| {
            Bytes::new(elements.saturating_mul(dtype.size() as u64).min(i64::MAX as u64))
        };
        let default = ZeroConfig::default();
        let mut config = ZeroConfig {
            stage: self.stage,
            bucket_bytes: bytes(self.bucket_elements, DType::F32),
            overlap: self.overlap.unwrap_or(self.stage == Stage::Three),
            clip_norm: Some(self.clip_norm).filter(|norm| *norm > 0.0),
            precision: Precision {
                compute,
                reduce: self.reduce,
                accumulate: self.accumulate.unwrap_or(compute),
                optimizer_state: if self.bf16_states { DType::BF16 } else { DType::F32 },
            },
            loss_scale: self.fp16.then(|| self.loss_scaling()),
            ..default
        };
        if self.stage.shards_parameters() {
            config.persistence_threshold = usize::try_from(self.persistence_threshold).unwrap_or(usize::MAX);
            config.lookahead_bytes = bytes(self.prefetch_elements, compute);
            config.live_bytes = Some(bytes(self.live_elements, compute));
            config.reuse_bytes = bytes(self.reuse_elements, compute);
        }
        config.validate()?;
        Ok(config)
    }

    fn loss_scaling(&self) -> LossScaling {
        if self.loss_scale > 0.0 {
            return LossScaling::Static { scale: self.loss_scale };
        }
        LossScaling::Dynamic(DynamicLossScale {
            initial_scale: f64::from(self.initial_scale_power).exp2(),
            factor: 2.0,
            window: self.window,
            hysteresis: self.hysteresis,
            consecutive_hysteresis: self.consecutive_hysteresis,
            min_scale: self.min_scale,
            at_min: AtMinScale::Error,
        })
    }
}
