//! What every backend must pass.
//!
//! A backend says how it runs a closure on some ranks, its [`Harness`]; [`all`] then checks every property
//! at every world size of [`SIZES`]. Each property is a function of its own too, so that a failing one can be
//! run alone.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use zero_comm::conformance::{self, Harness};
//! use zero_comm::{CommError, Communicator, LocalWorld};
//! use zero_core::WorldSize;
//!
//! struct Threads;
//!
//! impl Harness for Threads {
//!     fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync)) {
//!         let world = LocalWorld::new(size).with_deadline(deadline);
//!         if let Err(error) = world.run(|comm| Ok::<_, CommError>(f(comm))) {
//!             panic!("{error}");
//!         }
//!     }
//! }
//!
//! conformance::collectives::broadcast_comes_from_any_root(&Threads, WorldSize::new(3).unwrap());
//! ```

pub mod collectives;
pub mod exchange;
pub mod faults;
pub mod groups;
pub mod windows;

use std::sync::Arc;
use std::time::Duration;

use zero_core::WorldSize;

use crate::Communicator;

/// Runs closures on the ranks of a backend.
pub trait Harness {
    /// Runs `f` once on each of `size` ranks of a new world whose operations have the `deadline`.
    ///
    /// A rank finishes when `f` returns, whatever errors it met.
    ///
    /// # Panics
    ///
    /// If `f` panics on any rank, preferably with that panic's message.
    fn run(&self, size: WorldSize, deadline: Duration, f: &(dyn Fn(Arc<dyn Communicator>) + Sync));
}

/// A property of a backend: a function that panics if a world of the given size does not have it.
pub type Property = fn(&dyn Harness, WorldSize);

/// The world sizes that [`all`] checks.
pub const SIZES: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// Longer than any operation takes whose ranks all come: a property that reaches it fails.
const PATIENT: Duration = Duration::from_secs(60);

/// For properties whose operations wait in vain.
const IMPATIENT: Duration = Duration::from_millis(200);

macro_rules! properties {
    ($($module:ident: $($name:ident),* $(,)?;)*) => {
        &[$($((stringify!($name), $module::$name)),*),*]
    };
}

/// Every property with its name.
pub const PROPERTIES: &[(&str, Property)] = properties! {
    collectives:
        sums_are_taken_in_rank_order,
        sixteen_bit_floats_are_rounded_once,
        one_nan_makes_a_reduction_nan,
        negative_zero_is_kept_and_is_less_than_zero,
        an_integer_sum_never_wraps,
        parts_of_a_gather_may_be_uneven,
        each_rank_gets_its_part_of_a_reduction,
        large_buffers_come_whole,
        broadcast_comes_from_any_root,
        bytes_of_unknown_number_are_broadcast,
        bytes_of_unknown_number_are_gathered,
        buffers_may_be_empty;
    exchange:
        every_rank_gets_its_part_from_every_rank,
        messages_of_a_pair_arrive_in_order,
        a_message_goes_round_a_ring,
        messages_go_both_ways_at_once,
        a_message_of_another_length_fails_both;
    groups:
        a_group_is_ordered_by_key_then_rank,
        groups_work_apart,
        a_group_can_be_split_again,
        windows_of_groups_are_apart;
    windows:
        a_read_needs_no_help,
        reads_after_a_fence_see_what_was_exposed_before,
        an_empty_window_leaves_others_alone,
        a_rank_that_drops_a_group_leaves_its_windows,
        a_finished_rank_leaves_its_windows,
        a_read_that_cannot_be_names_the_window;
    faults:
        a_rank_that_does_not_come_is_named,
        a_deadline_set_later_holds,
        two_operations_that_meet_are_both_named,
        two_labels_that_meet_are_both_named,
        two_lengths_that_meet_are_both_named,
        a_rank_that_finished_is_named_at_once,
        a_group_goes_on_without_a_rank_that_finished,
        an_abort_reaches_pending_and_later_calls,
        an_invalid_argument_keeps_nobody_waiting,
        the_mean_of_integers_is_refused;
};

/// Checks every property at every world size.
///
/// # Panics
///
/// If one does not hold; the output says which was being checked.
pub fn all(harness: &dyn Harness) {
    for size in SIZES.into_iter().filter_map(WorldSize::new) {
        for (name, property) in PROPERTIES {
            println!("{name} at world size {size}");
            property(harness, size);
        }
    }
}

/// A number that differs with rank and index, of either sign and of any magnitude between 1e-5 and 1e5.
fn noise(rank: usize, index: usize) -> f32 {
    let mut bits = (rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (index as u64);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits ^= bits >> 32;
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    let magnitude = 10_f32.powi((bits >> 1) as i32 % 6);
    sign * magnitude * ((bits >> 40) as f32 / (1 << 24) as f32)
}
