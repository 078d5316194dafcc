//! The optimizer that a file describes.

use super::DeepSpeedVerdict;

/// The optimizer that a file describes, with the numbers that Burn's of the same name takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeepSpeedOptimizer {
    /// Adam, whose decay is added to the gradient.
    Adam(DeepSpeedAdam),
    /// Adam with decoupled decay. DeepSpeed's type `Adam` means this one unless `adam_w_mode` is false.
    AdamW(DeepSpeedAdam),
    /// Lion.
    Lion {
        /// The learning rate.
        lr: f64,
        /// The decay rates of the update and of its average.
        betas: [f64; 2],
        /// The decoupled decay.
        weight_decay: f64,
    },
    /// Adagrad.
    Adagrad {
        /// The learning rate.
        lr: f64,
        /// The decay of the learning rate by steps.
        lr_decay: f64,
        /// What is added to the denominator.
        eps: f64,
        /// The decay, which is added to the gradient.
        weight_decay: f64,
    },
    /// Stochastic gradient descent.
    Sgd {
        /// The learning rate.
        lr: f64,
        /// The momentum; 0 for none.
        momentum: f64,
        /// How much of each gradient the momentum leaves out.
        dampening: f64,
        /// Whether the momentum is Nesterov's.
        nesterov: bool,
        /// The decay, which is added to the gradient.
        weight_decay: f64,
    },
}

/// The numbers of [`Adam`](DeepSpeedOptimizer::Adam) and [`AdamW`](DeepSpeedOptimizer::AdamW).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepSpeedAdam {
    /// The learning rate.
    pub lr: f64,
    /// The decay rates of the two moments.
    pub betas: [f64; 2],
    /// What is added to the denominator.
    pub eps: f64,
    /// The decay.
    pub weight_decay: f64,
}

impl DeepSpeedOptimizer {
    /// The learning rate, which a scheduler takes over.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam(adam) | Self::AdamW(adam) => adam.lr,
            Self::Lion { lr, .. } | Self::Adagrad { lr, .. } | Self::Sgd { lr, .. } => *lr,
        }
    }

    /// The decay.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::Adam(adam) | Self::AdamW(adam) => adam.weight_decay,
            Self::Lion { weight_decay, .. }
            | Self::Adagrad { weight_decay, .. }
            | Self::Sgd { weight_decay, .. } => *weight_decay,
        }
    }
}

/// An `optimizer.type` that has a counterpart in Burn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptimizerKind {
    Adam,
    AdamW,
    Lion,
    Adagrad,
    Sgd,
}

impl OptimizerKind {
    pub(super) const NAMES: &'static [(&'static str, Self)] = &[
        ("Adam", Self::Adam),
        ("AdamW", Self::AdamW),
        ("Lion", Self::Lion),
        ("Adagrad", Self::Adagrad),
        ("SGD", Self::Sgd),
    ];
    pub(super) const ALL: &'static [Self] = &[Self::Adam, Self::AdamW, Self::Lion, Self::Adagrad, Self::Sgd];
    pub(super) const ADAMS: &'static [Self] = &[Self::Adam, Self::AdamW];
    pub(super) const WITH_BETAS: &'static [Self] = &[Self::Adam, Self::AdamW, Self::Lion];
    pub(super) const WITH_EPS: &'static [Self] = &[Self::Adam, Self::AdamW, Self::Adagrad];
    pub(super) const ADAGRAD: &'static [Self] = &[Self::Adagrad];
    pub(super) const SGD: &'static [Self] = &[Self::Sgd];
}

/// What a file says about the optimizer, with DeepSpeed's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OptimizerDraft {
    /// Whether the file has anything about it.
    pub(super) present: bool,
    pub(super) kind: Option<OptimizerKind>,
    pub(super) lr: f64,
    pub(super) betas: [f64; 2],
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    pub(super) adam_w_mode: bool,
    pub(super) torch_adam: bool,
    pub(super) lr_decay: f64,
    pub(super) momentum: f64,
    pub(super) dampening: f64,
    pub(super) nesterov: bool,
}

impl OptimizerDraft {
    pub(super) fn together(&self) -> Vec<(&'static str, DeepSpeedVerdict)> {
        let mut verdicts = Vec::new();
        if self.present && self.kind.is_none() {
            let names: Vec<_> = OptimizerKind::NAMES.iter().map(|(name, _)| *name).collect();
            let why = format!("the optimizer has no type; write one of {}", names.join(", "));
            verdicts.push(("optimizer.type", DeepSpeedVerdict::refused(why)));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let why = "needs a momentum above 0 and a dampening of 0";
            verdicts.push(("optimizer.params.nesterov", DeepSpeedVerdict::refused(why)));
        }
        verdicts
    }

    /// Whether the decay of Adam is decoupled.
    pub(super) fn is_decoupled(&self) -> bool {
        self.kind == Some(OptimizerKind::AdamW) || self.adam_w_mode
    }

    /// The optimizer that DeepSpeed would build.
    pub(super) fn build(&self) -> Option<DeepSpeedOptimizer> {
        let Self { lr, betas, eps, weight_decay, lr_decay, momentum, dampening, nesterov, .. } = *self;
        Some(match self.kind? {
            OptimizerKind::Adam | OptimizerKind::AdamW => {
                let adam = DeepSpeedAdam { lr, betas, eps, weight_decay };
                if self.is_decoupled() {
                    DeepSpeedOptimizer::AdamW(adam)
                } else {
                    DeepSpeedOptimizer::Adam(adam)
                }
            }
            OptimizerKind::Lion => DeepSpeedOptimizer::Lion { lr, betas, weight_decay },
            OptimizerKind::Adagrad => DeepSpeedOptimizer::Adagrad { lr, lr_decay, eps, weight_decay },
            OptimizerKind::Sgd => DeepSpeedOptimizer::Sgd { lr, momentum, dampening, nesterov, weight_decay },
        })
    }
}
