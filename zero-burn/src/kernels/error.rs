//! Why a kernel was not launched, or what came of it.

use std::fmt;

use zero_core::DType;
use zero_offload::UpdateError;

/// What a buffer is for in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The numbers an optimizer updates.
    Values,
    /// The gradients it updates them by.
    Gradients,
    /// One of its states, counted from 0.
    State(usize),
    /// The new values in a narrower type.
    Copy,
    /// Numbers whose norm is asked for.
    Summed,
    /// Where a move or a conversion reads.
    From,
    /// Where a move or a conversion writes.
    To,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Values => f.write_str("values"),
            Self::Gradients => f.write_str("gradients"),
            Self::State(index) => write!(f, "state {index}"),
            Self::Copy => f.write_str("copy"),
            Self::Summed => f.write_str("summed buffer"),
            Self::From => f.write_str("source"),
            Self::To => f.write_str("destination"),
        }
    }
}

/// Why a kernel was not launched, or what came of it. Nothing has been written where it was not launched.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A buffer of a type that kernels don't work on at all.
    #[error("a buffer of {dtype}; kernels work on f32, bf16 and f16")]
    ElementType {
        /// Its type.
        dtype: DType,
    },

    /// A buffer of a type that it can't have for what it is.
    #[error("{role} of {dtype}; it may be of {allowed}")]
    RoleType {
        /// What the buffer is for.
        role: Role,
        /// Its type.
        dtype: DType,
        /// The types it may have, in words.
        allowed: &'static str,
    },

    /// A handle with less memory than the elements take.
    #[error("{len} elements of {dtype} in {bytes} bytes of memory; give as many elements as there are")]
    Short {
        /// Elements.
        len: usize,
        /// Their type.
        dtype: DType,
        /// The handle's bytes.
        bytes: u64,
    },

    /// A handle that doesn't begin at an element.
    #[error("a buffer of {dtype} begins at byte {offset} of its memory, which is not at an element")]
    Misplaced {
        /// Where it begins.
        offset: u64,
        /// Its type.
        dtype: DType,
    },

    /// A handle of another device.
    #[error("{role} lies on another device than the one launched on; move it there first")]
    OtherDevice {
        /// What the buffer is for.
        role: Role,
    },

    /// More elements, or vectors of them, than a kernel counts.
    #[error(
        "{len} elements or vectors in a launch on device {device}; kernels count to {limit}, so cut them"
    )]
    TooLong {
        /// How many there are.
        len: usize,
        /// How many there may be.
        limit: usize,
        /// The device.
        device: String,
    },

    /// A row that ends behind its buffer.
    #[error("row {row} is elements {start} to {start}+{len} of {role}, which has {elements}")]
    OutOfRange {
        /// Which row, counted from 0.
        row: usize,
        /// What the buffer is for.
        role: Role,
        /// Where the row begins.
        start: usize,
        /// How long it is.
        len: usize,
        /// The buffer's elements.
        elements: usize,
    },

    /// Elements that two rows would write, or one write and the other read.
    #[error("row {row} of {role} and row {other_row} of {other_role} share memory that one of them writes")]
    Overlap {
        /// One row, counted from 0.
        row: usize,
        /// What the buffer is for that it shares.
        role: Role,
        /// The other row.
        other_row: usize,
        /// What the buffer is for that it shares.
        other_role: Role,
    },

    /// Fewer buffers of states than an optimizer has states.
    #[error("row {row} needs buffers for {needed} states, and there are {given}")]
    States {
        /// Which row, counted from 0.
        row: usize,
        /// The states of its optimizer.
        needed: usize,
        /// The buffers given.
        given: usize,
    },

    /// An optimizer this crate has no kernel for.
    #[error("row {row} is updated by an optimizer that has no kernel")]
    Optimizer {
        /// Which row, counted from 0.
        row: usize,
    },

    /// A number of a row's update out of its range.
    #[error("row {row}: {source}")]
    Update {
        /// Which row, counted from 0.
        row: usize,
        /// Which number, and its range.
        source: UpdateError,
    },

    /// A factor that is not a number to multiply by.
    #[error("a factor of {factor}; it must be finite")]
    Factor {
        /// The factor.
        factor: f32,
    },

    /// Blocks of a length that can't be quantized.
    #[error("blocks of {block} elements; a block must be a multiple of 4, at least 4 and at most {limit}")]
    Block {
        /// The length asked for.
        block: usize,
        /// The longest there may be.
        limit: usize,
    },

    /// The device failed.
    #[error("device {device}, while {during}: {reason}")]
    Device {
        /// The device.
        device: String,
        /// What was done.
        during: &'static str,
        /// What it said.
        reason: String,
    },
}
