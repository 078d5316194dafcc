//! The values of a file, in DeepSpeed's terms.

use super::key::Rule;
use super::offload::OffloadDraft;
use super::optimizer::OptimizerDraft;
use super::scheduler::SchedulerDraft;
use super::{DeepSpeedScheduler, DeepSpeedVerdict, keys};
use crate::{Bytes, ConfigError, DType, DynamicLossScale, LossScaling, Precision, Stage, ZeroConfig};

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
    pub(super) offload: OffloadDraft,
    pub(super) fp16: bool,
    pub(super) bf16: bool,
    /// 0 for a dynamic one.
    pub(super) loss_scale: f64,
    pub(super) dynamic_scale: DynamicLossScale,
    pub(super) bf16_masters: bool,
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
    /// The learning rate that is given, for a scheduler without an optimizer.
    pub(super) given_lr: Option<f64>,
    pub(super) optimizer: OptimizerDraft,
    pub(super) scheduler: SchedulerDraft,
}

impl Default for Draft {
    /// The draft of a file without keys: every key sets its default.
    fn default() -> Self {
        let mut draft = Self {
            stage: Stage::Zero,
            overlap: None,
            bucket_elements: 0,
            prefetch_elements: 0,
            persistence_threshold: 0,
            live_elements: 0,
            reuse_elements: 0,
            offload: OffloadDraft::default(),
            fp16: false,
            bf16: false,
            loss_scale: 0.0,
            dynamic_scale: DynamicLossScale::default(),
            bf16_masters: false,
            bf16_states: false,
            parameters: None,
            reduce: None,
            accumulate: None,
            clip_norm: 0.0,
            train_batch_size: None,
            micro_batch_size: None,
            accumulation_steps: None,
            given_lr: None,
            optimizer: OptimizerDraft::default(),
            scheduler: SchedulerDraft::default(),
        };
        for key in keys::all() {
            if let Rule::Taken { set, .. } = key.rule {
                // No key refuses its default: a test sets all of them.
                let _ = set(&mut draft, &key.default());
            }
        }
        draft
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
        let DynamicLossScale { initial_scale, min_scale, .. } = self.dynamic_scale;
        if self.fp16 && self.loss_scale == 0.0 && min_scale > initial_scale {
            let why = format!("the first scale is {initial_scale}, which is less; lower it");
            refuse("fp16.min_loss_scale", why);
        }
        if self.bf16_states && !(self.bf16_masters && self.stage.shards_optimizer()) {
            let why = "DeepSpeed refuses it as well unless bf16_master_weights_and_grads is true and the stage 1, 2 \
                       or 3; set both, or write false";
            refuse("bf16.bf16_optimizer_states", why.into());
        }
        if self.bf16_masters {
            let how =
                "master weights stay f32 and take 2 bytes more per element; gradients follow `data_types`";
            verdicts.push(("bf16.bf16_master_weights_and_grads", DeepSpeedVerdict::approximated(how)));
        }
        verdicts.extend(self.offload.together(self.stage, self.compute()));
        verdicts.extend(self.optimizer.together());
        verdicts.extend(self.scheduler.together(self.optimizer_lr()));
        verdicts
    }

    /// The rate of the optimizer, that of the file or that of the program.
    pub(super) fn optimizer_lr(&self) -> Option<f64> {
        self.optimizer.build().map(|optimizer| optimizer.lr()).or(self.given_lr)
    }

    /// The learning rates, if the file has any.
    pub(super) fn scheduler(&self) -> Option<DeepSpeedScheduler> {
        self.scheduler.build(self.optimizer_lr())
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
            offload: self.offload.build(self.stage, compute),
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
        match self.loss_scale {
            0.0 => LossScaling::Dynamic(self.dynamic_scale),
            scale => LossScaling::Static { scale },
        }
    }
}
