//! Training with Burn alone.

use anyhow::{Result, bail};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use zero_burn::{DeepSpeedOptimizer, materialize};

use crate::corpus::Corpus;
use crate::learner::{Learner, Progress, evaluate, scalar};
use crate::model::Gpt;
use crate::rows::Rows;
use crate::settings::Settings;
use crate::update::adamw;

/// Burn alone, on one device.
pub struct Plain {
    settings: Settings,
    device: Device,
    model: Gpt,
    optimizer: ModuleOptimizer,
}

impl std::fmt::Debug for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plain").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Plain {
    /// Builds the model and AdamW.
    ///
    /// # Errors
    ///
    /// For another optimizer, and for a number that Burn's cannot hold.
    pub fn new(settings: &Settings, device: Device) -> Result<Self> {
        let DeepSpeedOptimizer::AdamW(numbers) = &settings.optimizer else {
            bail!("Burn alone trains with AdamW, not with {:?}", settings.optimizer);
        };
        let optimizer = adamw(numbers)?.init();
        let device = device.autodiff();
        let model = materialize(&device, settings.zero.seed, |device| settings.build(device));
        Ok(Self { settings: settings.clone(), device, model, optimizer })
    }
}

impl Learner for Plain {
    fn step(&mut self, step: usize, corpus: &Corpus) -> Result<Progress> {
        let Settings { train, zero, .. } = &self.settings;
        let rows = corpus.training_rows(zero.seed, step, 0..train.batch);
        let (tokens, targets) = rows.tensors(&self.device);
        let loss = self.model.loss(tokens, targets);
        let value = scalar(loss.clone());
        let mut gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        let grad_norm = clip(&self.model, &mut gradients, zero.clip_norm);
        let lr = self.settings.lr(step as u64);
        self.model = self.optimizer.step(lr, self.model.clone(), gradients);
        Ok(Progress { loss: value, grad_norm, lr, engine: None })
    }

    fn evaluate(&mut self, rows: &Rows) -> Result<f64> {
        Ok(evaluate(&self.model(), rows, &self.device) / rows.len() as f64)
    }

    fn model(&self) -> Gpt {
        self.model.valid()
    }
}

/// Burn clips parameter by parameter; this clips by the norm over all of them, as the engine does.
fn clip(model: &Gpt, gradients: &mut GradientsParams, limit: Option<f64>) -> f64 {
    struct Norm<'a>(&'a GradientsParams, f64);
    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.get::<D>(param.id) {
                self.1 += scalar(gradient.square().sum());
            }
        }
    }
    struct Scale<'a>(&'a mut GradientsParams, f64);
    impl ModuleVisitor for Scale<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, gradient.mul_scalar(self.1));
            }
        }
    }
    let mut norm = Norm(gradients, 0.0);
    model.visit(&mut norm);
    let norm = norm.1.sqrt();
    if let Some(limit) = limit.filter(|&limit| norm > limit) {
        model.visit(&mut Scale(gradients, limit / norm));
    }
    norm
}
