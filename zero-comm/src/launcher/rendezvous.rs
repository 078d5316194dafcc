//! Where the ranks of a job find each other.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use super::error::LaunchError;
use super::placement::Place;
use crate::network;

/// How long the name of another machine may take to be resolved.
const RESOLVING: Duration = Duration::from_secs(60);

/// Binds the job's listener, once and for good: its address is never given up between now and its use.
///
/// It is on the loopback interface, or, if there are ranks elsewhere, on the one that leads to the first of
/// them.
pub(crate) fn bind(places: &[Place]) -> Result<(TcpListener, SocketAddr), LaunchError> {
    let address = match places.iter().find_map(|place| place.host.as_deref()) {
        // The port is of no consequence, but it must be one.
        Some(host) => network::resolve(&format!("{host}:9"), RESOLVING)
            .and_then(|addresses| network::own_address_towards(&addresses))
            .map_err(|source| LaunchError::Route { host: host.to_owned(), source })?,
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let listen = |address| {
        let listener = TcpListener::bind((address, 0))?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    listen(address).map_err(|source| LaunchError::Listen { address, source })
}
