//! Giving up on a world, by no more than a communicator can.

use crate::{CommError, Communicator, OpKind, WindowKey};

/// What `operation` gets if the world of `comm` has failed. Waits for nobody and changes nothing.
pub(crate) fn cause(comm: &dyn Communicator, operation: OpKind, label: &str) -> Option<CommError> {
    // A read of the own window needs no other rank, yet fails with the world.
    let mut error = comm.read(comm.rank(), WindowKey::new(0), 0, &mut [], label).err()?;
    match &mut error {
        CommError::WindowMissing { .. } => return None,
        CommError::PeerLost { operation: named, .. } | CommError::Aborted { operation: named, .. } => {
            *named = operation;
        }
        _ => {}
    }
    Some(error)
}

/// Fails the world of `comm` for `reason`; returns what `operation` gets because of the first failure.
pub(crate) fn give_up(comm: &dyn Communicator, operation: OpKind, label: &str, reason: &str) -> CommError {
    comm.abort(reason);
    cause(comm, operation, label).unwrap_or_else(|| CommError::Aborted {
        rank: comm.rank(),
        reason: reason.to_owned(),
        operation,
        label: label.to_owned(),
    })
}
