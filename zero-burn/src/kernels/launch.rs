//! How launches are sized, and how results come back.

use cubecl::bytes::Bytes;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::{CubeCountSelection, Handle};

use super::error::KernelError;

/// What one launch may have to do: it is counted in u32, and the last cubes may reach beyond it.
const MOST: u64 = 1 << 31;

/// The cubes for so many units, by what the device has.
pub(super) fn size(client: &Client, units: u64) -> Result<(CubeCount, CubeDim), KernelError> {
    check(client, units)?;
    let dim = CubeDim::new(client, units as usize);
    Ok((calculate_cube_count_elemwise(client, units as usize, dim), dim))
}

/// The cube for work that the units of a cube share.
pub(super) fn cube(client: &Client) -> CubeDim {
    CubeDim::new(client, MOST as usize)
}

/// So many cubes, or a few more.
pub(super) fn cubes(client: &Client, cubes: u64) -> Result<CubeCount, KernelError> {
    check(client, cubes)?;
    Ok(CubeCountSelection::new(client, cubes as u32).cube_count())
}

fn check(client: &Client, count: u64) -> Result<(), KernelError> {
    if count > MOST {
        let device = client.properties().identity.name.clone();
        return Err(KernelError::TooLong { len: count as usize, limit: MOST as usize, device });
    }
    Ok(())
}

/// How often each unit should take its turn, up to `most`, at so much work: what a cube has to find out before its first
/// pays for more of them, as long as there are cubes enough for all of the device.
pub(super) fn turns(client: &Client, work: usize, units: u32, most: u32) -> u32 {
    // A processor of a card holds a few cubes at once, and should not run dry at the end; cards of unknown size are large.
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(64);
    let cubes = 16 * u64::from(processors);
    (work as u64 / (cubes * u64::from(units))).clamp(1, u64::from(most)) as u32
}

/// Units that run in step: where the first of them reads, the others should read next to it.
pub(super) fn plane(client: &Client) -> u32 {
    client.properties().hardware.plane_size_max.max(1)
}

/// Where a unit takes its first turn in a row of which its cube has this part; the next are a plane further each.
///
/// So a plane goes through memory without a gap, which caches on the way expect: on a processor, twice as fast as if cubes did.
#[cube]
pub(super) fn first_turn(part: u32, turns: u32, #[comptime] plane: u32) -> u32 {
    part * turns * CUBE_DIM + UNIT_POS / plane * plane * turns + UNIT_POS % plane
}

/// Units of a cube that work together on one thing, and how a cube is cut into such teams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Teams {
    /// The units of a team.
    pub(super) units: u32,
    /// The teams of a cube.
    pub(super) count: u32,
}

impl Teams {
    /// The units of a team, at most so many, on this device.
    ///
    /// Where no card is behind the device, but a driver that computes on the processor, a unit works alone: there, waiting for
    /// others takes longer than what they would do (and Mesa's 22.3 crashes on SPIR-V with shared memory).
    pub(super) fn units(client: &Client, most: u32) -> u32 {
        if client.properties().identity.physical.is_none() { 1 } else { most }
    }

    /// Teams of so many units, or of as many as a cube has, and the cube they fill.
    pub(super) fn new(client: &Client, units: u32) -> (Self, CubeDim) {
        let cube = cube(client).num_elems();
        let units = units.clamp(1, cube);
        let teams = Self { units, count: cube / units };
        (teams, CubeDim::new_1d(teams.units * teams.count))
    }

    /// The cubes for so many teams.
    pub(super) fn cubes(self, client: &Client, teams: u64) -> Result<CubeCount, KernelError> {
        check(client, teams)?;
        cubes(client, teams.div_ceil(self.count.into()))
    }

    /// How often the units of a team must be halved until one is left.
    pub(super) const fn steps(self) -> u32 {
        self.units.next_power_of_two().ilog2()
    }
}

/// How many numbers of `f32` a unit should load at once.
pub(super) fn width(client: &Client) -> usize {
    client.io_optimized_vector_sizes(size_of::<f32>()).next().unwrap_or(1)
}

/// The bytes of `handles`.
pub(super) fn read(
    client: &Client,
    handles: Vec<Handle>,
    during: &'static str,
) -> Result<Vec<Bytes>, KernelError> {
    client.read(handles).map_err(|error| KernelError::Device {
        device: client.properties().identity.name.clone(),
        during,
        reason: error.to_string(),
    })
}
