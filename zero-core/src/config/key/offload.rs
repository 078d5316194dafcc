//! Keys of `[offload]` and its tables.

use std::path::PathBuf;

use super::{Key, boolean, bytes, bytes_of, choice, float, text, text_of, unless_null, unsigned};
use crate::Tier;
use crate::config::value::Value;

pub(super) static KEYS: &[Key] = &[
    Key {
        name: "offload.buffer_bytes",
        unit: "bytes",
        what: "Memory for optimizer state and master weights on their way between disk and update, taken if any are on a \
               disk: at least three `offload.block_bytes` for each array of a parameter there, better a hundred. Gradients on a disk take as much again, but \
               no more than their largest bucket.",
        get: |config| Some(bytes_of(config.offload.buffer_bytes)),
        set: |config, value, key| {
            config.offload.buffer_bytes = bytes(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "offload.block_bytes",
        unit: "bytes",
        what: "The size of one transfer from or to a disk: a power of two from 4 KiB to 1 GiB.",
        get: |config| Some(bytes_of(config.offload.block_bytes)),
        set: |config, value, key| {
            config.offload.block_bytes = bytes(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "offload.depth",
        unit: "transfers",
        what: "How many transfers of optimizer state and master weights are in flight at once, and of gradients as many, \
               1 to 4096.",
        get: |config| Some(Value::Integer(config.offload.depth as i128)),
        set: |config, value, key| {
            config.offload.depth = unsigned(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "offload.delayed_update",
        unit: "boolean",
        what: "Whether an update runs beside the next step's forward and backward, which do not see it yet.",
        get: |config| Some(Value::Bool(config.offload.delayed_update)),
        set: |config, value, key| {
            config.offload.delayed_update = boolean(value, key)?;
            Ok(())
        },
    },
    Key {
        name: "offload.exact_steps",
        unit: "steps",
        what: "With `offload.delayed_update`, how many steps are exact at first, while gradients change fast.",
        get: |config| Some(Value::Integer(config.offload.exact_steps.into())),
        set: |config, value, key| {
            config.offload.exact_steps = unsigned(value, key)?;
            Ok(())
        },
    },
];

/// The keys of the table of one [`Placement`](crate::Placement).
macro_rules! placement {
    ($field:ident, $what:literal) => {
        &[
            Key {
                name: concat!("offload.", stringify!($field), ".tier"),
                unit: "`\"device\"`, `\"host\"`, `\"nvme\"` or `\"auto\"`",
                what: $what,
                get: |config| Some(text_of(config.offload.$field.tier.name())),
                set: |config, value, key| {
                    config.offload.$field.tier =
                        choice(value, key, &Tier::ALL.map(|tier| (tier.name(), tier)))?;
                    Ok(())
                },
            },
            Key {
                name: concat!("offload.", stringify!($field), ".path"),
                unit: "directory",
                what: "On the disk to use; `\"nvme\"` needs it. `\"auto\"` may use the disk if it is set.",
                get: |config| {
                    let path = config.offload.$field.path.as_ref();
                    path.map(|path| text_of(&path.to_string_lossy()))
                },
                set: |config, value, key| {
                    let path = unless_null(value, |value| text(value, key))?;
                    config.offload.$field.path = path.map(PathBuf::from);
                    Ok(())
                },
            },
            Key {
                name: concat!("offload.", stringify!($field), ".fraction"),
                unit: "0 to 1",
                what: "How much of each shard the tier keeps, gradients on a disk in whole buckets, if it is neither \
                       `\"device\"` nor `\"auto\"`; the rest is on the device.",
                get: |config| Some(Value::Float(config.offload.$field.fraction)),
                set: |config, value, key| {
                    config.offload.$field.fraction = float(value, key)?;
                    Ok(())
                },
            },
        ]
    };
}

pub(super) static OPTIMIZER: &[Key] = placement!(
    optimizer,
    "Where the optimizer's state is kept: in the memory of the device that computes, in that of the host, on a disk, or \
     where bandwidths and capacities are best used."
);

pub(super) static GRADIENTS: &[Key] = placement!(
    gradients,
    "Where the reduced gradients that a rank updates by are kept from backward to step. A disk needs them to be reduced \
     in every backward."
);

pub(super) static PARAMETERS: &[Key] = placement!(
    parameters,
    "Where the f32 master weights are kept, if layers compute in 16 bits; in f32 ranks read them from each other, so that \
     they stay on the device. The fraction of them on a disk is no larger than that of the optimizer's state."
);
