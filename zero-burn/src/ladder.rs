//! When a gather's backward runs.
//!
//! Burn runs the steps of a backward by depth: the deepest first, and a step's depth is one more than the largest of its
//! inputs'. A gather has one input, a leaf, so all gathers would run last, when the whole backward is over: no gradient
//! could be on its way while others are computed, and all would be alive at once. But inputs that are not tracked count,
//! too. So each gather of a pass gets one more input, a *rung*: a tensor of no use but its depth, which is larger than
//! that of everything computed before.

use std::any::Any;
use std::cell::Cell;
use std::sync::Mutex;

use crate::engine::lock;

/// How much deeper each rung is than the one before: more than the operations that layers usually do between two
/// parameters. After more of them, gathers run somewhat later than they could.
const STRIDE: usize = 64;

/// The most rungs. A pass with more gathers than that has the rest on the last one.
const RUNGS: usize = 1 << 13;

thread_local! {
    /// How far a pass within a backward of this thread has climbed, if there is one.
    static INNER: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs a forward and its backward within a backward: its gathers begin at the lowest rung.
pub(crate) fn inner_pass<T>(pass: impl FnOnce() -> T) -> T {
    /// Goes back to where the pass around this one is, after a panic, too.
    struct Outer(Option<usize>);

    impl Drop for Outer {
        fn drop(&mut self) {
            INNER.set(self.0);
        }
    }

    let _outer = Outer(INNER.replace(Some(0)));
    pass()
}

/// The rungs made so far, and how far the pass has climbed.
#[derive(Debug, Default)]
pub(crate) struct Ladder(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Tensors of the backend's type for autodiff.
    rungs: Vec<Box<dyn Any + Send>>,
    next: usize,
}

impl State {
    /// The number of the next rung.
    fn take(&mut self) -> usize {
        let inner = INNER.get();
        let taken = inner.unwrap_or(self.next);
        let next = (taken + 1).min(RUNGS - 1);
        match inner {
            Some(_) => INNER.set(Some(next)),
            None => self.next = next,
        }
        taken
    }
}

impl Ladder {
    /// The rung for the next gather. `begin` gives a tensor of no depth, `deepen` one that is one step deeper.
    pub(crate) fn climb<T: Clone + Send + 'static>(
        &self,
        begin: impl Fn() -> T,
        deepen: impl Fn(T) -> T,
    ) -> T {
        let (wanted, mut at, mut rung) = {
            let mut state = lock(&self.0);
            let wanted = state.take();
            let at = wanted.min(state.rungs.len().saturating_sub(1));
            let rung = state.rungs.get(at).and_then(|rung| rung.downcast_ref::<T>()).cloned();
            (wanted, at, rung.unwrap_or_else(&begin))
        };
        loop {
            let mut state = lock(&self.0);
            if state.rungs.len() == at {
                state.rungs.push(Box::new(rung.clone()));
            }
            // Burn takes locks of its own, so a rung is made between ours.
            drop(state);
            if at >= wanted {
                return rung;
            }
            rung = (0..STRIDE).fold(rung, |rung, _| deepen(rung));
            at += 1;
        }
    }

    /// Leaves a rung out: what comes next is deeper than a block that is on the tape as one operation.
    pub(crate) fn pass_by(&self) {
        lock(&self.0).take();
    }

    /// A pass is over.
    pub(crate) fn step_down(&self) {
        lock(&self.0).next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gather_of_a_pass_is_deeper_than_the_one_before() {
        let ladder = Ladder::default();
        for _ in 0..3 {
            let depths: Vec<_> = (0..100).map(|_| ladder.climb(|| 0, |depth: usize| depth + 1)).collect();
            assert_eq!(depths, (0..100).map(|rung| rung * STRIDE).collect::<Vec<_>>());
            ladder.step_down();
        }
        let climb = || ladder.climb(|| 0, |depth: usize| depth + 1);
        assert_eq!(climb(), 0);
        ladder.pass_by();
        assert_eq!(climb(), 2 * STRIDE);
        assert_eq!(inner_pass(|| [climb(), climb()]), [0, STRIDE]);
        assert_eq!(climb(), 3 * STRIDE);
        ladder.step_down();
        let last = (0..RUNGS + 10).map(|_| ladder.climb(|| 0, |depth: usize| depth + 1)).last();
        assert_eq!(last, Some((RUNGS - 1) * STRIDE));
    }
}
