//! A driver that goes wrong as it is told.

use std::io;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::store::driver::{self, Attempt, Driver, Sink};
use crate::store::{Direction, Engine, Queue, Span, StoreError};

/// What happens to an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// It ends with this error number, and nothing is transferred.
    Error(i32),
    /// Only so many bytes of it are transferred.
    Short(usize),
    /// It is not begun before [`Faults::release`].
    Held,
}

/// Decides by direction and by the attempt's number in that direction.
type Rule = Box<dyn FnMut(Direction, usize) -> Option<Fault> + Send>;

/// What is to go wrong, and what went on; clones are the same.
#[derive(Clone, Default)]
pub(super) struct Faults(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    rule: Option<Rule>,
    reads: usize,
    writes: usize,
    in_flight: usize,
    most_in_flight: usize,
    held: Vec<Attempt>,
    driver: Option<Arc<dyn Driver>>,
}

impl Faults {
    /// From now on `rule` decides, with attempts counted from 0 again.
    pub(super) fn set(&self, rule: impl FnMut(Direction, usize) -> Option<Fault> + Send + 'static) {
        let mut state = self.lock();
        state.rule = Some(Box::new(rule));
        (state.reads, state.writes) = (0, 0);
    }

    /// From now on nothing goes wrong.
    pub(super) fn clear(&self) {
        self.set(|_, _| None);
    }

    /// Begins what was held, and holds nothing more.
    pub(super) fn release(&self) {
        self.clear();
        let mut state = self.lock();
        let (held, driver) = (mem::take(&mut state.held), state.driver.clone());
        drop(state);
        driver.unwrap().start(held);
    }

    /// Reads and writes attempted since the rule was set.
    pub(super) fn attempts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.reads, state.writes)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.lock().in_flight
    }

    pub(super) fn most_in_flight(&self) -> usize {
        self.lock().most_in_flight
    }

    /// Makes a queue over a driver with these faults.
    pub(super) fn queue(
        &self,
        engine: Engine,
        depth: usize,
        registered: Span,
    ) -> Result<(Queue, Engine), StoreError> {
        Queue::new(depth, |sink| {
            let sink = Arc::new(Counting { sink, faults: self.clone() });
            let (driver, engine) = driver::make(engine, depth, registered, sink.clone())?;
            let driver: Arc<dyn Driver> = Arc::from(driver);
            self.lock().driver = Some(Arc::clone(&driver));
            Ok((Box::new(Faulty { driver, sink, faults: self.clone() }), engine))
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

struct Faulty {
    driver: Arc<dyn Driver>,
    sink: Arc<Counting>,
    faults: Faults,
}

impl Driver for Faulty {
    fn start(&self, attempts: Vec<Attempt>) {
        let (mut sound, mut failed) = (Vec::new(), Vec::new());
        let mut state = self.faults.lock();
        state.in_flight += attempts.len();
        state.most_in_flight = state.most_in_flight.max(state.in_flight);
        for mut attempt in attempts {
            let direction = attempt.transfer.direction();
            let count = if direction == Direction::Read { &mut state.reads } else { &mut state.writes };
            let number = *count;
            *count += 1;
            match state.rule.as_mut().and_then(|rule| rule(direction, number)) {
                Some(Fault::Error(errno)) => failed.push((attempt, Err(io::Error::from_raw_os_error(errno)))),
                Some(Fault::Short(bytes)) => {
                    attempt.length = attempt.length.min(bytes);
                    sound.push(attempt);
                }
                Some(Fault::Held) => state.held.push(attempt),
                None => sound.push(attempt),
            }
        }
        drop(state);
        if !sound.is_empty() {
            self.driver.start(sound);
        }
        if !failed.is_empty() {
            self.sink.ended(failed);
        }
    }

    fn stop(&self) {
        self.driver.stop();
    }
}

struct Counting {
    sink: Arc<dyn Sink>,
    faults: Faults,
}

impl Sink for Counting {
    fn ended(&self, attempts: Vec<(Attempt, io::Result<usize>)>) {
        self.faults.lock().in_flight -= attempts.len();
        self.sink.ended(attempts);
    }
}
