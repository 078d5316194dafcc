//! A clock that only sleepers move.

use std::sync::Mutex;
use std::time::Duration;

use zero_comm::Clock;

/// Sleeping on it takes no time and moves it on.
#[derive(Debug, Default)]
pub(crate) struct TestClock(Mutex<Duration>);

impl Clock for TestClock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep_until(&self, moment: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = moment.max(*now);
    }
}
