//! Where DeepSpeed keeps what the device has no room for.

use super::DeepSpeedVerdict;
use crate::{Bytes, DType, Offload, Placement, Stage, Tier};

pub(super) const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
pub(super) const OPTIMIZER_PATH: &str = "zero_optimization.offload_optimizer.nvme_path";
pub(super) const PARAMETERS: &str = "zero_optimization.offload_param.device";
pub(super) const PARAMETERS_PATH: &str = "zero_optimization.offload_param.nvme_path";
pub(super) const CPU_OPTIMIZER: &str = "zero_optimization.cpu_offload";
pub(super) const CPU_PARAMETERS: &str = "zero_optimization.cpu_offload_param";
pub(super) const QUEUE_DEPTH: &str = "aio.queue_depth";

/// The values of a file in DeepSpeed's terms.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct OffloadDraft {
    /// As written, whatever the stage.
    pub(super) optimizer: Tier,
    pub(super) optimizer_path: Option<String>,
    pub(super) ratio: f64,
    /// As written, whatever the stage.
    pub(super) parameters: Tier,
    pub(super) parameters_path: Option<String>,
    /// The deprecated keys.
    pub(super) cpu_optimizer: bool,
    pub(super) cpu_parameters: bool,
    pub(super) block_bytes: u64,
    pub(super) queue_depth: u64,
    pub(super) threads: u64,
}

impl OffloadDraft {
    /// Where the optimizer's state is kept.
    pub(super) fn optimizer(&self, stage: Stage) -> Tier {
        match self.optimizer {
            _ if !stage.shards_optimizer() => Tier::Device,
            Tier::Device if self.cpu_optimizer => Tier::Host,
            tier => tier,
        }
    }

    /// Where parameters are kept.
    pub(super) fn parameters(&self, stage: Stage) -> Tier {
        match self.parameters {
            _ if !stage.shards_parameters() => Tier::Device,
            Tier::Device if self.cpu_parameters => Tier::Host,
            tier => tier,
        }
    }

    /// Whether anything is on a disk.
    pub(super) fn is_on_disk(&self, stage: Stage) -> bool {
        [self.optimizer(stage), self.parameters(stage)].contains(&Tier::Nvme)
    }

    /// Verdicts that depend on several keys, by the key that they are about.
    pub(super) fn together(&self, stage: Stage, compute: DType) -> Vec<(&'static str, DeepSpeedVerdict)> {
        let mut verdicts = Vec::new();
        let (optimizer, parameters) = (self.optimizer(stage), self.parameters(stage));
        let refused = |why: &str| DeepSpeedVerdict::refused(why);
        let approximated = |how: &str| DeepSpeedVerdict::Approximated { how: how.into() };

        if self.cpu_optimizer && optimizer == Tier::Device {
            verdicts.push((CPU_OPTIMIZER, DeepSpeedVerdict::without_effect("the stage is 0")));
        }
        if self.cpu_parameters && parameters == Tier::Device {
            verdicts.push((CPU_PARAMETERS, DeepSpeedVerdict::without_effect("the stage is not 3")));
        }
        if self.cpu_optimizer && self.optimizer != Tier::Device {
            verdicts.push((CPU_OPTIMIZER, refused("offload_optimizer says where it is; remove this one")));
        }
        if self.cpu_parameters && self.parameters != Tier::Device {
            verdicts.push((CPU_PARAMETERS, refused("offload_param says where they are; remove this one")));
        }

        if optimizer != Tier::Device && compute == DType::F32 {
            let key = if self.optimizer == Tier::Device { CPU_OPTIMIZER } else { OPTIMIZER };
            let how = "optimizer state and gradients are kept there; layers compute in f32, so that master weights are \
                       what ranks read from each other, and stay on the device";
            verdicts.push((key, approximated(how)));
        }
        if optimizer == Tier::Nvme && stage != Stage::Three {
            let why = "DeepSpeed has it at stage 3 alone; choose that, or write \"cpu\"";
            verdicts.push((OPTIMIZER, refused(why)));
        }
        if parameters != Tier::Device {
            let key = if self.parameters == Tier::Device { CPU_PARAMETERS } else { PARAMETERS };
            verdicts.push((
                key,
                match compute {
                    DType::F32 => refused(
                        "layers compute in f32, and the shards that ranks read from each other are the masters \
                         themselves; enable bf16 or fp16, or write \"none\"",
                    ),
                    _ if farther(optimizer, parameters) == optimizer => approximated(
                        "f32 master weights lie with the optimizer's state; shards in 16 bits stay on the device, where \
                         ranks read them from each other",
                    ),
                    _ => approximated(
                        "f32 master weights are kept there; shards in 16 bits stay on the device, where ranks read them \
                         from each other",
                    ),
                },
            ));
        }

        const NO_PATH: &str = "is needed if the device is \"nvme\"; write the directory to use";
        if optimizer == Tier::Nvme && self.optimizer_path.is_none() {
            verdicts.push((OPTIMIZER_PATH, refused(NO_PATH)));
        }
        if parameters == Tier::Nvme && self.parameters_path.is_none() {
            verdicts.push((PARAMETERS_PATH, refused(NO_PATH)));
        }
        let paths = (&self.optimizer_path, &self.parameters_path);
        if let (Tier::Nvme, Tier::Nvme, (Some(path), Some(other))) = (optimizer, parameters, paths) {
            if path != other {
                let why = "master weights lie with the optimizer's state";
                verdicts.push((PARAMETERS_PATH, DeepSpeedVerdict::without_effect(why)));
            }
        }
        if self.is_on_disk(stage) && self.depth().is_none() {
            let why = "times aio.intra_op_parallelism must be at most 4096; lower one of the two";
            verdicts.push((QUEUE_DEPTH, refused(why)));
        }
        verdicts
    }

    /// What is kept where.
    pub(super) fn build(&self, stage: Stage, compute: DType) -> Offload {
        let placement = |tier, path: &Option<String>, fraction| match tier {
            Tier::Host => Placement { tier, path: None, fraction },
            Tier::Nvme => Placement { tier, path: path.as_ref().map(Into::into), fraction },
            _ => Placement::default(),
        };
        let (tier, parameters) = (self.optimizer(stage), self.parameters(stage));
        let optimizer = placement(tier, &self.optimizer_path, self.ratio);
        let parameters = match compute {
            DType::F32 => Placement::default(),
            // DeepSpeed has master weights with the optimizer's state.
            _ if farther(tier, parameters) == tier => optimizer.clone(),
            _ => placement(parameters, &self.parameters_path, 1.0),
        };
        let default = Offload::default();
        let (block_bytes, depth) = match self.depth() {
            Some(depth) if self.is_on_disk(stage) => (Bytes::new(self.block_bytes), depth),
            _ => (default.block_bytes, default.depth),
        };
        Offload { gradients: optimizer.clone(), optimizer, parameters, block_bytes, depth, ..default }
    }

    /// Transfers of all threads, if a configuration can hold so many.
    fn depth(&self) -> Option<usize> {
        let depth = self.queue_depth.checked_mul(self.threads).filter(|depth| *depth <= 4096)?;
        usize::try_from(depth).ok()
    }
}

/// The one of two tiers that is farther from the device, the first of equal ones.
fn farther(one: Tier, other: Tier) -> Tier {
    match (one, other) {
        (Tier::Device, _) | (Tier::Host, Tier::Nvme) => other,
        _ => one,
    }
}
