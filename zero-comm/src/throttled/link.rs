//! What moving data costs.

use std::time::Duration;

use zero_core::{Bytes, WorldSize};

/// The link that joins a rank to the others: it carries its capacity in both directions at once.
///
/// ```
/// use std::time::Duration;
///
/// use zero_comm::{Link, Traffic};
/// use zero_core::{Bytes, WorldSize};
///
/// let link = Link::new(Duration::from_micros(10), 1e9)?;
/// let traffic = Traffic::all_reduce(WorldSize::new(4).unwrap(), Bytes::new(1_000_000));
/// // 4 steps, and 2 * 3/4 of the data.
/// assert_eq!(link.time(traffic), Duration::from_micros(4 * 10 + 1500));
/// # Ok::<_, zero_comm::LinkError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    latency: Duration,
    bytes_per_second: f64,
}

/// A link that nothing can pass.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("a link cannot carry {bytes_per_second} bytes per second; pass a number above 0, or infinity")]
pub struct LinkError {
    /// What was asked for.
    pub bytes_per_second: f64,
}

impl Link {
    /// A link that costs nothing.
    pub const INSTANT: Self = Self { latency: Duration::ZERO, bytes_per_second: f64::INFINITY };

    /// A link on which each step takes `latency`, whatever its size, and which carries `bytes_per_second` in
    /// each direction.
    ///
    /// # Errors
    ///
    /// If `bytes_per_second` is not above 0.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Self, LinkError> {
        if bytes_per_second > 0.0 {
            Ok(Self { latency, bytes_per_second })
        } else {
            Err(LinkError { bytes_per_second })
        }
    }

    /// How long `traffic` takes on an idle link; saturating.
    pub fn time(&self, traffic: Traffic) -> Duration {
        self.delay(traffic).saturating_add(self.occupancy(traffic))
    }

    /// The part of the time in which the link could carry other data.
    pub(super) const fn delay(&self, traffic: Traffic) -> Duration {
        self.latency.saturating_mul(traffic.steps)
    }

    /// The part of the time in which the link is taken.
    pub(super) fn occupancy(&self, traffic: Traffic) -> Duration {
        let seconds = traffic.bytes.get() as f64 / self.bytes_per_second;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// What one operation puts on the link of one rank.
///
/// The volumes are the least that an algorithm can do with, and the steps those of recursive halving and
/// doubling, dissemination and pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of Collective
/// Communication Operations in MPICH" (2005), section 4. In a group of one, nothing moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many messages follow one another.
    pub steps: u32,
    /// What leaves or arrives, whichever is more.
    pub bytes: Bytes,
}

impl Traffic {
    /// An all-reduce of a buffer of `bytes`: `2 (W - 1) / W` of it, each half rounded up, in `2 log2 W` steps.
    pub const fn all_reduce(world: WorldSize, bytes: Bytes) -> Self {
        let half = bytes.get() - bytes.get() / world.get() as u64;
        Self { steps: 2 * rounds(world), bytes: Bytes::new(half.saturating_mul(2)) }
    }

    /// An all-gather of `whole`, of which the rank brings `own`: the rest arrives, in `log2 W` steps.
    pub const fn all_gather(world: WorldSize, whole: Bytes, own: Bytes) -> Self {
        Self { steps: rounds(world), bytes: Bytes::new(whole.get().saturating_sub(own.get())) }
    }

    /// A reduce-scatter of `whole`, of which the rank gets `own`: the rest leaves, in `log2 W` steps.
    pub const fn reduce_scatter(world: WorldSize, whole: Bytes, own: Bytes) -> Self {
        Self::all_gather(world, whole, own)
    }

    /// A broadcast of `bytes`, which leave the root once and arrive everywhere, in `log2 W` steps.
    pub const fn broadcast(world: WorldSize, bytes: Bytes) -> Self {
        Self { steps: rounds(world), bytes: if world.get() == 1 { Bytes::ZERO } else { bytes } }
    }

    /// An exchange in which `out` leaves the rank for others and `back` arrives from them, in `W - 1` steps.
    pub const fn all_to_all(world: WorldSize, out: Bytes, back: Bytes) -> Self {
        let bytes = if out.get() > back.get() { out } else { back };
        // No world has 2^32 ranks.
        Self { steps: (world.get() - 1) as u32, bytes }
    }

    /// A message of `bytes` to or from another rank: one step.
    pub const fn message(bytes: Bytes) -> Self {
        Self { steps: 1, bytes }
    }

    /// A read of `bytes` from another rank's window: there and back. A read of the own window is no traffic.
    pub const fn read(bytes: Bytes) -> Self {
        Self { steps: 2, bytes }
    }

    /// A barrier, fence or split: `log2 W` steps, rounded up, without data worth counting.
    pub const fn barrier(world: WorldSize) -> Self {
        Self { steps: rounds(world), bytes: Bytes::ZERO }
    }
}

/// The binary logarithm of the world size, rounded up.
const fn rounds(world: WorldSize) -> u32 {
    usize::BITS - (world.get() - 1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(size: usize) -> WorldSize {
        WorldSize::new(size).unwrap()
    }

    const fn traffic(steps: u32, bytes: u64) -> Traffic {
        Traffic { steps, bytes: Bytes::new(bytes) }
    }

    #[test]
    fn steps_are_the_logarithm_rounded_up() {
        let steps = |size| Traffic::barrier(world(size)).steps;
        let logarithms = [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10), (1025, 11)];
        for (size, expected) in logarithms {
            assert_eq!(steps(size), expected, "{size}");
        }
    }

    #[test]
    fn volumes_are_those_of_the_textbook() {
        let bytes = Bytes::new;
        assert_eq!(Traffic::all_reduce(world(4), bytes(1000)), traffic(4, 1500));
        // A rank's part is rounded up: 10 - 3, twice.
        assert_eq!(Traffic::all_reduce(world(3), bytes(10)), traffic(4, 14));
        assert_eq!(Traffic::all_gather(world(4), bytes(1000), bytes(250)), traffic(2, 750));
        assert_eq!(Traffic::all_gather(world(4), bytes(1000), bytes(0)), traffic(2, 1000));
        assert_eq!(Traffic::reduce_scatter(world(5), bytes(1000), bytes(200)), traffic(3, 800));
        assert_eq!(Traffic::broadcast(world(8), bytes(1000)), traffic(3, 1000));
        assert_eq!(Traffic::all_to_all(world(4), bytes(30), bytes(20)), traffic(3, 30));
        assert_eq!(Traffic::all_to_all(world(4), bytes(10), bytes(20)), traffic(3, 20));
        assert_eq!(Traffic::message(bytes(7)), traffic(1, 7));
        assert_eq!(Traffic::read(bytes(7)), traffic(2, 7));
        assert_eq!(Traffic::barrier(world(6)), traffic(3, 0));
    }

    #[test]
    fn a_rank_alone_moves_nothing() {
        let (one, bytes) = (WorldSize::ONE, Bytes::new(1000));
        assert_eq!(Traffic::all_reduce(one, bytes), Traffic::default());
        assert_eq!(Traffic::all_gather(one, bytes, bytes), Traffic::default());
        assert_eq!(Traffic::reduce_scatter(one, bytes, bytes), Traffic::default());
        assert_eq!(Traffic::broadcast(one, bytes), Traffic::default());
        assert_eq!(Traffic::all_to_all(one, Bytes::ZERO, Bytes::ZERO), Traffic::default());
        assert_eq!(Traffic::barrier(one), Traffic::default());
    }

    #[test]
    fn time_is_latency_per_step_and_bytes_over_capacity() {
        let link = Link::new(Duration::from_micros(5), 2e6).unwrap();
        assert_eq!(link.time(traffic(0, 0)), Duration::ZERO);
        assert_eq!(link.time(traffic(3, 0)), Duration::from_micros(15));
        assert_eq!(link.time(traffic(0, 1000)), Duration::from_micros(500));
        assert_eq!(link.time(traffic(2, 3)), Duration::from_nanos(10_000 + 1500));
        assert_eq!(Link::INSTANT.time(traffic(u32::MAX, u64::MAX)), Duration::ZERO);
    }

    #[test]
    fn time_saturates() {
        let link = Link::new(Duration::MAX, f64::MIN_POSITIVE).unwrap();
        assert_eq!(link.time(traffic(2, 1)), Duration::MAX);
        assert_eq!(link.time(traffic(0, u64::MAX)), Duration::MAX);
        assert_eq!(Traffic::all_reduce(world(2), Bytes::new(u64::MAX)).bytes, Bytes::new(u64::MAX));
    }

    #[test]
    fn a_link_carries_something() {
        for bad in [0.0, -1.0, f64::NEG_INFINITY] {
            assert_eq!(Link::new(Duration::ZERO, bad), Err(LinkError { bytes_per_second: bad }));
        }
        let error = Link::new(Duration::ZERO, f64::NAN).unwrap_err();
        assert!(error.to_string().contains("cannot carry NaN bytes per second"), "{error}");
    }
}
