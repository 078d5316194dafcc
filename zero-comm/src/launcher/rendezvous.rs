//! Where the ranks of a job find each other.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use super::error::LaunchError;
use super::placement::Place;

/// Binds the job's listener, once and for good: its address is never given up between now and its use.
///
/// It is on the loopback interface, or, if there are ranks elsewhere, on the one that leads to the first of
/// them.
pub(crate) fn bind(places: &[Place]) -> Result<(TcpListener, SocketAddr), LaunchError> {
    let address = match places.iter().find_map(|place| place.host.as_deref()) {
        Some(host) => towards(host).map_err(|source| LaunchError::Route { host: host.to_owned(), source })?,
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let listen = |address| {
        let listener = TcpListener::bind((address, 0))?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    listen(address).map_err(|source| LaunchError::Listen { address, source })
}

/// Our address as `host` sees it. Connecting a UDP socket asks for the route and sends nothing.
fn towards(host: &str) -> io::Result<IpAddr> {
    let mut problem = io::Error::from(io::ErrorKind::NotFound);
    // The port is of no consequence, but it must be one.
    for address in (host, 9).to_socket_addrs()? {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let route = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        match route {
            Ok(ours) => return Ok(ours.ip()),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

#[cfg(test)]
mod tests {
    use super::towards;

    #[test]
    fn the_route_to_a_loopback_address_is_the_loopback_interface() {
        assert!(towards("127.0.0.2").unwrap().is_loopback());
    }

    #[test]
    fn a_host_without_address_is_an_error() {
        assert!(towards("no-such-host.invalid").is_err());
    }
}
