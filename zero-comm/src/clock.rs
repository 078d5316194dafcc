//! Time that can be replaced.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// What is as good as for ever, and fits all clocks: a year.
pub(crate) const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a decorator takes for time: the system's, or a simulated one.
pub trait Clock: Send + Sync + Debug {
    /// The time since some fixed moment.
    fn now(&self) -> Duration;

    /// Returns when [`now`](Self::now) is `moment` or later, and does not use the CPU meanwhile.
    fn sleep_until(&self, moment: Duration);
}

/// Real time since its making.
#[derive(Debug)]
pub(crate) struct SystemClock(Instant);

impl SystemClock {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, moment: Duration) {
        let left = moment.saturating_sub(self.now());
        if !left.is_zero() {
            thread::sleep(left);
        }
    }
}
