//! What the pool promises: exact sizes, exact counts, bounded idle memory, from any number of threads.

use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::thread;

use proptest::prelude::*;
use zero_core::Bytes;
use zero_offload::{HostBuffer, HostPool, PoolOptions, Workers};

fn pool(retain: u64) -> HostPool {
    HostPool::new(PoolOptions { retain: Bytes::new(retain) })
}

/// Live, peak, idle and allocations.
fn counts(pool: &HostPool) -> [u64; 4] {
    [pool.live().get(), pool.peak().get(), pool.idle().get(), pool.allocations()]
}

#[test]
fn a_buffer_has_the_exact_size_and_starts_zeroed_on_a_cache_line() {
    let pool = pool(0);
    for bytes in [1, 4, 63, 64, 65, 4097] {
        let buffer = pool.take(bytes);
        assert_eq!(&buffer[..], vec![0; bytes]);
        assert_eq!(buffer.as_ptr().addr() % 64, 0, "{bytes} bytes");
        assert_eq!(pool.live(), Bytes::new(bytes as u64));
    }
    assert_eq!(counts(&pool), [0, 4097, 0, 6]);
}

#[test]
fn an_empty_buffer_costs_nothing() {
    let pool = pool(1000);
    let mut buffer = pool.take(0);
    assert!(buffer.is_empty());
    assert!(buffer.as_mut_slice::<f64>().is_empty());
    assert_eq!(buffer.as_ptr().addr() % 64, 0);
    drop(buffer);
    assert_eq!(counts(&pool), [0; 4]);
}

#[test]
#[cfg_attr(miri, ignore = "Miri says that the pool of threads breaks the rules of stacked borrows")]
fn memory_near_workers_is_memory_like_any_other() {
    let pool = pool(1000);
    for threads in 1..=2 {
        let workers = Workers::new(NonZeroUsize::new(threads).unwrap()).unwrap();
        let buffer = pool.take_near(&workers, 500);
        assert_eq!((counts(&pool)[0], buffer.len()), (500, 500));
        drop(buffer);
        drop(pool.take(500));
    }
    assert_eq!(counts(&pool), [0, 500, 500, 1]);
}

#[test]
fn memory_is_reused_for_the_same_size_only() {
    let pool = pool(1000);
    let first = pool.take(128);
    let address = first.as_ptr();
    drop(first);

    let other = pool.take(127);
    assert_ne!(other.as_ptr(), address);
    assert_eq!(counts(&pool), [127, 128, 128, 2]);

    let again = pool.take(128);
    assert_eq!(again.as_ptr(), address);
    assert_eq!(counts(&pool), [255, 255, 0, 2]);
}

#[test]
fn the_youngest_buffer_of_a_size_is_reused_first() {
    let pool = pool(1000);
    let (first, second) = (pool.take(64), pool.take(64));
    let (old, young) = (first.as_ptr(), second.as_ptr());
    drop(first);
    drop(second);
    let reused = [pool.take(64), pool.take(64)];
    assert_eq!(reused.each_ref().map(HostBuffer::as_ptr), [young, old]);
}

#[test]
fn the_oldest_idle_memory_makes_room() {
    let pool = pool(100);
    let (first, second, third) = (pool.take(40), pool.take(50), pool.take(30));
    drop(first);
    drop(second);
    assert_eq!(pool.idle().get(), 90);
    drop(third); // 120: the 40 of the first go
    assert_eq!(counts(&pool), [0, 120, 80, 3]);

    let _reused = (pool.take(50), pool.take(30));
    assert_eq!(pool.allocations(), 3);
    let _fresh = pool.take(40);
    assert_eq!(pool.allocations(), 4);
}

#[test]
fn a_buffer_beyond_the_budget_is_freed_and_pushes_nothing_out() {
    let pool = pool(100);
    drop(pool.take(60));
    drop(pool.take(101));
    assert_eq!(pool.idle().get(), 60);
    drop(pool.take(100));
    assert_eq!(pool.idle().get(), 100);
}

#[test]
fn trim_frees_idle_memory_and_leaves_loans_alone() {
    let pool = pool(1000);
    let mut kept = pool.take(8);
    drop(pool.take(16));
    pool.trim();
    kept.fill(7);
    assert_eq!(counts(&pool), [8, 24, 0, 2]);
    drop(kept);
    assert_eq!(pool.idle().get(), 8);
}

#[test]
fn what_may_be_kept_can_be_changed() {
    let pool = pool(0);
    drop(pool.take(8));
    assert_eq!(pool.idle(), Bytes::ZERO);
    pool.set_retain(Bytes::new(30));
    drop([pool.take(8), pool.take(12), pool.take(10)]);
    assert_eq!(pool.idle(), Bytes::new(30));
    pool.set_retain(Bytes::new(25));
    // The oldest has gone.
    assert_eq!(counts(&pool), [0, 30, 22, 4]);
    drop(pool.take(12));
    assert_eq!(pool.allocations(), 4);
}

#[test]
fn the_peak_starts_again_at_what_is_live() {
    let pool = pool(0);
    let kept = pool.take(10);
    drop(pool.take(90));
    assert_eq!(pool.peak().get(), 100);
    pool.reset_peak();
    assert_eq!(pool.peak().get(), 10);
    drop(kept);
    assert_eq!(pool.peak().get(), 10);
}

#[test]
fn clones_are_one_pool_and_buffers_outlive_it() {
    let pool = pool(1000);
    let clone = pool.clone();
    let mut buffer = clone.take(12);
    assert_eq!(pool.live().get(), 12);
    drop((pool, clone));
    buffer.as_mut_slice::<f32>().copy_from_slice(&[1.0, 2.0, 3.0]);
    assert_eq!(buffer.as_slice::<f32>(), [1.0, 2.0, 3.0]);
}

#[test]
fn a_slice_of_numbers_shares_the_bytes() {
    let mut buffer = pool(0).take(8);
    buffer.as_mut_slice::<u32>()[1] = 0x0403_0201_u32.to_le();
    assert_eq!(buffer[4..], [1, 2, 3, 4]);
}

#[test]
#[should_panic(expected = "OutputSliceWouldHaveSlop")]
fn a_slice_of_elements_that_do_not_fit_panics() {
    pool(0).take(7).as_slice::<f32>();
}

#[test]
fn a_debug_form_shows_sizes_and_no_contents() {
    let pool = pool(50);
    let buffer = pool.take(3);
    assert_eq!(format!("{buffer:?}"), "HostBuffer { bytes: 3, .. }");
    assert!(format!("{pool:?}").contains("live: 3"));
}

#[test]
fn counts_are_exact_when_many_threads_take_and_return() {
    const THREADS: usize = 4;
    const ROUNDS: usize = if cfg!(miri) { 10 } else { 2000 };
    let pool = pool(300);
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, barrier) = (&pool, &barrier);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut held = [8, 16 + thread, 64 * (round % 4)].map(|bytes| pool.take(bytes));
                    for buffer in &mut held {
                        buffer.fill(thread as u8);
                    }
                    // Nobody else writes to what this thread holds.
                    assert!(held.iter().all(|buffer| buffer.iter().all(|&byte| byte == thread as u8)));
                    if round + 1 == ROUNDS {
                        barrier.wait();
                        // All hold their last buffers now, and none returns any before all have looked.
                        let live: usize = (0..THREADS).map(|t| 8 + 16 + t + 64 * (round % 4)).sum();
                        assert_eq!(pool.live().get(), live as u64);
                        barrier.wait();
                    }
                }
            });
        }
    });
    assert_eq!(pool.live(), Bytes::ZERO);
    assert!(pool.idle().get() <= 300);
    assert!(pool.peak().get() >= (THREADS * 24) as u64);
}

/// A pool written the plain way: a list of idle sizes, oldest first.
#[derive(Default)]
struct Model {
    live: Vec<usize>,
    idle: Vec<usize>,
    peak: usize,
    allocations: u64,
}

impl Model {
    fn take(&mut self, bytes: usize) {
        if bytes > 0 {
            match self.idle.iter().rposition(|&idle| idle == bytes) {
                Some(at) => drop(self.idle.remove(at)),
                None => self.allocations += 1,
            }
        }
        self.live.push(bytes);
        self.peak = self.peak.max(self.live.iter().sum());
    }

    fn give_back(&mut self, at: usize, retain: usize) {
        let bytes = self.live.remove(at);
        if bytes > 0 && bytes <= retain {
            self.idle.push(bytes);
            while self.idle.iter().sum::<usize>() > retain {
                self.idle.remove(0);
            }
        }
    }

    fn counts(&self) -> [u64; 4] {
        let (live, idle): (usize, usize) = (self.live.iter().sum(), self.idle.iter().sum());
        [live as u64, self.peak as u64, idle as u64, self.allocations]
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_sequence_of_calls_counts_as_a_plain_list_does(
        retain in 0usize..60,
        calls in prop::collection::vec((any::<bool>(), 0usize..12), 1..80),
    ) {
        let (pool, mut model) = (pool(retain as u64), Model::default());
        let mut held = Vec::new();
        for (take, number) in calls {
            if take || held.is_empty() {
                held.push(pool.take(number));
                model.take(number);
            } else {
                let at = number % held.len();
                drop(held.remove(at));
                model.give_back(at, retain);
            }
            prop_assert_eq!(counts(&pool), model.counts());
        }
    }
}
