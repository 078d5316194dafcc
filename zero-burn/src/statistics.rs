//! How long what takes, and how many bytes move: counted always, and event by event where a trace is wanted.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zero_core::Bytes;

use crate::engine::lock;

/// What a rank is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Activity {
    /// Forward and backward.
    Compute,
    /// Whole parameters are put together from all ranks' shards.
    Gather,
    /// Gradients are summed up over the ranks.
    Reduce,
    /// The optimizer updates this rank's shards.
    Update,
}

impl Activity {
    /// All of them, in the order of a step.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Gather, Self::Reduce, Self::Update];

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Update => "update",
        }
    }
}

/// What one rank did between two points in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of parameters that this rank took from others.
    pub gathered: Bytes,
    /// How long that took, beside compute or not.
    pub gather_time: Duration,
    /// How long compute waited for it.
    pub gather_exposed: Duration,
    /// Bytes of gradients that this rank gave to others.
    pub reduced: Bytes,
    /// How long reductions took, beside compute or not; waiting for other ranks included.
    pub reduce_time: Duration,
    /// How long compute waited for them.
    pub reduce_exposed: Duration,
    /// How long the optimizer updated this rank's shards.
    pub update_time: Duration,
    /// Bytes of optimizer state, master weights and gradients that were read from disks and written to them.
    pub offloaded: Bytes,
    /// How long that took, beside compute or not; updates in between included.
    pub offload_time: Duration,
    /// Times that a layer asked for a parameter and found it gathered: fetched ahead, kept or in use.
    pub lookahead_hits: u64,
    /// Times that it did not.
    pub lookahead_misses: u64,
    /// Times that a parameter was gathered ahead, and given up before any layer asked for it.
    pub lookahead_wasted: u64,
}

impl Statistics {
    /// What was added since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        let bytes = |now: Bytes, before: Bytes| Bytes::new(now.get() - before.get());
        Self {
            gathered: bytes(self.gathered, before.gathered),
            gather_time: self.gather_time - before.gather_time,
            gather_exposed: self.gather_exposed - before.gather_exposed,
            reduced: bytes(self.reduced, before.reduced),
            reduce_time: self.reduce_time - before.reduce_time,
            reduce_exposed: self.reduce_exposed - before.reduce_exposed,
            update_time: self.update_time - before.update_time,
            offloaded: bytes(self.offloaded, before.offloaded),
            offload_time: self.offload_time - before.offload_time,
            lookahead_hits: self.lookahead_hits - before.lookahead_hits,
            lookahead_misses: self.lookahead_misses - before.lookahead_misses,
            lookahead_wasted: self.lookahead_wasted - before.lookahead_wasted,
        }
    }

    /// How long compute waited for other ranks.
    pub fn exposed(&self) -> Duration {
        self.gather_exposed + self.reduce_exposed
    }
}

/// One thing that a rank did, for a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// What kind of thing.
    pub activity: Activity,
    /// Of what: a parameter, a bucket, a pass.
    pub name: String,
    /// When it began, after the engine did.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Bytes that moved between ranks.
    pub bytes: u64,
}

/// Counts, and keeps events while a trace is wanted.
#[derive(Debug)]
pub(crate) struct Recorder {
    origin: Instant,
    is_tracing: AtomicBool,
    events: Mutex<Vec<TraceEvent>>,
    /// By activity.
    counters: [Counters; Activity::ALL.len()],
}

#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    nanos: AtomicU64,
    exposed_nanos: AtomicU64,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            origin: Instant::now(),
            is_tracing: AtomicBool::new(false),
            events: Mutex::default(),
            counters: Default::default(),
        }
    }

    /// Starts or ends to keep events.
    pub(crate) fn set_tracing(&self, is_tracing: bool) {
        self.is_tracing.store(is_tracing, Ordering::Relaxed);
    }

    /// The events so far, moved out.
    pub(crate) fn take_events(&self) -> Vec<TraceEvent> {
        std::mem::take(&mut *lock(&self.events))
    }

    /// The time since the engine began.
    pub(crate) fn clock(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Does what takes a while.
    pub(crate) fn during<T>(
        &self,
        activity: Activity,
        name: &str,
        bytes: usize,
        act: impl FnOnce() -> T,
    ) -> T {
        let span = tracing::trace_span!("zero", activity = activity.name(), name, bytes);
        let begin = Instant::now();
        let outcome = span.in_scope(act);
        self.note(activity, name, bytes, begin);
        outcome
    }

    /// Notes what began at `begin` and has ended now.
    pub(crate) fn note(&self, activity: Activity, name: &str, bytes: usize, begin: Instant) {
        let duration = begin.elapsed();
        let counters = &self.counters[activity as usize];
        add(&counters.bytes, bytes as u64);
        add(&counters.nanos, nanos(duration));
        if self.is_tracing.load(Ordering::Relaxed) {
            let start = begin.saturating_duration_since(self.origin);
            let (name, bytes) = (name.to_owned(), bytes as u64);
            lock(&self.events).push(TraceEvent { activity, name, start, duration, bytes });
        }
    }

    /// Notes that compute waited since `begin`.
    pub(crate) fn exposed(&self, activity: Activity, begin: Instant) {
        add(&self.counters[activity as usize].exposed_nanos, nanos(begin.elapsed()));
    }

    /// What was counted so far; hits and misses are not.
    pub(crate) fn snapshot(&self) -> Statistics {
        let of = |activity: Activity| &self.counters[activity as usize];
        let bytes = |counters: &Counters| Bytes::new(counters.bytes.load(Ordering::Relaxed));
        let time = |counter: &AtomicU64| Duration::from_nanos(counter.load(Ordering::Relaxed));
        let (gather, reduce) = (of(Activity::Gather), of(Activity::Reduce));
        Statistics {
            gathered: bytes(gather),
            gather_time: time(&gather.nanos),
            gather_exposed: time(&gather.exposed_nanos),
            reduced: bytes(reduce),
            reduce_time: time(&reduce.nanos),
            reduce_exposed: time(&reduce.exposed_nanos),
            update_time: time(&of(Activity::Update).nanos),
            offloaded: Bytes::ZERO,
            offload_time: Duration::ZERO,
            lookahead_hits: 0,
            lookahead_misses: 0,
            lookahead_wasted: 0,
        }
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
