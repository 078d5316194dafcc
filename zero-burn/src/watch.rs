//! What a run that is not on the tape would have put there: gathers under way to a block that backward runs again.

use std::cell::RefCell;

use crate::gather::{Source, WeakSource};
use crate::uses::Use;

thread_local! {
    /// The innermost run last.
    static WATCHES: RefCell<Vec<Vec<Watched>>> = const { RefCell::new(Vec::new()) };
}

/// A gather of a parameter that will have its gradient by another run.
#[derive(Debug)]
pub(crate) struct Watched {
    source: WeakSource,
    version: u64,
    _used: Use,
}

impl Watched {
    /// Notes if parameters have changed since.
    pub(crate) fn expect_unchanged(&self) {
        if let Some(source) = self.source.upgrade() {
            source.engine.expect_version(source.parameter, self.version);
        }
    }
}

/// Runs `run`, and gives the gathers in it that were not on the tape. What is still needed of them comes by another run:
/// until they are dropped, their gradients are waited for.
pub(crate) fn watch<T>(run: impl FnOnce() -> T) -> (T, Vec<Watched>) {
    /// Ends what a panic would leave open.
    struct Depth(usize);

    impl Drop for Depth {
        fn drop(&mut self) {
            WATCHES.with_borrow_mut(|watches| watches.truncate(self.0));
        }
    }

    let _depth = Depth(WATCHES.with_borrow(Vec::len));
    WATCHES.with_borrow_mut(|watches| watches.push(Vec::new()));
    let result = run();
    (result, WATCHES.with_borrow_mut(Vec::pop).unwrap_or_default())
}

/// A gather that is not on the tape.
pub(crate) fn see(source: &Source) {
    WATCHES.with_borrow_mut(|watches| {
        let Some(watch) = watches.last_mut() else { return };
        if source.engine.parameter(source.parameter).trainable() {
            if watch.is_empty() {
                source.engine.ladder.pass_by();
            }
            watch.push(Watched {
                source: WeakSource::new(source),
                version: source.engine.version(),
                _used: Use::new(&source.engine.uses, source.parameter),
            });
        }
    });
}
