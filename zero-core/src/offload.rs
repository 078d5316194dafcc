//! Where training state is kept when it is not in use.

use std::path::PathBuf;

use crate::Bytes;

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
}

impl Tier {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Nvme];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Nvme => "nvme",
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
    /// The directory of [`Tier::Nvme`], on the disk to use; ranks make directories of their own in it.
    pub path: Option<PathBuf>,
    /// How much of each shard is kept there, from 0 to 1; the rest is on the device.
    pub fraction: f64,
}

impl Default for Placement {
    fn default() -> Self {
        Self { tier: Tier::Device, path: None, fraction: 1.0 }
    }
}

impl Placement {
    /// How many of the elements of a shard are kept in the tier: the last ones.
    pub fn elements(&self, numel: usize) -> usize {
        match self.tier {
            Tier::Device => 0,
            Tier::Host | Tier::Nvme => ((numel as f64 * self.fraction).ceil() as usize).min(numel),
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
    /// The f32 master weights, where layers compute in 16 bits.
    pub parameters: Placement,
    /// Memory for what is on its way between disk and update, the most that is ever taken.
    pub buffer_bytes: Bytes,
    /// Bytes of one transfer, and of what one checksum covers: a power of two from 4 KiB to 1 GiB.
    pub block_bytes: Bytes,
    /// Transfers in flight at once.
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
