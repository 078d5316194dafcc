//! The job's coordinator, which this program hosts for its ranks.

use std::net::TcpListener;
use std::sync::mpsc::Sender;
use std::time::Duration;

use zero_core::WorldSize;

use super::error::LaunchError;
use super::job::Event;
use crate::{Coordinator, CoordinatorOptions, Token};

/// Hosts the coordinator on `listener`, whose address the ranks know as `ZERO_RENDEZVOUS`. All have to join within
/// `deadline`. If their world fails, that is an event.
pub(crate) fn host(
    listener: TcpListener,
    ranks: usize,
    token: &Token,
    deadline: Duration,
    events: Sender<Event>,
) -> Result<Coordinator, LaunchError> {
    let options = CoordinatorOptions {
        size: WorldSize::new(ranks).unwrap_or(WorldSize::ONE),
        token: token.clone(),
        deadline,
        host: None,
    };
    let failed = move || {
        // Nobody hears it when the job is over.
        let _ = events.send(Event::WorldFailed);
    };
    Coordinator::watched(listener, options, failed).map_err(LaunchError::Coordinator)
}
