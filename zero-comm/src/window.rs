//! Memory that a rank lets the others read whenever they like.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names one window of a rank within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WindowKey(u64);

impl WindowKey {
    /// The key `value`.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for WindowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "window {}", self.0)
    }
}

/// What a window shows.
///
/// Readers hold the region for as long as they copy, so it may be replaced or withdrawn at any time: the
/// old region goes when its last reader is done.
pub trait Region: Send + Sync {
    /// The bytes to read; the same on every call.
    fn bytes(&self) -> &[u8];
}

impl Region for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}
