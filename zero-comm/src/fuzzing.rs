//! What is read from other processes, for whoever fuzzes it. Not part of the API.

pub use crate::control::fuzzing::{MAX_FRAME, coordinate, listen, shake_hands};
pub use crate::process::fuzzing::read_posts;
pub use crate::tcp::fuzzing::{open_channel, read_window};
