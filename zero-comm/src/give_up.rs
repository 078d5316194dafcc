//! Giving up on a world, by no more than a communicator can.

use crate::{CommError, Communicator, OpKind, WindowKey};

/// What `operation` gets if the world of `comm` has failed. Waits for nobody and changes nothing.
pub(crate) fn cause(comm: &dyn Communicator, operation: OpKind, label: &str) -> Option<CommError> {
    // A read of the own window needs no other rank, yet fails with the world.
    match comm.read(comm.rank(), WindowKey::new(0), 0, &mut [], label) {
        Ok(()) | Err(CommError::WindowMissing { .. }) => None,
        Err(error) => Some(error.of(operation, label)),
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use zero_core::WorldSize;

    use super::*;
    use crate::LocalWorld;

    #[test]
    fn only_a_failed_world_is_a_cause() {
        let comm = LocalWorld::new(WorldSize::ONE).communicators().remove(0);
        assert_eq!(cause(&*comm, OpKind::Barrier, "ours"), None);
        comm.expose(WindowKey::new(0), Arc::new(vec![1])).unwrap();
        assert_eq!(cause(&*comm, OpKind::Barrier, "ours"), None);
        comm.abort("enough");
        let (rank, operation, label) = (comm.rank(), OpKind::Barrier, "ours".to_owned());
        let aborted = CommError::Aborted { rank, reason: "enough".to_owned(), operation, label };
        assert_eq!(cause(&*comm, OpKind::Barrier, "ours"), Some(aborted));
    }
}
