//! Numbers in eight bits, by blocks.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::buffer::{Bound, Buffer};
use super::error::{KernelError, Role};
use super::launch::{self, Teams};
use super::table::Cut;
use super::words::{Format, get, pack, set_shared, unpack};

/// Numbers in eight bits each, on a device: a signed byte, times the scale of its block.
///
/// The scale of a block is its greatest magnitude divided by 127, in `f32`; a byte is the number divided by the scale, rounded
/// to the nearest. Four bytes lie in a word of 32 bits, the first in the lowest bits, and the bytes behind the last element are
/// 0.
///
/// # Error
///
/// A number is off by at most half its block's scale, and two units in its last place for roundings on the way: 0.4 percent of
/// the greatest magnitude in its block. Zeros stay zeros. A block whose greatest magnitude is below 2^-119, where quotients
/// overflow, becomes zeros.
///
/// A block with an infinity or NaN has the scale NaN, so that all of it becomes NaN: that something went wrong is not hidden.
#[derive(Clone, Debug)]
pub struct Quantized {
    codes: Handle,
    scales: Handle,
    len: usize,
    block: usize,
}

/// The longest block: what one cube reads should fit its cache.
const LONGEST: usize = 1 << 16;

/// The most units that work on a block: a usual one at once.
const TEAM: u32 = 64;

/// Bytes in a word.
const LANES: usize = 4;

impl Quantized {
    /// Room for `len` numbers in blocks of `block`, of which the last may be shorter. A usual block is 256.
    ///
    /// # Errors
    ///
    /// [`KernelError::Block`] if it is no multiple of 4 or longer than 65536.
    pub fn empty(client: &Client, len: usize, block: usize) -> Result<Self, KernelError> {
        check_block(block)?;
        // Devices have no memory of no bytes.
        let words = |count: usize| client.empty(count.max(1) * size_of::<u32>());
        Ok(Self { codes: words(len.div_ceil(LANES)), scales: words(len.div_ceil(block)), len, block })
    }

    /// Numbers that were quantized, by the memory they lie in: words of four bytes, and a scale for each block.
    ///
    /// # Errors
    ///
    /// [`KernelError`] if a block can't have that length, or a handle has less memory.
    pub fn from_parts(codes: Handle, scales: Handle, len: usize, block: usize) -> Result<Self, KernelError> {
        check_block(block)?;
        for (handle, words) in [(&codes, len.div_ceil(LANES)), (&scales, len.div_ceil(block))] {
            Buffer::new(handle.clone(), zero_core::DType::F32, words)?;
        }
        Ok(Self { codes, scales, len, block })
    }

    /// The bytes, four in a word of 32 bits.
    pub const fn codes(&self) -> &Handle {
        &self.codes
    }

    /// The scale of each block, in `f32`.
    pub const fn scales(&self) -> &Handle {
        &self.scales
    }

    /// How many numbers there are.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many numbers share a scale.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Both parts as kernels see them, and how many words behind their beginnings they begin.
    fn bind(&self, client: &Client, role: Role) -> Result<[Bound; 2], KernelError> {
        let bind = |handle: &Handle, words| {
            Buffer::new(handle.clone(), zero_core::DType::F32, words)?.bind(client, role)
        };
        Ok([bind(&self.codes, self.len.div_ceil(LANES))?, bind(&self.scales, self.len.div_ceil(self.block))?])
    }
}

fn check_block(block: usize) -> Result<(), KernelError> {
    match block.is_multiple_of(LANES) && (LANES..=LONGEST).contains(&block) {
        true => Ok(()),
        false => Err(KernelError::Block { block, limit: LONGEST }),
    }
}

/// Quantizes the elements of `from` that begin at `start`, as many as `to` has.
///
/// # Errors
///
/// [`KernelError`] says what does not fit; nothing has been launched then.
pub fn quantize(client: &Client, from: &Buffer, start: usize, to: &Quantized) -> Result<(), KernelError> {
    quantize_by_team(client, from, start, to, Teams::units(client, TEAM))
}

/// [`quantize`] with so many units that work on a block together, which the device decides otherwise: for tests.
#[doc(hidden)]
pub fn quantize_by_team(
    client: &Client,
    from: &Buffer,
    start: usize,
    to: &Quantized,
    team: u32,
) -> Result<(), KernelError> {
    from.check_row(Role::From, 0, start, to.len)?;
    let source = from.bind(client, Role::From)?;
    let [codes, scales] = to.bind(client, Role::To)?;
    if to.is_empty() {
        return Ok(());
    }
    let start = start + source.shift;
    let aligned = start.is_multiple_of(LANES);
    let (teams, dim) = Teams::new(client, team.min((to.block / LANES) as u32));
    let count = teams.cubes(client, to.len.div_ceil(to.block) as u64)?;
    let plan = QuantizePlan { format: source.format, block: to.block as u32, teams, aligned };
    // SAFETY: teams read elements of the row and write the words and scale of their block, for which there is room.
    unsafe {
        quantize_blocks::launch_unchecked(
            client,
            count,
            dim,
            source.format.words(LANES),
            source.vectors_argument(client, source.format.words(LANES)),
            source.argument(),
            codes.argument(),
            scales.argument(),
            start as u32,
            to.len as u32,
            codes.shift as u32,
            scales.shift as u32,
            plan,
        );
    }
    Ok(())
}

/// Sets the elements of `to` that begin at `start` to what was quantized.
///
/// # Errors
///
/// [`KernelError`] says what does not fit; nothing has been launched then.
pub fn dequantize(client: &Client, from: &Quantized, to: &Buffer, start: usize) -> Result<(), KernelError> {
    to.check_row(Role::To, 0, start, from.len)?;
    let [codes, scales] = from.bind(client, Role::From)?;
    let target = to.bind(client, Role::To)?;
    let start = start + target.shift;
    // Words hold the elements from the first on, so vectors begin there or nowhere.
    let cut = Cut::new(from.len, LANES, [start, 0]);
    let tail = (cut.tail_at(LANES), cut.tail);
    let (singles_at, singles) = if cut.vectors == 0 { (0, from.len) } else { tail };
    let plan = DequantizePlan { format: target.format, block: from.block as u32 };
    let sizes = (launch::size(client, cut.vectors as u64)?, launch::size(client, singles as u64)?);
    // SAFETY: units read the words and scales of the elements they write, which are within the buffer.
    unsafe {
        if cut.vectors > 0 {
            dequantize_vectors::launch_unchecked(
                client,
                sizes.0.0,
                sizes.0.1,
                target.format.words(LANES),
                codes.argument(),
                scales.argument(),
                target.argument(),
                (start / LANES) as u32,
                cut.vectors as u32,
                codes.shift as u32,
                scales.shift as u32,
                plan,
            );
        }
        if singles > 0 {
            dequantize_singles::launch_unchecked(
                client,
                sizes.1.0,
                sizes.1.1,
                codes.argument(),
                scales.argument(),
                target.argument(),
                start as u32,
                singles_at as u32,
                singles as u32,
                codes.shift as u32,
                scales.shift as u32,
                plan,
            );
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct QuantizePlan {
    format: Format,
    block: u32,
    teams: Teams,
    /// Whether blocks begin at vectors.
    aligned: bool,
}

/// A team quantizes a block.
#[cube(launch_unchecked)]
fn quantize_blocks<M: Size>(
    vectors: &[Vector<u32, M>],
    words: &[u32],
    codes: &mut [u32],
    scales: &mut [f32],
    start: u32,
    len: u32,
    codes_shift: u32,
    scales_shift: u32,
    #[comptime] plan: QuantizePlan,
) {
    let units = comptime!(plan.teams.units);
    let block = CUBE_POS as u32 * plan.teams.count + UNIT_POS / units;
    let unit = UNIT_POS % units;
    // A launch may have a few teams too many, of which the blocks would begin behind the end.
    let block_at = block * plan.block;
    let in_range = block < (len + comptime!(plan.block - 1)) / plan.block;
    let turns = comptime!((plan.block / 4).div_ceil(plan.teams.units));
    let mut greatest = 0u32;
    for turn in 0..turns {
        let word = unit + turn * units;
        if in_range && word < comptime!(plan.block / 4) {
            let numbers = load::<M>(vectors, words, start, block_at + 4 * word, len, plan);
            #[unroll]
            for lane in 0..LANES {
                // Of bits without a sign the greatest is that of the greatest magnitude, and NaN is above infinity.
                greatest = greatest.max(u32::reinterpret(numbers.extract(lane)) & 0x7fff_ffff);
            }
        }
    }
    if comptime!(units > 1) {
        let mut shared =
            Shared::<[u32]>::new_slice(comptime!((plan.teams.units * plan.teams.count) as usize));
        let at = UNIT_POS as usize;
        shared[at] = greatest;
        sync_cube();
        #[unroll]
        for step in 0..plan.teams.steps() {
            let half = comptime!((1u32 << plan.teams.steps()) >> (step + 1));
            // Teams need not have a power of two of units.
            if unit < half && unit + half < units {
                shared[at] = shared[at].max(shared[at + comptime!(half as usize)]);
            }
            sync_cube();
        }
        greatest = shared[at - unit as usize];
    }
    let is_finite = greatest < 0x7f80_0000;
    // Below 2^-119 what numbers are multiplied by would not be finite.
    let is_zero = greatest < 0x0400_0000;
    let magnitude = f32::reinterpret(select(is_finite && !is_zero, greatest, u32::new(0x3f80_0000)));
    let inverse = select(is_finite && !is_zero, f32::new(127.0) / magnitude, f32::new(0.0));
    for turn in 0..turns {
        let word = unit + turn * units;
        let at = block_at + 4 * word;
        if in_range && word < comptime!(plan.block / 4) && at < len {
            let numbers = load::<M>(vectors, words, start, at, len, plan);
            let mut code = 0u32;
            #[unroll]
            for lane in 0..LANES {
                // Infinity times 0 is NaN, which no integer is.
                let number = select(is_finite, numbers.extract(lane), f32::new(0.0));
                let byte = u32::reinterpret(i32::cast_from((number * inverse).round())) & 0xff;
                code |= byte << comptime!(8 * lane as u32);
            }
            codes[(codes_shift + block_at / 4 + word) as usize] = code;
        }
    }
    if in_range && unit == 0 {
        let scale = select(is_zero, f32::new(0.0), magnitude / f32::new(127.0));
        let bits = select(is_finite, u32::reinterpret(scale), u32::new(0x7fc0_0000));
        scales[(scales_shift + block) as usize] = f32::reinterpret(bits);
    }
}

/// Four elements of a row, and 0 for those behind its end.
#[cube]
fn load<M: Size>(
    vectors: &[Vector<u32, M>],
    words: &[u32],
    start: u32,
    at: u32,
    len: u32,
    #[comptime] plan: QuantizePlan,
) -> Vector<f32, Const<4>> {
    let mut numbers = Vector::<f32, Const<4>>::new(0.0);
    if comptime!(plan.aligned) && at + 4 <= len {
        numbers = unpack::<Const<4>, M>(vectors[((start + at) / 4) as usize], plan.format);
    } else {
        #[unroll]
        for lane in 0..LANES {
            let place = at + comptime!(lane as u32);
            if place < len {
                numbers.insert(lane, get(words, start + place, plan.format));
            }
        }
    }
    numbers
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct DequantizePlan {
    format: Format,
    block: u32,
}

/// A unit dequantizes a word.
#[cube(launch_unchecked)]
fn dequantize_vectors<M: Size>(
    codes: &[u32],
    scales: &[f32],
    to: &mut [Vector<u32, M>],
    start: u32,
    total: u32,
    codes_shift: u32,
    scales_shift: u32,
    #[comptime] plan: DequantizePlan,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= total {
        terminate!();
    }
    let code = codes[(codes_shift + at) as usize];
    let scale = scales[(scales_shift + at / comptime!(plan.block / 4)) as usize];
    let mut numbers = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for lane in 0..LANES {
        numbers.insert(lane, signed(code, comptime!(8 * lane as u32)) * scale);
    }
    to[(start + at) as usize] = pack::<Const<4>, M>(numbers, plan.format);
}

/// A unit dequantizes a byte.
#[cube(launch_unchecked)]
fn dequantize_singles(
    codes: &[u32],
    scales: &[f32],
    to: &[Atomic<u32>],
    start: u32,
    first: u32,
    total: u32,
    codes_shift: u32,
    scales_shift: u32,
    #[comptime] plan: DequantizePlan,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= total {
        terminate!();
    }
    let at = first + at;
    let code = codes[(codes_shift + at / 4) as usize];
    let scale = scales[(scales_shift + at / plan.block) as usize];
    set_shared(to, start + at, signed(code, (at & 3) * 8) * scale, plan.format);
}

/// The signed byte at a bit of a word.
#[cube]
fn signed(word: u32, bit: u32) -> f32 {
    f32::cast_from(i32::reinterpret(word << (24 - bit)) >> 24)
}
