//! Which state leaves the device, and for where: by how often it moves, bandwidths and capacities.
//!
//! A step reads each byte of state and writes it again, once or (gradients) for each backward, so that a byte on a
//! tier costs `passes * (1 / read + 1 / write)` seconds; on its way it goes through the tiers above, and the slowest
//! of them counts. What lies on different tiers is updated one after the other. What does not fit on the device leaves
//! it where that costs the least: state that moves seldom first, to the host before a disk, and no more than it has to.
//! The plan is a minimum over all that an [`Offload`] can say, found by trying for each kind of state whether it may go to
//! the disk; no more of the master weights does than of the states that they are updated with.
//!
//! Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021,
//! section 4 for bandwidths that each kind of state needs.

use std::fmt;
use std::num::NonZeroU32;

use thiserror::Error;

use crate::memory::PLACES_ON_DISK;
use crate::{Bytes, Layout, MemorySetup, Offload, Placement, Rank, StateBytes, Tier};

/// The state of a rank that could leave the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Footprints {
    /// The optimizer's states, which a step reads and writes once.
    pub optimizer: Bytes,
    /// Reduced gradients, which each backward reads and writes.
    pub gradients: Bytes,
    /// Master weights, which a step reads and writes once.
    pub parameters: Bytes,
    /// How many backwards a step has.
    pub backwards: NonZeroU32,
}

impl MemorySetup {
    /// What of `rank`'s state could leave the device, for steps of this many backwards.
    ///
    /// There are no masters if layers compute in f32, and no gradients if they are reduced at the step: those stay.
    pub fn footprints(&self, layout: &Layout, rank: Rank, backwards: NonZeroU32) -> Footprints {
        let all = Placement { tier: Tier::Host, ..Placement::default() };
        let StateBytes { parameters, gradients, optimizer } = self.kept(layout, rank, |_| &all);
        Footprints { optimizer, gradients, parameters, backwards }
    }
}

/// Memory or a disk, as far as one rank may use it for its state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Medium {
    /// What is free. A disk holds half of it, for each block has two places there.
    pub capacity: Bytes,
    /// Bytes per second that this rank reads while the others of the host do, too.
    pub read: f64,
    /// The same for writing.
    pub write: f64,
}

/// Where a rank can keep state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// The memory of the device that computes.
    pub device: Medium,
    /// That of the host; `None` if the device computes in it.
    pub host: Option<Medium>,
    /// The disk.
    pub disk: Option<Medium>,
}

/// What is kept where, with [`Tier::Auto`] resolved.
///
/// Displays as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementPlan {
    /// The resolved offload: no tier in it is [`Tier::Auto`].
    pub offload: Offload,
    /// Optimizer state, gradients and master weights.
    pub kinds: [PlacedState; 3],
    /// How long an update is predicted to take, in seconds.
    pub seconds: f64,
}

/// Where one kind of state is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedState {
    /// Its table in a configuration: `optimizer`, `gradients` or `parameters`.
    pub name: &'static str,
    /// All of it.
    pub bytes: Bytes,
    /// How often a step reads and writes each byte.
    pub passes: u32,
    /// Where a part of it is kept.
    pub tier: Tier,
    /// That part, to a byte; the [fraction](Placement::fraction) of shards is rounded up to elements. The rest is on the
    /// device.
    pub kept: Bytes,
    /// The time for all of it, in seconds.
    pub seconds: f64,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Nothing moves at this speed.
    #[error(
        "the bandwidth of the tier \"{tier}\" for {direction} is {found} bytes per second; it must be finite and above 0: \
         measure again"
    )]
    Bandwidth {
        /// The tier.
        tier: Tier,
        /// Reading or writing.
        direction: &'static str,
        /// What was given.
        found: f64,
    },
    /// A tier is asked for of which nothing is known.
    #[error(
        "offload.{kind}.tier is \"nvme\", but nothing is known of a disk; measure it, or choose another tier"
    )]
    NoDisk {
        /// The kind of state.
        kind: &'static str,
    },
    /// The state does not fit.
    #[error(
        "{state} of state do not fit as configured: {device} are free on the device, {host} on the host and {disk} on the \
         disk, where state takes twice its size and {buffers} of buffers; use more ranks, a higher stage or `path` with \
         the tier \"auto\""
    )]
    NoRoom {
        /// All state that could leave the device.
        state: Bytes,
        /// What is free on the device.
        device: Bytes,
        /// What is free on the host.
        host: Bytes,
        /// What is free on the disk.
        disk: Bytes,
        /// What a disk takes of memory.
        buffers: Bytes,
    },
}

impl Offload {
    /// Chooses a tier and a fraction where the tier is [`Tier::Auto`]; others stay as they are, and take room.
    ///
    /// Equal arguments give equal plans. The disk is used only for state that is `"auto"` with a path, and only if memory
    /// does not suffice. What comes out is to be [validated](crate::ZeroConfig::validate) if `state` does not come from
    /// [`MemorySetup::footprints`].
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use zero_core::{Bytes, Footprints, Machine, Medium, Offload, Placement, Tier};
    ///
    /// let medium = |gib: u64, speed| Medium { capacity: Bytes::new(gib << 30), read: speed, write: speed };
    /// let machine = Machine { device: medium(10, 1e12), host: Some(medium(64, 2e10)), disk: Some(medium(900, 2e9)) };
    /// let [optimizer, gradients, parameters] = [16, 8, 8].map(|gib| Bytes::new(gib << 30));
    /// let state = Footprints { optimizer, gradients, parameters, backwards: NonZeroU32::new(4).unwrap() };
    ///
    /// let auto = Placement { tier: Tier::Auto, ..Placement::default() };
    /// let offload = Offload { optimizer: auto.clone(), parameters: auto.clone(), gradients: auto, ..Offload::default() };
    /// let plan = offload.resolve(&state, &machine)?;
    ///
    /// // Gradients, which move four times, stay on the device.
    /// let tiers = [plan.offload.optimizer, plan.offload.parameters, plan.offload.gradients].map(|kind| kind.tier);
    /// assert_eq!(tiers, [Tier::Host, Tier::Host, Tier::Device]);
    /// # Ok::<(), zero_core::PlacementError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A [`PlacementError`] if the state does not fit, a bandwidth is none, or a disk is asked for and there is none.
    pub fn resolve(&self, state: &Footprints, machine: &Machine) -> Result<PlacementPlan, PlacementError> {
        let choice = Choice::new(self, state, machine)?;
        // Nothing is faster on a disk than in memory.
        let best = choice.split([false; 3]).or_else(|| {
            let masks = (1..8).map(|mask| [1, 2, 4].map(|kind| mask & kind != 0));
            let splits = masks.filter_map(|on_disk| choice.split(on_disk));
            splits.min_by(|one, other| choice.seconds(one).total_cmp(&choice.seconds(other)))
        });
        let Some(split) = best else {
            let free = |medium: Option<Medium>| medium.map_or(Bytes::ZERO, |medium| medium.capacity);
            return Err(PlacementError::NoRoom {
                state: choice.kinds.iter().map(|kind| kind.bytes).sum(),
                device: machine.device.capacity,
                host: free(machine.host),
                disk: free(machine.disk),
                buffers: self.buffer_bytes,
            });
        };
        let kinds = [STATES, MASTERS, SUMS];
        let [optimizer, parameters, gradients] = kinds.map(|kind| choice.placement(kind, split[kind]));
        let [state, masters, sums] = kinds.map(|kind| choice.placed(kind, split[kind]));
        Ok(PlacementPlan {
            offload: Self { optimizer, parameters, gradients, ..self.clone() },
            kinds: [state, sums, masters],
            seconds: choice.seconds(&split),
        })
    }
}

/// Kinds of state, in the order in which they leave the device if they move equally often.
const STATES: usize = 0;
const MASTERS: usize = 1;
const SUMS: usize = 2;

/// What there is to choose from.
struct Choice<'a> {
    kinds: [Kind<'a>; 3],
    machine: &'a Machine,
    buffers: u64,
    /// Seconds to read and write a byte once, by tier: device, host, disk.
    costs: [f64; 3],
}

struct Kind<'a> {
    name: &'static str,
    placement: &'a Placement,
    bytes: Bytes,
    /// How often a step reads and writes each byte.
    passes: u32,
}

/// For each kind a tier other than the device, and how many bytes of it are there.
type Split = [(Tier, u64); 3];

impl<'a> Choice<'a> {
    fn new(offload: &'a Offload, state: &Footprints, machine: &'a Machine) -> Result<Self, PlacementError> {
        let kind = |name, placement: &'a Placement, bytes, passes| match (placement.tier, machine.disk) {
            (Tier::Nvme, None) => Err(PlacementError::NoDisk { kind: name }),
            _ => Ok(Kind { name, placement, bytes, passes }),
        };
        let kinds = [
            kind("optimizer", &offload.optimizer, state.optimizer, 1)?,
            kind("parameters", &offload.parameters, state.parameters, 1)?,
            kind("gradients", &offload.gradients, state.gradients, state.backwards.get())?,
        ];
        let cost = |tier, medium: Option<Medium>| {
            let Some(Medium { read, write, .. }) = medium else { return Ok(0.0) };
            for (direction, found) in [("reading", read), ("writing", write)] {
                if !(found.is_finite() && found > 0.0) {
                    return Err(PlacementError::Bandwidth { tier, direction, found });
                }
            }
            Ok(1.0 / read + 1.0 / write)
        };
        let device = cost(Tier::Device, Some(machine.device))?;
        let host = cost(Tier::Host, machine.host)?.max(device);
        let disk = cost(Tier::Nvme, machine.disk)?.max(host);
        Ok(Self { kinds, machine, buffers: offload.buffer_bytes.get(), costs: [device, host, disk] })
    }

    fn cost(&self, tier: Tier) -> f64 {
        let [device, host, disk] = self.costs;
        match tier {
            Tier::Device | Tier::Auto => device,
            Tier::Host => host,
            Tier::Nvme => disk,
        }
    }

    /// The cheapest split in which these kinds may be on the disk, of those that are to be chosen for; `None` if there is
    /// none.
    fn split(&self, on_disk: [bool; 3]) -> Option<Split> {
        let Machine { device, host, disk } = self.machine;
        let mut split = [(Tier::Device, 0); 3];
        for (index, Kind { placement, bytes, .. }) in self.kinds.iter().enumerate() {
            split[index] = match placement.tier {
                Tier::Auto if on_disk[index] && placement.path.is_some() && disk.is_some() => (Tier::Nvme, 0),
                _ if on_disk[index] => return None,
                Tier::Auto if host.is_none() => (Tier::Device, 0),
                Tier::Auto => (Tier::Host, 0),
                tier => {
                    let bytes = usize::try_from(bytes.get()).unwrap_or(usize::MAX);
                    (tier, placement.elements(bytes) as u64)
                }
            };
        }
        if on_disk[MASTERS] && split[STATES].0 != Tier::Nvme {
            return None;
        }

        let capacity = |medium: &Medium| medium.capacity.get();
        let mut rooms = [Some(device), host.as_ref(), disk.as_ref()].map(|medium| medium.map_or(0, capacity));
        rooms[2] /= PLACES_ON_DISK;
        let room_of = |tier| match tier {
            Tier::Nvme => 2,
            Tier::Host if host.is_some() => 1,
            _ => 0,
        };
        let mut take = |tier, bytes| {
            let room = &mut rooms[room_of(tier)];
            *room = room.checked_sub(bytes)?;
            Some(())
        };
        if split.iter().zip(on_disk).any(|((tier, kept), chosen)| chosen || *tier == Tier::Nvme && *kept > 0)
        {
            take(Tier::Host, self.buffers)?;
        }
        let (mut excess, mut movable) = (0_u128, Vec::new());
        for (index, Kind { placement, bytes, passes, .. }) in self.kinds.iter().enumerate() {
            let ((tier, kept), bytes) = (split[index], bytes.get());
            if placement.tier != Tier::Auto {
                take(tier, kept)?;
                take(Tier::Device, bytes - kept)?;
                continue;
            }
            excess += u128::from(bytes);
            if tier != Tier::Device {
                let rate = f64::from(*passes) * (self.cost(tier) - self.cost(Tier::Device));
                movable.push((rate, index));
            }
        }
        excess = excess.saturating_sub(rooms[0].into());
        // To take the cheapest first is optimal: each room bounds the sum of the kinds it is for, and no kind has two.
        movable.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        for (_, index) in movable {
            let tier = split[index].0;
            let room = &mut rooms[room_of(tier)];
            let mut most = self.kinds[index].bytes.get().min(*room);
            if (index, tier) == (MASTERS, Tier::Nvme) {
                // The states are placed: they move as often, and come first.
                most = most.min(self.most_masters(split[STATES]));
            }
            let kept = &mut split[index].1;
            *kept = u64::try_from(excess).map_or(most, |excess| excess.min(most));
            *room -= *kept;
            excess -= u128::from(*kept);
        }
        (excess == 0).then_some(split)
    }

    fn placed(&self, index: usize, (tier, kept): (Tier, u64)) -> PlacedState {
        let Kind { name, bytes, passes, .. } = self.kinds[index];
        let times = (bytes.get() - kept) as f64 * self.cost(Tier::Device) + kept as f64 * self.cost(tier);
        let tier = if kept == 0 { Tier::Device } else { tier };
        PlacedState { name, bytes, passes, tier, kept: Bytes::new(kept), seconds: f64::from(passes) * times }
    }

    fn seconds(&self, split: &Split) -> f64 {
        [0, 1, 2].map(|kind| self.placed(kind, split[kind]).seconds).iter().sum()
    }

    fn placement(&self, index: usize, (tier, kept): (Tier, u64)) -> Placement {
        let Kind { placement, .. } = &self.kinds[index];
        let path = match tier {
            _ if placement.tier != Tier::Auto => return (*placement).clone(),
            _ if kept == 0 => return Placement::default(),
            Tier::Nvme => placement.path.clone(),
            _ => None,
        };
        Placement { tier, path, fraction: self.fraction(index, kept) }
    }

    /// How much of a kind `kept` bytes are.
    fn fraction(&self, index: usize, kept: u64) -> f64 {
        (kept as f64 / self.kinds[index].bytes.get() as f64).min(1.0)
    }

    /// How many bytes of masters may be on the disk: no larger a fraction than of the states.
    fn most_masters(&self, states: (Tier, u64)) -> u64 {
        let fraction = self.placement(STATES, states).fraction_on_disk();
        let mut most = (self.kinds[MASTERS].bytes.get() as f64 * fraction) as u64;
        while most > 0 && self.fraction(MASTERS, most) > fraction {
            most -= 1;
        }
        most
    }
}

impl fmt::Display for PlacementPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "state            bytes  passes  tier    kept there  seconds")?;
        for PlacedState { name, bytes, passes, tier, kept, seconds } in &self.kinds {
            writeln!(f, "{name:10}  {bytes:>10}  {passes:>6}  {:6}  {kept:>10}  {seconds:7.3}", tier.name())?;
        }
        write!(f, "{:50}  {:7.3}", "update", self.seconds)
    }
}
