//! Where training state is kept when it is not in use.

use std::path::PathBuf;

use crate::{Bytes, ConfigError, DType, ReduceGradients, ZeroConfig};

/// Where a part of the training state is kept when it is not in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tier {
    /// In the memory of the device that computes.
    #[default]
    Device,
    /// In the memory of the host.
    Host,
    /// On a fast disk.
    Nvme,
    /// Where bandwidths and capacities are best used: [`Offload::resolve`] says where that is, before anything is kept.
    Auto,
}

impl Tier {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Nvme, Self::Auto];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Nvme => "nvme",
            Self::Auto => "auto",
        }
    }
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where one kind of state is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The tier.
    pub tier: Tier,
    /// The directory of [`Tier::Nvme`], on the disk to use; ranks make directories of their own in it. With
    /// [`Tier::Auto`], the disk may be used if it is set.
    pub path: Option<PathBuf>,
    /// How much of each shard is kept there, from 0 to 1; the rest is on the device. Of gradients, a disk gets whole
    /// buckets, until they are so much or more.
    pub fraction: f64,
}

impl Default for Placement {
    fn default() -> Self {
        Self { tier: Tier::Device, path: None, fraction: 1.0 }
    }
}

impl Placement {
    /// How many of the elements of a shard are kept in the tier: the last ones. None before [`Tier::Auto`] is
    /// resolved.
    pub fn elements(&self, numel: usize) -> usize {
        match self.tier {
            Tier::Device | Tier::Auto => 0,
            // Beyond 2^53 elements the product would not be all of them.
            Tier::Host | Tier::Nvme if self.fraction >= 1.0 => numel,
            Tier::Host | Tier::Nvme => ((numel as f64 * self.fraction).ceil() as usize).min(numel),
        }
    }

    /// How much of each shard is on a disk.
    pub(crate) fn fraction_on_disk(&self) -> f64 {
        if self.tier == Tier::Nvme { self.fraction } else { 0.0 }
    }

    fn validate(&self, path_key: &'static str, fraction_key: &'static str) -> Result<(), ConfigError> {
        match (&self.path, self.tier) {
            (None, Tier::Nvme) => {
                return Err(ConfigError::Missing {
                    key: path_key,
                    because: "the tier is \"nvme\"",
                    example: "path = \"/nvme\", a directory on the disk to use",
                });
            }
            (Some(_), Tier::Device | Tier::Host) => {
                let needs = "a tier of \"nvme\" or \"auto\"";
                return Err(ConfigError::KeyNeeds { key: path_key, needs });
            }
            // A file could not say it.
            (Some(path), _) if path.to_str().is_none_or(str::is_empty) => {
                let (found, allowed) = (format!("{path:?}"), "the name of a directory, in UTF-8");
                return Err(ConfigError::OutOfRange { key: path_key, found, allowed });
            }
            _ => {}
        }
        if !(0.0..=1.0).contains(&self.fraction) {
            let (found, allowed) = (self.fraction.to_string(), "from 0 to 1");
            return Err(ConfigError::OutOfRange { key: fraction_key, found, allowed });
        }
        match self.tier {
            Tier::Device | Tier::Auto if self.fraction != 1.0 => {
                let needs = "a tier of \"host\" or \"nvme\"";
                Err(ConfigError::KeyNeeds { key: fraction_key, needs })
            }
            _ => Ok(()),
        }
    }
}

/// What is kept where, and how it moves.
#[derive(Clone, Debug, PartialEq)]
pub struct Offload {
    /// The optimizer's states.
    pub optimizer: Placement,
    /// The reduced gradients that this rank updates by, from backward to step.
    pub gradients: Placement,
    /// The f32 master weights, where layers compute in 16 bits. On a disk they lie beside the states that they are updated
    /// with, so that the fraction of them there is no larger than that of those.
    pub parameters: Placement,
    /// Memory for optimizer state and master weights on their way between disk and update. Gradients on a disk take as
    /// much again, but no more than their largest bucket, and one block at least.
    pub buffer_bytes: Bytes,
    /// Bytes of one transfer, and of what one checksum covers: a power of two from 4 KiB to 1 GiB.
    pub block_bytes: Bytes,
    /// Transfers of optimizer state and master weights in flight at once, and of gradients as many.
    pub depth: usize,
    /// Whether an update runs beside the next step's forward and backward, which do not see it yet.
    ///
    /// Ren and others, ZeRO-Offload, 2021.
    pub delayed_update: bool,
    /// With [`delayed_update`](Self::delayed_update), how many steps are exact at first, while gradients change fast.
    pub exact_steps: u64,
}

impl Default for Offload {
    fn default() -> Self {
        Self {
            optimizer: Placement::default(),
            gradients: Placement::default(),
            parameters: Placement::default(),
            buffer_bytes: Bytes::new(256 << 20),
            block_bytes: Bytes::new(1 << 20),
            depth: 32,
            delayed_update: false,
            exact_steps: 40,
        }
    }
}

impl Offload {
    /// How many blocks the buffers hold at least: one that is read, one that is updated, one that is written.
    const LEAST_BLOCKS: u64 = 3;

    /// Whether it can work, as the offload of `config`.
    pub(crate) fn validate(&self, config: &ZeroConfig) -> Result<(), ConfigError> {
        let out_of_range = |key, found, allowed| Err(ConfigError::OutOfRange { key, found, allowed });
        let block = self.block_bytes.get();
        if !(block.is_power_of_two() && (4 << 10..=1 << 30).contains(&block)) {
            let allowed = "a power of two from 4096 to 1073741824";
            return out_of_range("offload.block_bytes", block.to_string(), allowed);
        }
        if self.buffer_bytes.get() < Self::LEAST_BLOCKS * block {
            return Err(ConfigError::OffloadBuffers { buffers: self.buffer_bytes, block: self.block_bytes });
        }
        if !(1..=4096).contains(&self.depth) {
            return out_of_range("offload.depth", self.depth.to_string(), "at least 1 and at most 4096");
        }
        self.optimizer.validate("offload.optimizer.path", "offload.optimizer.fraction")?;
        self.gradients.validate("offload.gradients.path", "offload.gradients.fraction")?;
        self.parameters.validate("offload.parameters.path", "offload.parameters.fraction")?;
        match self.parameters.tier {
            Tier::Host | Tier::Nvme if config.precision.compute == DType::F32 => {
                return Err(ConfigError::OffloadedShards { tier: self.parameters.tier });
            }
            Tier::Nvme if self.parameters.fraction > self.optimizer.fraction_on_disk() => {
                return Err(ConfigError::MastersBeyondStates);
            }
            _ => {}
        }
        match self.gradients.tier {
            Tier::Nvme if config.reduce_gradients() == ReduceGradients::AtStep => {
                Err(ConfigError::OffloadedAtStep)
            }
            _ => Ok(()),
        }
    }
}
