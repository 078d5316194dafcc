//! Whether bulk data goes to its reader through caches or through memory.
//!
//! A chunk that a core has just written lies in that core's cache. For a reader that shares a cache with it
//! this is the quickest way; for one on another die or socket it is the slowest, several times slower than
//! reading from memory. Which it is differs from machine to machine and, where a hypervisor moves virtual cores
//! about, from second to second. So both are tried, now and then, and the quicker one is kept.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Operations that write fewer chunks than this are not worth a choice: they go through caches.
const WORTH: u64 = 8;

/// After how many operations of a kind both routes are tried again.
const PERIOD: u32 = 64;

/// How many operations in a row are tried on a route; the quickest counts, as any may have been disturbed.
const TRIES: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Chunks stay in the writer's cache.
    Cache,
    /// Chunks are written past the caches.
    Memory,
}

/// Operations that take alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) reduces: bool,
    /// How many chunks all ranks write.
    pub(super) chunks: u64,
}

/// An operation under way.
#[derive(Debug)]
pub(super) struct Trip {
    kind: Kind,
    pub(super) route: Route,
    began: Instant,
}

/// What operations took on each route.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// By kind, with the number of chunks rounded down to a power of two.
    records: HashMap<Kind, Record>,
}

#[derive(Debug, Default)]
struct Record {
    operations: u32,
    /// Nanoseconds per chunk of the last operations, the latest first.
    cache: [Option<u64>; TRIES as usize],
    memory: [Option<u64>; TRIES as usize],
}

impl Routes {
    /// Begins an operation.
    pub(super) fn depart(&mut self, kind: Kind) -> Trip {
        Trip { kind, route: self.choose(kind), began: Instant::now() }
    }

    /// Ends an operation.
    pub(super) fn arrive(&mut self, Trip { kind, route, began }: Trip) {
        self.took(kind, route, began.elapsed());
    }

    /// The route for the next operation of a kind.
    fn choose(&mut self, kind: Kind) -> Route {
        if kind.chunks < WORTH {
            return Route::Cache;
        }
        let record = self.records.entry(kind.class()).or_default();
        let turn = record.operations % PERIOD;
        record.operations = record.operations.wrapping_add(1);
        match turn / TRIES {
            0 => Route::Memory,
            1 => Route::Cache,
            _ => record.best(),
        }
    }

    /// Notes what an operation took on the route that was chosen for it.
    fn took(&mut self, kind: Kind, route: Route, time: Duration) {
        if let Some(record) = self.records.get_mut(&kind.class()) {
            let times = match route {
                Route::Cache => &mut record.cache,
                Route::Memory => &mut record.memory,
            };
            times.rotate_right(1);
            times[0] = u64::try_from(time.as_nanos() / u128::from(kind.chunks.max(1))).ok();
        }
    }
}

impl Kind {
    const fn class(self) -> Self {
        Self { chunks: if self.chunks == 0 { 0 } else { 1 << self.chunks.ilog2() }, ..self }
    }
}

impl Record {
    fn best(&self) -> Route {
        let quickest = |times: &[Option<u64>]| times.iter().flatten().min().copied();
        match (quickest(&self.cache), quickest(&self.memory)) {
            (Some(cache), Some(memory)) if cache < memory => Route::Cache,
            _ => Route::Memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind { reduces: false, chunks: 100 };

    /// How often each of `count` operations goes through caches, if they take this long on each route.
    fn cached(routes: &mut Routes, count: u32, cache: u64, memory: u64) -> u32 {
        (0..count)
            .filter(|_| {
                let route = routes.choose(KIND);
                let time = if route == Route::Cache { cache } else { memory };
                routes.took(KIND, route, Duration::from_micros(time));
                route == Route::Cache
            })
            .count() as u32
    }

    #[test]
    fn the_quicker_route_is_kept_and_the_other_tried_now_and_then() {
        assert_eq!(cached(&mut Routes::default(), 10 * PERIOD, 300, 100), 10 * TRIES);
        assert_eq!(cached(&mut Routes::default(), 10 * PERIOD, 100, 300), 10 * (PERIOD - TRIES));
    }

    #[test]
    fn a_route_that_becomes_slow_is_left_at_once() {
        let mut routes = Routes::default();
        cached(&mut routes, 2 * TRIES + 3, 100, 300);
        assert_eq!(cached(&mut routes, 20, 400, 300), TRIES);
    }

    #[test]
    fn one_slow_operation_changes_nothing() {
        let mut routes = Routes::default();
        cached(&mut routes, 2 * TRIES + 3, 100, 300);
        assert_eq!(cached(&mut routes, 1, 4000, 300), 1);
        assert_eq!(cached(&mut routes, 10, 100, 300), 10);
    }

    #[test]
    fn small_operations_go_through_caches() {
        let mut routes = Routes::default();
        let kind = Kind { reduces: true, chunks: WORTH - 1 };
        for _ in 0..2 * PERIOD {
            assert_eq!(routes.choose(kind), Route::Cache);
        }
    }
}
