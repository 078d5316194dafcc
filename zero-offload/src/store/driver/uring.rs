//! Linux's io_uring: whoever starts transfers submits them, one thread waits for what becomes of them.

use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::lock::lock;
use crate::store::driver::{Attempt, Driver, Sink};
use crate::store::error::Direction;
use crate::store::span::Span;

/// `IORING_ENTER_GETEVENTS`: waits for completions.
const GETEVENTS: u32 = 1;
/// The most bytes that the kernel registers as one buffer.
const REGISTERED: usize = 1 << 30;
/// Marks the entry that ends the reaper; attempts are numbered from 0.
const STOP: u64 = u64::MAX;

/// A ring with room for as many transfers as there may be at once.
pub(crate) struct Uring {
    shared: Arc<Shared>,
    reaper: Mutex<Option<JoinHandle<()>>>,
    sink: Arc<dyn Sink>,
}

struct Shared {
    ring: IoUring,
    /// The memory that the kernel has mapped already, if it agreed to.
    registered: Option<Span>,
    /// Also guards the submission queue.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is in flight, by the number that its entry carries.
    attempts: Vec<Option<Attempt>>,
    /// Which of these numbers are not in use.
    free: Vec<usize>,
    /// Why nothing can be submitted any more. What the kernel has not taken by then it must never take.
    broken: Option<i32>,
}

impl Uring {
    /// A ring for `depth` transfers at once; an error where the system refuses it or is too old for it.
    pub(crate) fn new(depth: usize, registered: Span, sink: Arc<dyn Sink>) -> io::Result<Self> {
        // One more for the end.
        let ring = IoUring::new(depth as u32 + 1)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE].iter().all(|&code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let registered = register(&ring, registered).then_some(registered);
        let shared = Arc::new(Shared { ring, registered, state: Mutex::default() });
        let reaper = {
            let (shared, sink) = (Arc::clone(&shared), Arc::clone(&sink));
            thread::Builder::new().name("nvme".to_owned()).spawn(move || shared.reap(&*sink))?
        };
        Ok(Self { shared, reaper: Mutex::new(Some(reaper)), sink })
    }
}

impl Driver for Uring {
    fn start(&self, attempts: Vec<Attempt>) {
        let refused = self.shared.submit(attempts);
        if !refused.is_empty() {
            self.sink.ended(refused);
        }
    }

    fn stop(&self) {
        let mut state = lock(&self.shared.state);
        self.shared.push(&opcode::Nop::new().build().user_data(STOP));
        self.shared.flush(&mut state);
        let broken = state.broken.is_some();
        drop(state);
        let reaper = lock(&self.reaper).take();
        // A ring that takes nothing cannot wake its reaper; it is left behind.
        if let Some(reaper) = reaper.filter(|_| !broken) {
            // Its panic has been reported where it happened.
            let _ = reaper.join();
        }
    }
}

impl Shared {
    /// Gives attempts to the kernel; returns those that it would not have.
    fn submit(&self, attempts: Vec<Attempt>) -> Vec<(Attempt, io::Result<usize>)> {
        let mut state = lock(&self.state);
        let mut numbers = Vec::with_capacity(attempts.len());
        let mut refused = Vec::new();
        for attempt in attempts {
            if let Some(errno) = state.broken {
                refused.push((attempt, Err(io::Error::from_raw_os_error(errno))));
                continue;
            }
            let number = state.free.pop().unwrap_or(state.attempts.len());
            self.push(&self.entry(&attempt).user_data(number as u64));
            match state.attempts.get_mut(number) {
                Some(place) => *place = Some(attempt),
                None => state.attempts.push(Some(attempt)),
            }
            numbers.push(number);
        }
        let left = self.flush(&mut state);
        if let Some(errno) = state.broken {
            // The kernel takes entries in order: the last ones are left.
            for number in numbers.drain(numbers.len() - left.min(numbers.len())..) {
                if let Some(attempt) = state.attempts[number].take() {
                    refused.push((attempt, Err(io::Error::from_raw_os_error(errno))));
                }
            }
        }
        refused
    }

    /// Submits what is queued; returns how many entries the kernel has not taken, which is none unless the ring
    /// broke.
    fn flush(&self, state: &mut State) -> usize {
        while state.broken.is_none() {
            let result = self.ring.submitter().submit();
            // SAFETY: the lock that `state` stands for guards the submission queue.
            let left = unsafe { self.ring.submission_shared() }.len();
            match result {
                _ if left == 0 => return 0,
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Short of memory; what is in flight gives some back.
                    Some(libc::EAGAIN | libc::EBUSY) => thread::yield_now(),
                    errno => state.broken = Some(errno.unwrap_or(libc::EIO)),
                },
            }
        }
        // SAFETY: as above.
        unsafe { self.ring.submission_shared() }.len()
    }

    /// Queues an entry. The caller holds the lock.
    fn push(&self, entry: &squeue::Entry) {
        // SAFETY: the caller's lock guards the submission queue. The entry's memory and file are there until it
        // ends: `Queue::start` was promised that, and the attempt, which holds the file, is kept until then.
        let pushed = unsafe { self.ring.submission_shared().push(entry) };
        // Every push is flushed, and there are never more than `depth` at once.
        debug_assert!(pushed.is_ok(), "the ring has room for every attempt");
    }

    fn entry(&self, attempt: &Attempt) -> squeue::Entry {
        let transfer = &attempt.transfer;
        let file = types::Fd(transfer.file().file().as_raw_fd());
        let (memory, offset) = (transfer.rest(), transfer.offset());
        let (start, length) = (memory.start(), attempt.length as u32);
        match (transfer.direction(), self.buffer(memory)) {
            (Direction::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, start, length, buffer).offset(offset).build()
            }
            (Direction::Read, None) => opcode::Read::new(file, start, length).offset(offset).build(),
            (Direction::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, start, length, buffer).offset(offset).build()
            }
            (Direction::Write, None) => opcode::Write::new(file, start, length).offset(offset).build(),
        }
    }

    /// Which registered buffer holds all of `memory`.
    fn buffer(&self, memory: Span) -> Option<u16> {
        let registered = self.registered?;
        let first = memory.start().addr().checked_sub(registered.start().addr())?;
        let end = first + memory.len();
        let buffer = first / REGISTERED;
        let within = end <= registered.len() && end <= (buffer + 1) * REGISTERED;
        within.then(|| u16::try_from(buffer).ok()).flatten()
    }

    /// Hands on what has ended, until the ring does.
    fn reap(&self, sink: &dyn Sink) {
        let mut stopped = false;
        while !stopped {
            // SAFETY: no argument is passed. Waiting fails only for reasons that waiting again answers: a signal,
            // or completions that want to be read first.
            let _ = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, GETEVENTS, None) };
            // SAFETY: no other thread reads the completion queue.
            let completed: Vec<_> = unsafe { self.ring.completion_shared() }.collect();
            let mut ended = Vec::with_capacity(completed.len());
            let mut state = lock(&self.state);
            for entry in completed {
                if entry.user_data() == STOP {
                    stopped = true;
                    continue;
                }
                let number = entry.user_data() as usize;
                let result = entry.result();
                if let Some(attempt) = state.attempts.get_mut(number).and_then(mem::take) {
                    state.free.push(number);
                    let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
                    ended.push((attempt, result));
                }
            }
            drop(state);
            if !ended.is_empty() {
                sink.ended(ended);
            }
        }
    }
}

/// Whether the kernel has mapped `memory` for good, which spares it that work in every transfer. It may refuse: a
/// process may lock only so much memory.
fn register(ring: &IoUring, memory: Span) -> bool {
    let buffers: Vec<_> = (0..memory.len())
        .step_by(REGISTERED)
        .map(|offset| {
            let part = memory.part(offset, REGISTERED.min(memory.len() - offset));
            libc::iovec { iov_base: part.start().cast(), iov_len: part.len() }
        })
        .collect();
    // SAFETY: the kernel keeps the pages themselves, so it does not matter which of the two goes first; it
    // touches them only for transfers, each of which brings promises of its own.
    match unsafe { ring.submitter().register_buffers(&buffers) } {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, bytes = memory.len(), "buffers are not registered with io_uring");
            false
        }
    }
}
