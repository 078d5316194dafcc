//! Where connections come in.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use zero_core::WorldSize;

use super::{Timed, Token, handshake, tune};
use crate::open_files;

/// How long a stranger is listened to.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many connections may be at their handshake, beside those of the ranks.
const STRANGERS: usize = 64;

/// How long to wait after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(20);

/// For whom connections are received.
pub(crate) trait Host: Send + Sync + 'static {
    /// Who comes.
    type Guest;

    /// Finds out who it is that knows the token and said `hello`; what else there is to say comes on `stream`.
    ///
    /// # Errors
    ///
    /// Why it is refused.
    fn meet(&self, hello: &[u8], stream: &mut Timed<'_>) -> Result<Self::Guest, String>;

    /// Takes the connection over, on a thread of its own.
    fn take(&self, guest: Self::Guest, stream: TcpStream, address: SocketAddr);

    /// Nobody can be taken in, because this process has too many open files.
    fn lacks_files(&self, error: io::Error);
}

/// Takes connections in until it is closed. A stranger costs a thread for a while, and there are few at a time.
#[derive(Debug)]
pub(crate) struct Reception {
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    token: Token,
    /// The hello of this side.
    hello: &'static [u8],
    /// How many connections may be at their handshake.
    most: usize,
    /// Connections at their handshake.
    greeted: AtomicUsize,
    closing: AtomicBool,
    /// Wakes the thread that accepts.
    wake: OwnedFd,
}

impl Reception {
    /// Takes in who comes to `listener`, knows `token` and is let in by `host`. This side's hello is `hello`.
    pub(crate) fn open<H: Host>(
        listener: TcpListener,
        token: Token,
        hello: &'static [u8],
        size: WorldSize,
        host: Arc<H>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            token,
            hello,
            most: STRANGERS + 2 * size.get(),
            greeted: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
        });
        let thread = thread::Builder::new().name("zero-comm-reception".to_owned());
        let receiving = Arc::clone(&shared);
        let accepting = thread.spawn(move || receiving.receive(&listener, &host))?;
        Ok(Self { shared, accepting: Some(accepting) })
    }

    /// Takes nobody in any more. Those who are in stay.
    pub(crate) fn close(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        self.shared.closing.store(true, Ordering::Release);
        if let Err(error) = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes()) {
            tracing::warn!(%error, "could not wake the thread that accepts connections");
        }
        if accepting.join().is_err() {
            tracing::warn!("the thread that accepts connections panicked");
        }
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn receive<H: Host>(self: &Arc<Self>, listener: &TcpListener, host: &Arc<H>) {
        loop {
            let mut polled = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            // An interrupted wait is tried again.
            let _ = poll(&mut polled, None);
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            match listener.accept() {
                Ok((stream, address)) => self.greet(stream, address, host),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    if open_files::are_exhausted(&error) {
                        host.lacks_files(error);
                    }
                    // Trying on at once would not help.
                    thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Finds out on a thread of its own who it is that connected.
    fn greet<H: Host>(self: &Arc<Self>, stream: TcpStream, address: SocketAddr, host: &Arc<H>) {
        if self.greeted.fetch_add(1, Ordering::AcqRel) >= self.most {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, "too many connections at a time; closed one");
            return;
        }
        let (shared, host) = (Arc::clone(self), Arc::clone(host));
        let spawned = thread::Builder::new().name("zero-comm-guest".to_owned()).spawn(move || {
            let guest = shared.meet(&stream, &*host);
            shared.greeted.fetch_sub(1, Ordering::AcqRel);
            match guest {
                Ok(guest) => host.take(guest, stream, address),
                Err(how) => tracing::warn!(%address, how, "refused a connection"),
            }
        });
        if let Err(error) = spawned {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, %error, "no thread for a connection");
        }
    }

    fn meet<H: Host>(&self, stream: &TcpStream, host: &H) -> Result<H::Guest, String> {
        let told = |error: io::Error| error.to_string();
        stream.set_nonblocking(false).map_err(told)?;
        tune(stream).map_err(told)?;
        let mut timed = Timed::new(stream, Instant::now() + HANDSHAKE);
        let hello =
            handshake::accept(&mut timed, &self.token, self.hello).map_err(|error| error.to_string())?;
        host.meet(&hello, &mut timed)
    }
}
