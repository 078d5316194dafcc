//! Where connections come in and go out.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use zero_core::Rank;

use super::channel::{Channel, Purpose};
use super::service::Service;
use crate::CommError;
use crate::control::{self, HandshakeError, Timed, Token, tune};
use crate::lock;
use crate::process::{Standing, Wait};

/// How long a stranger is listened to.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many connections may be at their handshake, beside those of the ranks.
const STRANGERS: usize = 64;

/// How long to wait for an answer to a call before the world is looked at again.
const CALL: Duration = Duration::from_millis(500);

/// How long to wait after a call that failed.
const PAUSE: Duration = Duration::from_millis(20);

/// A rank's listening socket and what came in by it.
pub(super) struct Door {
    standing: Arc<Standing>,
    token: Token,
    /// By rank.
    addresses: Vec<Option<SocketAddr>>,
    service: Arc<Service>,
    /// Connections that nobody has claimed yet.
    arrived: Mutex<HashMap<Channel, TcpStream>>,
    changed: Condvar,
    /// Connections at their handshake.
    greeted: AtomicUsize,
    closing: AtomicBool,
    /// Wakes the thread that accepts.
    wake: OwnedFd,
}

impl Door {
    pub(super) fn new(
        standing: Arc<Standing>,
        token: Token,
        addresses: Vec<Option<SocketAddr>>,
        service: Arc<Service>,
    ) -> io::Result<Self> {
        Ok(Self {
            standing,
            token,
            addresses,
            service,
            arrived: Mutex::default(),
            changed: Condvar::new(),
            greeted: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
        })
    }

    /// Takes connections in until the door is closed.
    pub(super) fn keep(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let mut polled = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            // An interrupted wait is tried again.
            let _ = poll(&mut polled, None);
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            match listener.accept() {
                Ok((stream, address)) => self.greet(stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    // Out of file descriptors, most likely; trying on at once would not help.
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            tracing::warn!(%error, "could not wake the thread that accepts connections");
        }
    }

    /// Finds out on a thread of its own who it is that connected.
    fn greet(self: &Arc<Self>, stream: TcpStream, address: SocketAddr) {
        let most = STRANGERS + 2 * self.addresses.len();
        if self.greeted.fetch_add(1, Ordering::AcqRel) >= most {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, "too many connections at a time; closed one");
            return;
        }
        let door = Arc::clone(self);
        let spawned = thread::Builder::new().name("zero-comm-greet".to_owned()).spawn(move || {
            let met = door.shake_hands(&stream);
            door.greeted.fetch_sub(1, Ordering::AcqRel);
            match met {
                Ok(Channel { purpose: Purpose::Windows, .. }) => door.service.answer(&stream),
                Ok(channel) => {
                    lock(&door.arrived).insert(channel, stream);
                    door.changed.notify_all();
                }
                Err(error) => tracing::warn!(%address, %error, "refused a connection"),
            }
        });
        if let Err(error) = spawned {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, %error, "no thread for a connection");
        }
    }

    fn shake_hands(&self, stream: &TcpStream) -> Result<Channel, HandshakeError> {
        stream.set_nonblocking(false)?;
        tune(stream)?;
        let mut timed = Timed::new(stream, Instant::now() + HANDSHAKE);
        let hello = control::accept(&mut timed, &self.token, PURPOSE)?;
        Channel::decode(&hello, self.standing.rank(), self.standing.size()).ok_or(HandshakeError::Stranger)
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
            match self.call(address, channel) {
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

    fn call(&self, address: SocketAddr, channel: Channel) -> Result<TcpStream, HandshakeError> {
        let stream = TcpStream::connect_timeout(&address, CALL)?;
        tune(&stream)?;
        let mut timed = Timed::new(&stream, Instant::now() + HANDSHAKE);
        if control::connect(&mut timed, &self.token, &channel.encode())? == PURPOSE {
            Ok(stream)
        } else {
            Err(HandshakeError::Stranger)
        }
    }
}

/// The hello of who accepts.
const PURPOSE: &[u8] = b"data";

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("rank", &self.standing.rank()).finish_non_exhaustive()
    }
}
