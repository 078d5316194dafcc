//! What a communicator has under way.

use std::collections::VecDeque;

use cudarc::driver::{CudaEvent, DriverError};

use super::handle::Handle;
use crate::OpKind;

/// A rank's communicator of NCCL, and what it has launched.
pub(super) struct Session {
    pub(super) handle: Handle,
    /// What may not be complete, oldest first.
    launched: VecDeque<Launch>,
    /// How many launches there were.
    launches: u64,
}

/// What went to a stream together.
pub(super) struct Launch {
    /// The first of its operations.
    pub(super) operation: OpKind,
    pub(super) label: String,
    /// What is behind it on its stream.
    pub(super) end: CudaEvent,
}

impl Session {
    pub(super) const fn new(handle: Handle) -> Self {
        Self { handle, launched: VecDeque::new(), launches: 0 }
    }

    pub(super) fn push(&mut self, launch: Launch) -> Result<(), DriverError> {
        // Forgets what is complete, as nobody may ever wait.
        self.oldest()?;
        self.launched.push_back(launch);
        self.launches += 1;
        Ok(())
    }

    /// How many launches there were.
    pub(super) const fn launches(&self) -> u64 {
        self.launches
    }

    /// How many launches are known to be complete.
    pub(super) fn completed(&self) -> u64 {
        self.launches - self.launched.len() as u64
    }

    /// The oldest launch that is not complete. NCCL does what a communicator launches one after the other.
    pub(super) fn oldest(&mut self) -> Result<Option<&Launch>, DriverError> {
        while let Some(launch) = self.launched.front() {
            if !launch.end.try_is_complete()? {
                break;
            }
            self.launched.pop_front();
        }
        Ok(self.launched.front())
    }
}
