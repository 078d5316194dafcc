//! How often each parameter stands on a tape.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use zero_core::ParameterIndex;

/// One token per gather, held by the tape and dropped with it: so it is known exactly whether a gradient may still come.
#[derive(Debug)]
pub(crate) struct Uses(Box<[AtomicUsize]>);

impl Uses {
    pub(crate) fn new(parameters: usize) -> Arc<Self> {
        Arc::new(Self((0..parameters).map(|_| AtomicUsize::new(0)).collect()))
    }

    /// Gathers of `parameter` on any living tape whose gradient may still arrive.
    pub(crate) fn pending(&self, parameter: ParameterIndex) -> usize {
        self.0[parameter.index()].load(Ordering::Acquire)
    }
}

/// One gather on a tape.
#[derive(Debug)]
pub(crate) struct Use {
    uses: Arc<Uses>,
    parameter: ParameterIndex,
}

impl Use {
    pub(crate) fn new(uses: &Arc<Uses>, parameter: ParameterIndex) -> Self {
        uses.0[parameter.index()].fetch_add(1, Ordering::AcqRel);
        Self { uses: uses.clone(), parameter }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // Tapes are freed under Burn's global lock: nothing here may wait.
        self.uses.0[self.parameter.index()].fetch_sub(1, Ordering::AcqRel);
    }
}
