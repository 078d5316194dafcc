//! The job's coordinator, which this program hosts for its ranks.

use std::net::TcpListener;
use std::time::Duration;

use zero_core::WorldSize;

use super::error::LaunchError;
use crate::{Coordinator, CoordinatorOptions, Token};

/// Hosts the coordinator on `listener`, whose address the ranks know as `ZERO_RENDEZVOUS`. All have to join within
/// `deadline`.
pub(crate) fn host(
    listener: TcpListener,
    ranks: usize,
    token: &Token,
    deadline: Duration,
) -> Result<Coordinator, LaunchError> {
    let options = CoordinatorOptions {
        size: WorldSize::new(ranks).unwrap_or(WorldSize::ONE),
        token: token.clone(),
        deadline,
        host: None,
    };
    Coordinator::new(listener, options).map_err(LaunchError::Coordinator)
}
