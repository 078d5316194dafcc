//! The pool that buffers come from and return to.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use zero_core::Bytes;

use crate::buffer::HostBuffer;
use crate::cuda::{Device, PageLockError};
use crate::lock::lock;
use crate::memory::Memory;
use crate::workers::Workers;

/// How a [`HostPool`] behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// How many bytes of idle memory may be kept for reuse. What is returned beyond it pushes out the buffers
    /// that have been idle longest; a single buffer larger than this is freed at once. Default: 256 MiB.
    pub retain: Bytes,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { retain: Bytes::new(256 << 20) }
    }
}

/// Whether the memory of a [`HostPool`] is page-locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageLocking {
    /// Not asked for.
    Off,
    /// All of it.
    On,
    /// Asked for, but all memory is ordinary, or that of some buffers; this is why.
    Fallback(PageLockError),
}

/// A pool of host buffers of exact sizes that counts what it lends.
///
/// Training asks for the same few sizes in every step, so only an idle buffer of *equal* size is reused:
/// nothing is rounded up, and what [`live`](Self::live) says is what was asked for. (Alignment costs up to 63
/// bytes more in each allocation, from 128 KiB on and where memory is page-locked up to 4095; they are not counted.)
///
/// A handle is cheap to clone, and all clones are the same pool. Every method may be called from any thread;
/// counters are read and written under one lock and hence agree with each other.
///
/// ```
/// use zero_core::Bytes;
/// use zero_offload::{HostPool, PoolOptions};
///
/// let pool = HostPool::new(PoolOptions { retain: Bytes::new(100) });
/// let (small, large) = (pool.take(60), pool.take(200));
/// drop((small, large));
/// assert_eq!(pool.idle(), Bytes::new(60)); // the large one would not have fitted
/// assert_eq!(pool.peak(), Bytes::new(260));
/// ```
#[derive(Clone, Debug)]
pub struct HostPool {
    shared: Arc<Shared>,
}

impl Default for HostPool {
    fn default() -> Self {
        Self::new(PoolOptions::default())
    }
}

impl HostPool {
    /// An empty pool.
    pub fn new(options: PoolOptions) -> Self {
        Self::with_device(options, None)
    }

    /// An empty pool whose memory is page-locked: CUDA devices copy to and from it without a detour, and while the
    /// processor does something else.
    ///
    /// The driver is looked for at run time. The primary context of the device of this number registers the memory, for
    /// all devices; let it be the rank's own, since a context takes memory of its device. Idle memory stays page-locked.
    ///
    /// Where there is no driver or it refuses, memory is ordinary. [`page_locking`](Self::page_locking) says so with the
    /// reason, and the log does, once.
    ///
    /// ```
    /// use zero_offload::{HostPool, PageLocking, PoolOptions};
    ///
    /// let pool = HostPool::page_locked(PoolOptions::default(), 0);
    /// let gradients = pool.take(1 << 20);
    /// match pool.page_locking() {
    ///     PageLocking::Fallback(reason) => println!("copies take a detour: {reason}"),
    ///     _ => assert!(gradients.is_page_locked()),
    /// }
    /// ```
    pub fn page_locked(options: PoolOptions, device: u32) -> Self {
        match Device::open(device) {
            Ok(device) => Self::with_device(options, Some(Arc::new(device))),
            Err(error) => {
                let pool = Self::with_device(options, None);
                pool.shared.note(error);
                pool
            }
        }
    }

    fn with_device(options: PoolOptions, device: Option<Arc<Device>>) -> Self {
        let state = State { retain: options.retain.get(), ..State::default() };
        Self { shared: Arc::new(Shared { device, state: Mutex::new(state) }) }
    }

    /// Whether memory is page-locked, and why not if that was asked for; of several reasons the first.
    pub fn page_locking(&self) -> PageLocking {
        match (&lock(&self.shared.state).not_locked, &self.shared.device) {
            (Some(error), _) => PageLocking::Fallback(error.clone()),
            (None, Some(_)) => PageLocking::On,
            (None, None) => PageLocking::Off,
        }
    }

    /// Lends a buffer of exactly `bytes` bytes.
    ///
    /// The contents are unspecified: zeros, or what the last user of the memory left. 0 bytes need no memory
    /// and count as nothing.
    ///
    /// # Panics
    ///
    /// If the allocator has no such memory to give.
    pub fn take(&self, bytes: usize) -> HostBuffer {
        let memory = match bytes {
            0 => Memory::default(),
            _ => self.shared.take(bytes),
        };
        HostBuffer::new(memory, Arc::clone(&self.shared))
    }

    /// As [`take`](Self::take); memory that is new is first written by one of the threads of `workers`, which puts it on
    /// their NUMA node.
    ///
    /// # Panics
    ///
    /// As [`take`](Self::take).
    pub fn take_near(&self, workers: &Workers, bytes: usize) -> HostBuffer {
        workers.install(|| self.take(bytes))
    }

    /// Bytes on loan now.
    pub fn live(&self) -> Bytes {
        Bytes::new(lock(&self.shared.state).live)
    }

    /// The most bytes that were on loan at once since the pool was made or [`reset_peak`](Self::reset_peak)
    /// was called.
    pub fn peak(&self) -> Bytes {
        Bytes::new(lock(&self.shared.state).peak)
    }

    /// Starts a new measurement of the [`peak`](Self::peak) at what is on loan now.
    pub fn reset_peak(&self) {
        let mut state = lock(&self.shared.state);
        state.peak = state.live;
    }

    /// Changes how many bytes of idle memory may be kept: [`PoolOptions::retain`]. What is idle beyond it is freed, the
    /// buffers that have been idle longest first.
    pub fn set_retain(&self, retain: Bytes) {
        let mut freed = Vec::new();
        let mut state = lock(&self.shared.state);
        state.retain = retain.get();
        while state.idle.bytes > state.retain {
            freed.extend(state.idle.pop_oldest());
        }
        // Freeing is for after the lock.
        drop(state);
        drop(freed);
    }

    /// Bytes kept for reuse now; never more than [`PoolOptions::retain`].
    pub fn idle(&self) -> Bytes {
        Bytes::new(lock(&self.shared.state).idle.bytes)
    }

    /// How many buffers were allocated rather than reused, since the pool was made.
    pub fn allocations(&self) -> u64 {
        lock(&self.shared.state).allocations
    }

    /// Frees all idle memory.
    pub fn trim(&self) {
        let idle = std::mem::take(&mut lock(&self.shared.state).idle);
        drop(idle);
    }
}

/// What the handles of a pool and its buffers share.
pub(crate) struct Shared {
    /// Page-locks the memory.
    device: Option<Arc<Device>>,
    state: Mutex<State>,
}

impl Shared {
    fn take(&self, bytes: usize) -> Memory {
        let reused = {
            let mut state = lock(&self.state);
            let reused = state.idle.pop(bytes);
            if reused.is_some() {
                state.lend(bytes);
            }
            reused
        };
        // Zeroing a large buffer takes long: others must not wait for it.
        reused.unwrap_or_else(|| {
            let memory = self.allocate(bytes);
            let mut state = lock(&self.state);
            state.allocations += 1;
            state.lend(bytes);
            memory
        })
    }

    fn allocate(&self, bytes: usize) -> Memory {
        let Some(device) = &self.device else { return Memory::zeroed(bytes) };
        // A page can be locked for one buffer alone.
        let mut memory = Memory::infallible_pages(bytes);
        if let Err(error) = memory.page_lock(device) {
            self.note(error);
        }
        memory
    }

    /// Keeps and tells the first reason why memory is not page-locked.
    fn note(&self, error: PageLockError) {
        let mut state = lock(&self.state);
        if state.not_locked.is_none() {
            tracing::warn!(%error, "host buffers are not page-locked");
            state.not_locked = Some(error);
        }
    }

    /// Ends a loan.
    pub(crate) fn give_back(&self, memory: Memory) {
        let bytes = memory.len() as u64;
        if bytes == 0 {
            return;
        }
        let mut freed = Vec::new();
        let mut state = lock(&self.state);
        state.live -= bytes;
        let retain = state.retain;
        if bytes > retain {
            freed.push(memory);
        } else {
            while state.idle.bytes > retain - bytes {
                freed.extend(state.idle.pop_oldest());
            }
            state.idle.push(memory);
        }
        // Freeing is for after the lock.
        drop(state);
        drop(freed);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("Shared")
            .field("retain", &state.retain)
            .field("live", &state.live)
            .field("peak", &state.peak)
            .field("idle", &state.idle.bytes)
            .field("allocations", &state.allocations)
            .finish()
    }
}

#[derive(Default)]
struct State {
    /// The most idle bytes.
    retain: u64,
    live: u64,
    peak: u64,
    allocations: u64,
    idle: Idle,
    /// Why memory that should be page-locked is not.
    not_locked: Option<PageLockError>,
}

impl State {
    fn lend(&mut self, bytes: usize) {
        self.live += bytes as u64;
        self.peak = self.peak.max(self.live);
    }
}

/// Memory that waits for reuse, found by size and by age.
#[derive(Default)]
struct Idle {
    bytes: u64,
    /// The age of the next buffer; greater is younger.
    next: u64,
    by_size: BTreeMap<(usize, u64), Memory>,
    /// The size of the buffer of each age: the other half of the key above.
    by_age: BTreeMap<u64, usize>,
}

impl Idle {
    fn push(&mut self, memory: Memory) {
        let (size, age) = (memory.len(), self.next);
        self.next += 1;
        self.bytes += size as u64;
        self.by_age.insert(age, size);
        self.by_size.insert((size, age), memory);
    }

    /// The youngest buffer of exactly `size` bytes: the likeliest still in a cache.
    fn pop(&mut self, size: usize) -> Option<Memory> {
        let (&key, _) = self.by_size.range((size, 0)..=(size, u64::MAX)).next_back()?;
        self.by_age.remove(&key.1);
        self.remove(key)
    }

    fn pop_oldest(&mut self) -> Option<Memory> {
        let (age, size) = self.by_age.pop_first()?;
        self.remove((size, age))
    }

    fn remove(&mut self, key: (usize, u64)) -> Option<Memory> {
        let memory = self.by_size.remove(&key)?;
        self.bytes -= key.0 as u64;
        Some(memory)
    }
}
