//! Where DeepSpeed keeps what the device has no room for.

use super::DeepSpeedVerdict;
use crate::{Bytes, DType, Offload, Placement, Stage, Tier};

pub(super) const OPTIMIZER: &str = "zero_optimization.offload_optimizer.device";
pub(super) const OPTIMIZER_PATH: &str = "zero_optimization.offload_optimizer.nvme_path";
pub(super) const PARAMETERS: &str = "zero_optimization.offload_param.device";
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

    /// Verdicts that depend on several keys, by the key that they are about.
    pub(super) fn together(&self, stage: Stage, compute: DType) -> Vec<(&'static str, DeepSpeedVerdict)> {
        let mut verdicts = Vec::new();
        let (optimizer, parameters) = (self.optimizer(stage), self.parameters(stage));

        if self.cpu_optimizer && optimizer == Tier::Device {
            verdicts.push((CPU_OPTIMIZER, DeepSpeedVerdict::without_effect("the stage is 0")));
        }
        if self.cpu_parameters && parameters == Tier::Device {
            verdicts.push((CPU_PARAMETERS, DeepSpeedVerdict::without_effect("the stage is not 3")));
        }
        if self.cpu_optimizer && self.optimizer != Tier::Device {
            verdicts.push((
                CPU_OPTIMIZER,
                DeepSpeedVerdict::refused("offload_optimizer says where it is; remove this one"),
            ));
        }
        if self.cpu_parameters && self.parameters != Tier::Device {
            verdicts.push((
                CPU_PARAMETERS,
                DeepSpeedVerdict::refused("offload_param says where they are; remove this one"),
            ));
        }

        if optimizer != Tier::Device && compute == DType::F32 {
            let key = if self.optimizer == Tier::Device { CPU_OPTIMIZER } else { OPTIMIZER };
            let how = "optimizer state and gradients are kept there; layers compute in f32, so that master weights are \
                       what ranks read from each other, and stay on the device";
            verdicts.push((key, DeepSpeedVerdict::approximated(how)));
        }
        if optimizer == Tier::Nvme && stage != Stage::Three {
            let why = "DeepSpeed has it at stage 3 alone; choose that, or write \"cpu\"";
            verdicts.push((OPTIMIZER, DeepSpeedVerdict::refused(why)));
        }
        if parameters != Tier::Device {
            let key = if self.parameters == Tier::Device { CPU_PARAMETERS } else { PARAMETERS };
            let how = match (compute, parameters) {
                (DType::F32, _) => {
                    "shards stay in the memory of the device, where ranks read them from each other"
                }
                _ if optimizer == Tier::Nvme || (optimizer, parameters) == (Tier::Host, Tier::Host) => {
                    "f32 master weights lie with the optimizer's state; shards in 16 bits stay on the device, where \
                     ranks read them from each other"
                }
                (_, Tier::Nvme) => {
                    "parameters stay in the host's memory, masters in f32 and shards in 16 bits, where ranks read them \
                     from each other; offload_optimizer with the device \"nvme\" takes the masters to a disk"
                }
                _ => {
                    "f32 master weights are kept there; shards in 16 bits stay on the device, where ranks read them \
                     from each other"
                }
            };
            verdicts.push((key, DeepSpeedVerdict::approximated(how)));
        }

        if optimizer == Tier::Nvme && self.optimizer_path.is_none() {
            let why = "is needed if the device is \"nvme\"; write the directory to use";
            verdicts.push((OPTIMIZER_PATH, DeepSpeedVerdict::refused(why)));
        }
        if optimizer == Tier::Nvme && self.depth().is_none() {
            let why = "times aio.intra_op_parallelism must be at most 4096; lower one of the two";
            verdicts.push((QUEUE_DEPTH, DeepSpeedVerdict::refused(why)));
        }
        verdicts
    }

    /// What is kept where.
    pub(super) fn build(&self, stage: Stage, compute: DType) -> Offload {
        let (tier, parameters) = (self.optimizer(stage), self.parameters(stage));
        let on_host = |fraction| Placement { tier: Tier::Host, path: None, fraction };
        let optimizer = match tier {
            Tier::Host => on_host(self.ratio),
            Tier::Nvme => {
                let path = self.optimizer_path.as_ref().map(Into::into);
                Placement { tier, path, fraction: self.ratio }
            }
            _ => Placement::default(),
        };
        let parameters = match (tier, parameters) {
            _ if compute == DType::F32 => Placement::default(),
            (Tier::Device, Tier::Device) => Placement::default(),
            // Offloaded themselves, and farther than the state.
            (Tier::Device, _) | (Tier::Host, Tier::Nvme) => on_host(1.0),
            // As in DeepSpeed, with the optimizer's state.
            _ => optimizer.clone(),
        };
        let default = Offload::default();
        let (block_bytes, depth) = match self.depth() {
            Some(depth) if tier == Tier::Nvme => (Bytes::new(self.block_bytes), depth),
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
