//! Whether the other side of a connection is still there.

use std::time::Duration;

/// How many beats of silence a side survives.
pub(super) const BEATS: u32 = 8;

/// Counts beats of silence, not time: if this process was stopped meanwhile, that is one beat.
#[derive(Debug, Default)]
pub(super) struct Heartbeat(u32);

impl Heartbeat {
    /// A process may be stopped for a while, by a debugger or a scheduler, and go on.
    const MIN: Duration = Duration::from_secs(10);

    /// What is longer than this is as good as for ever, and fits all clocks.
    const MAX: Duration = Duration::from_secs(365 * 24 * 3600);

    /// How long the other side may be silent where operations wait for `deadline`.
    pub(super) fn silence(deadline: Duration) -> Duration {
        deadline.clamp(Self::MIN, Self::MAX)
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
