//! Where hosts are, and how to get there, within a time.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::open_files;

/// The shortest time that the system takes for a limit.
const LEAST: Duration = Duration::from_millis(1);

/// The addresses of `host`, which is `HOST:PORT`; never empty.
pub(crate) fn resolve(host: &str, limit: Duration) -> io::Result<Vec<SocketAddr>> {
    match host.parse() {
        Ok(address) => Ok(vec![address]),
        Err(_) => look_up(host.to_owned(), limit),
    }
}

/// The system's resolver knows no deadline, so a thread of its own asks it, and is left to itself if `limit` passes.
fn look_up(host: impl ToSocketAddrs + Send + 'static, limit: Duration) -> io::Result<Vec<SocketAddr>> {
    let (found, answer) = mpsc::channel();
    let look = move || {
        // Who has lost patience does not hear it.
        let _ = found.send(host.to_socket_addrs().map(Iterator::collect));
    };
    thread::Builder::new().name("zero-comm-resolve".to_owned()).spawn(look)?;
    let addresses: io::Result<Vec<_>> = answer.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            io::Error::new(io::ErrorKind::TimedOut, format!("the name was not resolved within {limit:?}"))
        }
        RecvTimeoutError::Disconnected => io::Error::other("the name could not be resolved"),
    })?;
    let addresses = addresses.map_err(open_files::advised)?;
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    Ok(addresses)
}

/// Connects to the first of `addresses` where somebody accepts. Those that are left have equal shares of the time
/// that is left.
pub(crate) fn connect(addresses: &[SocketAddr], limit: Duration) -> io::Result<TcpStream> {
    let start = Instant::now();
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for (tried, address) in addresses.iter().enumerate() {
        let others = u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        let share = limit.saturating_sub(start.elapsed()) / others;
        match TcpStream::connect_timeout(address, share.max(LEAST)) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                failure = open_files::advised(error);
                if open_files::are_exhausted(&failure) {
                    break;
                }
            }
        }
    }
    Err(failure)
}

/// This host's address on the way to the first of `addresses` that there is a way to.
///
/// Connecting a UDP socket asks for the route and sends nothing.
pub(crate) fn own_address_towards(addresses: &[SocketAddr]) -> io::Result<IpAddr> {
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let route = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(address)?;
            socket.local_addr()
        });
        match route {
            Ok(own) => return Ok(own.ip()),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::vec;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_host_without_address_is_an_error() {
        assert!(resolve("no-such-host.invalid:9", LONG).is_err());
        let none: &[SocketAddr] = &[];
        assert_eq!(look_up(none, LONG).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_is_an_address_already_is_not_looked_up() {
        for text in ["127.0.0.1:9", "[::1]:9"] {
            assert_eq!(resolve(text, Duration::ZERO).unwrap(), [text.parse().unwrap()]);
        }
        assert_eq!(resolve("localhost", LONG).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// A host that nobody ever finds.
    struct Lost(mpsc::Receiver<()>);

    impl ToSocketAddrs for Lost {
        type Iter = vec::IntoIter<SocketAddr>;

        fn to_socket_addrs(&self) -> io::Result<Self::Iter> {
            let _ = self.0.recv();
            Ok(Vec::new().into_iter())
        }
    }

    #[test]
    fn looking_a_name_up_ends_at_the_limit() {
        let (_hold, lost) = mpsc::channel();
        let error = look_up(Lost(lost), Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }

    #[test]
    fn the_first_address_where_somebody_accepts_is_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert_eq!(connect(&[nobody, here], LONG).unwrap().peer_addr().unwrap(), here);
        assert_eq!(connect(&[nobody], LONG).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        // The queue of a listener that accepts nobody is full soon; the system then answers no more.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = silent.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&there, Duration::from_millis(100)) {
            queue.push(stream);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let stream = connect(&[there, here], Duration::from_secs(2)).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), here);
    }

    #[test]
    fn the_route_to_a_loopback_address_is_the_loopback_interface() {
        let there: SocketAddr = "127.0.0.2:9".parse().unwrap();
        assert!(own_address_towards(&[there]).unwrap().is_loopback());
        assert!(own_address_towards(&[]).is_err());
    }
}
