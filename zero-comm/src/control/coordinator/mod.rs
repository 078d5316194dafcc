//! The coordinator of a world.
//!
//! One thread takes connections in, each of which has a thread that shakes hands and then reads; all tell what
//! they hear to the thread that keeps the [`World`](world::World) and sends what it decides.

mod inquiry;
mod world;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use zero_core::{Rank, WorldSize};

use super::frame::{self, MAX_FROM_RANK, MAX_TO_RANK};
use super::message::{FromRank, Hello, PURPOSE};
use super::{Timed, Token, handshake, tune};
use crate::flight::FlightReport;
use crate::lock;
use world::LineId;
#[cfg(feature = "fuzzing")]
pub(super) use world::{Action, World};
#[cfg(not(feature = "fuzzing"))]
use world::{Action, World};

/// How long a stranger is listened to.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many connections may be at their handshake, beside those of the ranks.
const STRANGERS: usize = 64;

/// How long a rank may leave what is sent to it unread, once the buffers between are full.
const UNREAD: Duration = Duration::from_secs(1);

/// How long the ranks have to read what was said last.
const FAREWELL: Duration = Duration::from_millis(500);

/// How often the world is looked at if nothing happens.
const IDLE: Duration = Duration::from_secs(60);

/// How a coordinator does its work.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// How many ranks there are.
    pub size: WorldSize,
    /// What proves that a process belongs to the job.
    pub token: Token,
    /// How long it waits for all ranks to join. A rank whose host is not heard of for that long, or for ten
    /// seconds if that is longer, is taken for dead.
    pub deadline: Duration,
    /// The rank in whose process it runs; `None` if it runs in a launcher's.
    pub host: Option<Rank>,
}

/// Brings the ranks of one world together, and tells all of them why it failed, if it fails.
///
/// It works until it is dropped.
pub struct Coordinator {
    address: SocketAddr,
    token: Token,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    world: Mutex<World>,
    /// Connections at their handshake.
    greeted: AtomicUsize,
    closing: AtomicBool,
    /// Wakes the thread that accepts.
    wake: OwnedFd,
    lines: AtomicUsize,
}

/// What happens on a connection.
enum Event {
    Joined {
        line: LineId,
        stream: TcpStream,
        address: SocketAddr,
        hello: Box<Hello>,
    },
    Heard {
        line: LineId,
        message: FromRank,
    },
    Lost {
        line: LineId,
        how: String,
    },
    /// The coordinator is dropped.
    Closing,
}

impl Coordinator {
    /// Coordinates a world whose ranks connect to `listener`.
    ///
    /// # Errors
    ///
    /// Those of the operating system.
    pub fn new(listener: TcpListener, options: CoordinatorOptions) -> io::Result<Self> {
        let CoordinatorOptions { size, token, deadline, host } = options;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            world: Mutex::new(World::new(size, host, deadline, Instant::now())),
            greeted: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC)?,
            lines: AtomicUsize::new(0),
        });
        let (events, heard) = mpsc::channel();
        let mut coordinator = Self { address, token: token.clone(), shared, threads: Vec::new() };
        // Dropped on an error, the coordinator ends those threads that it has.
        let shared = Arc::clone(&coordinator.shared);
        coordinator.spawn("zero-comm-coordinator", move || shared.decide(&heard))?;
        let shared = Arc::clone(&coordinator.shared);
        coordinator.spawn("zero-comm-reception", move || {
            let most = STRANGERS + 2 * size.get();
            shared.receive(&listener, &token, most, &events);
            // The thread that decides may be gone, with nobody left to tell.
            let _ = events.send(Event::Closing);
        })?;
        Ok(coordinator)
    }

    /// Where ranks connect.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The token that ranks have to know.
    pub const fn token(&self) -> &Token {
        &self.token
    }

    /// Why the world failed, or did not begin; `None` as long as it has not.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.world).failure()
    }

    /// The rank that the failure originates from, if there is one and that can be told.
    pub fn blamed(&self) -> Option<Rank> {
        lock(&self.shared.world).blamed()
    }

    /// What all ranks did last, once the world has failed and they have told.
    pub fn report(&self) -> Option<FlightReport> {
        lock(&self.shared.world).report().cloned()
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(())
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        if let Err(error) = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes()) {
            tracing::warn!(%error, "could not wake the coordinator");
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::warn!("a thread of the coordinator panicked");
            }
        }
    }
}

impl Shared {
    /// Takes connections in until the coordinator is dropped.
    fn receive(self: &Arc<Self>, listener: &TcpListener, token: &Token, most: usize, events: &Sender<Event>) {
        loop {
            let mut polled = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            // An interrupted wait is tried again.
            let _ = poll(&mut polled, None);
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            match listener.accept() {
                Ok((stream, address)) => self.greet(stream, address, token, most, events),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    // Out of file descriptors, most likely; trying on at once would not help.
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    /// Finds out on a thread of its own who it is that connected, and then listens to it.
    fn greet(
        self: &Arc<Self>,
        stream: TcpStream,
        address: SocketAddr,
        token: &Token,
        most: usize,
        events: &Sender<Event>,
    ) {
        if self.greeted.fetch_add(1, Ordering::AcqRel) >= most {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, "too many connections at a time; closed one");
            return;
        }
        let (shared, token, events) = (Arc::clone(self), token.clone(), events.clone());
        let line = self.lines.fetch_add(1, Ordering::Relaxed);
        let spawned = thread::Builder::new().name("zero-comm-line".to_owned()).spawn(move || {
            let joined = introduce(&stream, &token);
            shared.greeted.fetch_sub(1, Ordering::AcqRel);
            let (hello, rest, clone) = match joined {
                Ok(joined) => joined,
                Err(how) => {
                    tracing::warn!(%address, how, "refused a connection");
                    return;
                }
            };
            let hello = Box::new(hello);
            if events.send(Event::Joined { line, stream: clone, address, hello }).is_ok() {
                let how =
                    listen(&stream, rest, |message| events.send(Event::Heard { line, message }).is_ok());
                // Nobody is left to tell if the coordinator is gone.
                let _ = events.send(Event::Lost { line, how });
            }
        });
        if let Err(error) = spawned {
            self.greeted.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%address, %error, "no thread for a connection");
        }
    }

    /// Tells the world what happens, and does what it decides.
    fn decide(&self, events: &Receiver<Event>) {
        let mut lines = Lines::default();
        let mut until: Option<Instant> = None;
        loop {
            let next = lock(&self.world).next().into_iter().chain(until).min();
            let left = next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now()));
            let event = match events.recv_timeout(left) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let now = Instant::now();
            let mut world = lock(&self.world);
            match event {
                None => world.pass(now),
                Some(Event::Closing) => {
                    until = now.checked_add(FAREWELL);
                    lines.say_farewell();
                }
                Some(Event::Joined { line, stream, address, hello }) => {
                    let rank = hello.rank;
                    lines.open.insert(line, Line { stream, rank: None });
                    if world.join(line, address, *hello, now) {
                        lines.seat(line, rank);
                    }
                }
                Some(Event::Heard { line, message }) => {
                    if let Some(rank) = lines.rank(line) {
                        if let Err(flaw) = world.hear(rank, message, now) {
                            lines.close(line);
                            world.lose(rank, flaw, now);
                        }
                    }
                }
                Some(Event::Lost { line, how }) => {
                    let rank = lines.rank(line);
                    lines.close(line);
                    if let Some(rank) = rank.filter(|_| until.is_none()) {
                        world.lose(rank, &how, now);
                    }
                }
            }
            // What cannot be sent is a loss, of which others have to be told.
            loop {
                let actions = world.actions();
                if actions.is_empty() {
                    break;
                }
                for rank in actions.into_iter().flat_map(|action| lines.act(action)).collect::<Vec<_>>() {
                    world.lose(rank, "it does not read what it is told", now);
                }
            }
            if until.is_some_and(|until| until <= now || lines.open.is_empty()) {
                break;
            }
        }
        lines.open.values().for_each(|line| drop(line.stream.shutdown(Shutdown::Both)));
    }
}

/// The connections that are open.
#[derive(Default)]
struct Lines {
    open: HashMap<LineId, Line>,
}

struct Line {
    stream: TcpStream,
    /// Who it is, once that has been let in.
    rank: Option<Rank>,
}

impl Lines {
    fn rank(&self, line: LineId) -> Option<Rank> {
        self.open.get(&line)?.rank
    }

    fn seat(&mut self, line: LineId, rank: Rank) {
        if let Some(line) = self.open.get_mut(&line) {
            line.rank = Some(rank);
        }
    }

    fn close(&mut self, line: LineId) {
        if let Some(line) = self.open.remove(&line) {
            // It may be closed already.
            let _ = line.stream.shutdown(Shutdown::Both);
        }
    }

    /// Says nothing more, and listens until the ranks have taken note.
    fn say_farewell(&self) {
        for line in self.open.values() {
            // It may be closed already.
            let _ = line.stream.shutdown(Shutdown::Write);
        }
    }

    /// Does what the world decided; the ranks that could not be told.
    fn act(&mut self, action: Action) -> Vec<Rank> {
        let (to, message) = match action {
            Action::Send(to, message) => (to, message),
            Action::Close(line) => {
                if let Some(line) = self.open.remove(&line) {
                    // What was sent is still delivered.
                    let _ = line.stream.shutdown(Shutdown::Write);
                }
                return Vec::new();
            }
        };
        let frame = match frame::encode(&message, MAX_TO_RANK) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::error!(%error, "could not send a message to the ranks");
                return Vec::new();
            }
        };
        let mut lost = Vec::new();
        for line in to {
            let Some(open) = self.open.get(&line) else { continue };
            if let Err(error) = (&open.stream).write_all(&frame) {
                tracing::debug!(%error, "could not send to a rank");
                lost.extend(open.rank);
                self.close(line);
            }
        }
        lost
    }
}

/// Shakes hands, and returns who it is, what was read beyond that, and a second handle to write by.
fn introduce(stream: &TcpStream, token: &Token) -> Result<(Hello, Vec<u8>, TcpStream), String> {
    let told = |error: io::Error| error.to_string();
    stream.set_nonblocking(false).map_err(told)?;
    tune(stream).map_err(told)?;
    let mut timed = Timed::new(stream, Instant::now() + HANDSHAKE);
    let purpose = handshake::accept(&mut timed, token, PURPOSE).map_err(|error| error.to_string())?;
    if purpose != PURPOSE {
        return Err("it came for something else".to_owned());
    }
    let mut input = Vec::new();
    let hello = loop {
        match frame::decode(&mut input, MAX_FROM_RANK).map_err(|error| error.to_string())? {
            Some(FromRank::Join(hello)) => break hello,
            Some(_) => return Err("it did not say who it is".to_owned()),
            None => read_more(&mut timed, &mut input).map_err(told)?,
        }
    };
    stream.set_read_timeout(None).map_err(told)?;
    stream.set_write_timeout(Some(UNREAD)).map_err(told)?;
    Ok((hello, input, stream.try_clone().map_err(told)?))
}

/// Passes on what a rank says, as long as `pass` wants it; returns how it ended.
fn listen(stream: &TcpStream, mut input: Vec<u8>, pass: impl Fn(FromRank) -> bool) -> String {
    let mut stream = stream;
    loop {
        match frame::decode(&mut input, MAX_FROM_RANK) {
            Ok(Some(message)) => {
                if !pass(message) {
                    return "the coordinator is gone".to_owned();
                }
            }
            Ok(None) => match read_more(&mut stream, &mut input) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return "its process ended without a word".to_owned();
                }
                Err(error) => return error.to_string(),
            },
            Err(error) => return error.to_string(),
        }
    }
}

/// Appends what has come to `input`, and waits for something if nothing has.
pub(super) fn read_more(stream: &mut impl Read, input: &mut Vec<u8>) -> io::Result<()> {
    const ROOM: usize = 16 << 10;
    let before = input.len();
    input.resize(before + ROOM, 0);
    let outcome = stream.read(&mut input[before..]);
    input.truncate(before + outcome.as_ref().copied().unwrap_or(0));
    match outcome {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(error) => Err(error),
    }
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordinator").field("address", &self.address).finish_non_exhaustive()
    }
}
