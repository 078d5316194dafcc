//! Whether the other side of a connection is still there.

use std::time::Duration;

use crate::clock::FOREVER;

/// How many beats of silence a side survives.
pub(super) const BEATS: u32 = 8;

/// Counts beats of silence, not time: if this process was stopped meanwhile, that is one beat.
#[derive(Debug, Default)]
pub(super) struct Heartbeat(u32);

impl Heartbeat {
    /// A process may be stopped for a while, by a debugger or a scheduler, and go on.
    const MIN: Duration = Duration::from_secs(10);

    /// How long the other side may be silent where operations wait for `deadline`.
    pub(super) fn silence(deadline: Duration) -> Duration {
        deadline.clamp(Self::MIN, FOREVER)
    }

    /// Something came.
    pub(super) fn heard(&mut self) {
        self.0 = 0;
    }

    /// A beat has passed; whether that was one of silence too many.
    pub(super) fn missed(&mut self) -> bool {
        self.0 += 1;
        self.0 > BEATS
    }
}
