//! Where connections come in and go out.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use zero_core::Rank;

use super::channel::{Channel, Purpose};
use super::service::Service;
use crate::CommError;
use crate::control::{self, HANDSHAKE, HandshakeError, Host, Timed, Token, tune};
use crate::failure::Failure;
use crate::process::{Standing, Wait};
use crate::{lock, open_files};

/// How long to wait for a connection before the world is looked at again.
const CALL: Duration = Duration::from_millis(500);

/// How long to wait after a call that failed.
const PAUSE: Duration = Duration::from_millis(20);

/// The hello of who accepts.
pub(super) const PURPOSE: &[u8] = b"data";

/// What comes in by a rank's listening socket, and what goes out.
pub(super) struct Door {
    standing: Arc<Standing>,
    token: Token,
    /// By rank.
    addresses: Vec<Option<SocketAddr>>,
    service: Arc<Service>,
    /// Connections that nobody has claimed yet.
    arrived: Mutex<HashMap<Channel, TcpStream>>,
    changed: Condvar,
}

impl Door {
    pub(super) fn new(
        standing: Arc<Standing>,
        token: Token,
        addresses: Vec<Option<SocketAddr>>,
        service: Arc<Service>,
    ) -> Self {
        let (arrived, changed) = (Mutex::default(), Condvar::new());
        Self { standing, token, addresses, service, arrived, changed }
    }

    /// Waits for the connection that `channel.from` makes.
    pub(super) fn claim(&self, channel: Channel, wait: &Wait<'_>) -> Result<TcpStream, CommError> {
        let mut arrived = lock(&self.arrived);
        loop {
            if let Some(stream) = arrived.remove(&channel) {
                return Ok(stream);
            }
            let (guard, _) =
                self.changed.wait_timeout(arrived, wait.slice()).unwrap_or_else(PoisonError::into_inner);
            if !guard.contains_key(&channel) {
                // It may have to tell the coordinator, which takes its time.
                drop(guard);
                wait.check(|| vec![channel.from])?;
                arrived = lock(&self.arrived);
            } else {
                arrived = guard;
            }
        }
    }

    /// Connects to another rank.
    pub(super) fn dial(&self, peer: Rank, purpose: Purpose, wait: &Wait<'_>) -> Result<TcpStream, CommError> {
        let channel = Channel { purpose, from: self.standing.rank(), to: peer };
        let Some(address) = self.addresses[peer.index()] else {
            return Err(wait.broken(peer, "it has told no address"));
        };
        loop {
            match self.call(address, channel, wait)? {
                Ok(stream) => return Ok(stream),
                Err(error @ (HandshakeError::Refused | HandshakeError::Version { .. })) => {
                    return Err(wait.broken(peer, &error.to_string()));
                }
                Err(error) => {
                    tracing::debug!(%address, %error, "could not connect yet");
                    wait.check(|| vec![peer])?;
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    fn call(&self, address: SocketAddr, channel: Channel, wait: &Wait<'_>) -> Result<Called, CommError> {
        let stream = match TcpStream::connect_timeout(&address, CALL.min(wait.left())) {
            Ok(stream) => stream,
            Err(error) if open_files::are_exhausted(&error) => {
                let operation = wait.operation();
                return Err(self.lack_files(error).error(operation.kind, operation.label));
            }
            Err(error) => return Ok(Err(error.into())),
        };
        let mut line =
            Line { stream: &stream, peer: channel.to, until: Instant::now() + HANDSHAKE, wait, end: None };
        let hello = tune(&stream)
            .map_err(HandshakeError::from)
            .and_then(|()| control::connect(&mut line, &self.token, &channel.encode()));
        if let Some(end) = line.end {
            return Err(end);
        }
        Ok(match hello {
            Ok(hello) if hello == PURPOSE => Ok(stream),
            Ok(_) => Err(HandshakeError::Stranger),
            Err(error) => Err(error),
        })
    }

    /// Fails the world, because this rank has no file for a connection.
    fn lack_files(&self, error: io::Error) -> &Failure {
        let reason = format!("it cannot connect with other ranks: {}", open_files::advised(error));
        self.standing.fail(Failure::Aborted { rank: self.standing.rank(), reason })
    }
}

/// What became of a call.
type Called = Result<TcpStream, HandshakeError>;

impl Host for Door {
    type Guest = Channel;

    fn meet(&self, hello: &[u8], _: &mut Timed<'_>) -> Result<Channel, String> {
        let channel = Channel::decode(hello, self.standing.rank(), self.standing.size());
        channel.ok_or_else(|| "it names no channel that can be".to_owned())
    }

    fn take(&self, channel: Channel, stream: TcpStream, _: SocketAddr) {
        if channel.purpose == Purpose::Windows {
            match self.service.answer(&stream) {
                Err(error) if open_files::are_exhausted(&error) => self.lacks_files(error),
                Err(error) => tracing::warn!(%error, "could not serve a reader of windows"),
                Ok(()) => {}
            }
        } else {
            lock(&self.arrived).insert(channel, stream);
            self.changed.notify_all();
        }
    }

    fn lacks_files(&self, error: io::Error) {
        self.lack_files(error);
    }
}

/// A stream at its handshake, for as long as the operation that needs it is to go on. The kernel of a host accepts
/// for processes that are stopped, too.
struct Line<'a> {
    stream: &'a TcpStream,
    peer: Rank,
    until: Instant,
    wait: &'a Wait<'a>,
    /// Why the operation does not go on.
    end: Option<CommError>,
}

impl Line<'_> {
    /// Tries until something moves.
    fn attempt(
        &mut self,
        mut act: impl FnMut(&TcpStream, Duration) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match act(self.stream, self.wait.slice()) {
                // Which of them it is differs from system to system.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                outcome => return outcome,
            }
            if let Err(error) = self.wait.check(|| vec![self.peer]) {
                self.end = Some(error);
            }
            if self.end.is_some() || self.until <= Instant::now() {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Read for Line<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.attempt(|mut stream, limit| {
            stream.set_read_timeout(Some(limit))?;
            stream.read(into)
        })
    }
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(|mut stream, limit| {
            stream.set_write_timeout(Some(limit))?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("rank", &self.standing.rank()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc;

    use zero_core::WorldSize;

    use super::*;
    use crate::OpKind;
    use crate::process::Operation;

    const PEER: Rank = Rank::new(1);

    /// The door of rank 0 of two, whose peer's process is stopped: the kernel accepts, and nobody answers.
    fn before_a_stopped_peer() -> (Door, Arc<Standing>, TcpListener) {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let size = WorldSize::new(2).unwrap();
        let standing = Standing::new(Rank::ROOT, size, None, mpsc::channel().0);
        let addresses = vec![None, Some(silent.local_addr().unwrap())];
        let own = Arc::clone(&standing);
        (Door::new(own, Token::generate().unwrap(), addresses, Arc::default()), standing, silent)
    }

    fn dial(door: &Door, standing: &Standing, deadline: Duration) -> CommError {
        let operation = Operation { kind: OpKind::Read, label: "weights", sequence: 0, expected: &[] };
        door.dial(PEER, Purpose::Windows, &Wait::new(standing, operation, deadline)).unwrap_err()
    }

    #[test]
    fn a_peer_that_does_not_answer_is_waited_for_until_the_deadline() {
        let (door, standing, _silent) = before_a_stopped_peer();
        let (begun, deadline) = (Instant::now(), Duration::from_millis(50));
        let error = dial(&door, &standing, deadline);
        assert!(
            matches!(&error, CommError::Timeout { missing, after, .. } if *missing == [PEER] && *after == deadline),
            "{error}"
        );
        assert!(begun.elapsed() < HANDSHAKE);
    }

    #[test]
    fn who_waits_for_an_answer_learns_that_the_world_has_failed() {
        let (door, standing, silent) = before_a_stopped_peer();
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                // What it says shows that it waits for an answer.
                let (mut caller, _) = silent.accept().unwrap();
                caller.read_exact(&mut [0]).unwrap();
                standing.settle(Failure::Aborted { rank: PEER, reason: "enough".to_owned() });
                // Held until it gives up.
                assert!(caller.read_to_end(&mut Vec::new()).is_ok());
            });
            let error = dial(&door, &standing, Duration::from_secs(60));
            assert!(matches!(&error, CommError::Aborted { rank: PEER, .. }), "{error}");
        });
        assert!(begun.elapsed() < HANDSHAKE);
    }
}
