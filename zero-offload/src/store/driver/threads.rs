//! Threads that read and write at positions.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use crate::lock::{lock, wait};
use crate::store::driver::{Attempt, Driver, Sink};
use crate::store::error::Direction;

/// As many threads as there may be transfers at once.
pub(crate) struct Threads {
    jobs: Arc<Jobs>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Jobs {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Attempt>,
    stopped: bool,
}

impl Threads {
    pub(crate) fn new(threads: usize, sink: Arc<dyn Sink>) -> io::Result<Self> {
        let driver = Self { jobs: Arc::default(), workers: Mutex::default() };
        for _ in 0..threads {
            let (jobs, sink) = (Arc::clone(&driver.jobs), Arc::clone(&sink));
            let work = move || {
                while let Some(attempt) = jobs.next() {
                    let result = transfer(&attempt);
                    sink.ended(vec![(attempt, result)]);
                }
            };
            match thread::Builder::new().name("nvme".to_owned()).spawn(work) {
                Ok(worker) => lock(&driver.workers).push(worker),
                Err(error) => {
                    driver.stop();
                    return Err(error);
                }
            }
        }
        Ok(driver)
    }
}

impl Driver for Threads {
    fn start(&self, attempts: Vec<Attempt>) {
        let several = attempts.len() > 1;
        lock(&self.jobs.state).waiting.extend(attempts);
        if several { self.jobs.changed.notify_all() } else { self.jobs.changed.notify_one() }
    }

    fn stop(&self) {
        lock(&self.jobs.state).stopped = true;
        self.jobs.changed.notify_all();
        for worker in mem::take(&mut *lock(&self.workers)) {
            // A worker's panic has been reported where it happened.
            let _ = worker.join();
        }
    }
}

impl Jobs {
    /// Waits for the next attempt; none once the driver has stopped.
    fn next(&self) -> Option<Attempt> {
        let mut state = lock(&self.state);
        loop {
            if let Some(attempt) = state.waiting.pop_front() {
                return Some(attempt);
            }
            if state.stopped {
                return None;
            }
            state = wait(&self.changed, state);
        }
    }
}

fn transfer(attempt: &Attempt) -> io::Result<usize> {
    let transfer = &attempt.transfer;
    let (file, offset) = (transfer.file().file(), transfer.offset());
    let memory = transfer.rest().part(0, attempt.length);
    match transfer.direction() {
        // SAFETY: `Queue::start` was promised that the memory is there and ours until the batch is done, which
        // it is not before the attempt has ended.
        Direction::Read => file.read_at(unsafe { memory.bytes_mut() }, offset),
        // SAFETY: likewise.
        Direction::Write => file.write_at(unsafe { memory.bytes() }, offset),
    }
}
