//! How to wait for what can only be asked for: MPI has no wait that ends at a deadline.

use std::time::Duration;
use std::{hint, thread};

/// How often to ask again at once: what comes next is often nearly there.
const SPINS: u32 = 32;

/// How often to ask before sleeping.
const YIELDS: u32 = 256;

/// The first sleep; each is twice as long as the one before.
const SHORTEST: Duration = Duration::from_micros(20);

/// The longest sleep, and so how late a message may be noticed.
const LONGEST: Duration = Duration::from_micros(500);

/// Pauses that grow while nothing happens.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// How many pauses were made.
    pauses: u32,
}

impl Backoff {
    /// Something has happened.
    pub(super) fn reset(&mut self) {
        self.pauses = 0;
    }

    /// Nothing has happened: waits a little, or until the thread is unparked.
    pub(super) fn pause(&mut self) {
        match self.pauses {
            0..SPINS => hint::spin_loop(),
            SPINS..YIELDS => thread::yield_now(),
            pauses => thread::park_timeout((SHORTEST * (1 << (pauses - YIELDS).min(8))).min(LONGEST)),
        }
        self.pauses = self.pauses.saturating_add(1);
    }
}
