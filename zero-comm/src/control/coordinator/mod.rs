//! The coordinator of a world.
//!
//! Connections come in by a [`Reception`], which has a thread for each that reads; all tell what they hear to the
//! thread that keeps the [`World`](world::World) and sends what it decides.

mod inquiry;
mod world;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_core::{Rank, WorldSize};

use super::frame::{self, MAX_FROM_RANK, MAX_TO_RANK};
use super::join_error::Refusal;
use super::message::{FromRank, Hello, PURPOSE};
use super::{Host, Reception, Timed, Token};
use crate::flight::FlightReport;
use crate::{ProcessWorld, lock, open_files};
use world::LineId;
#[cfg(feature = "fuzzing")]
pub(super) use world::{Action, World};
#[cfg(not(feature = "fuzzing"))]
use world::{Action, World};

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
    /// How long it waits for all ranks to join: no longer than any rank that has joined waits. A rank that is not
    /// heard of for the longest deadline that a rank has, or for ten seconds if that is longer, is taken for dead.
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
    world: Arc<Mutex<World>>,
    reception: Reception,
    events: Sender<Event>,
    deciding: Option<JoinHandle<()>>,
}

/// Listens to all who come in.
struct Listener {
    events: Sender<Event>,
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
    /// A process could not be listened to, because this one has too many open files.
    Full {
        how: String,
    },
    /// The process of a rank has ended.
    Ended {
        rank: Rank,
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
    /// Those of the operating system; [`io::ErrorKind::InvalidInput`] if there are to be more than
    /// [`ProcessWorld::MAX_RANKS`] ranks.
    pub fn new(listener: TcpListener, options: CoordinatorOptions) -> io::Result<Self> {
        Self::watched(listener, options, || ())
    }

    /// As [`new`](Self::new); calls `failed` when the world has failed, or cannot begin any more.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn watched(
        listener: TcpListener,
        options: CoordinatorOptions,
        failed: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let CoordinatorOptions { size, token, deadline, host } = options;
        if size.get() > ProcessWorld::MAX_RANKS {
            let limit = ProcessWorld::MAX_RANKS;
            let reason = format!("a world cannot have {size} ranks; ask for {limit} at most");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let address = listener.local_addr()?;
        let world = Arc::new(Mutex::new(World::new(size, host, deadline, Instant::now())));
        let (events, heard) = mpsc::channel();
        let guests = Arc::new(Listener { events: events.clone(), lines: AtomicUsize::new(0) });
        let reception = Reception::open(listener, token.clone(), PURPOSE, size, guests)?;
        let deciding = {
            let world = Arc::clone(&world);
            let thread = thread::Builder::new().name("zero-comm-coordinator".to_owned());
            thread.spawn(move || decide(&world, &heard, failed))?
        };
        Ok(Self { address, token, world, reception, events, deciding: Some(deciding) })
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
        lock(&self.world).failure()
    }

    /// The rank that the failure originates from, if there is one and that can be told.
    pub fn blamed(&self) -> Option<Rank> {
        lock(&self.world).blamed()
    }

    /// Why the world cannot begin any more, if it did not.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        lock(&self.world).refusal().cloned()
    }

    /// Whether all ranks have joined.
    pub fn has_begun(&self) -> bool {
        lock(&self.world).has_begun()
    }

    /// The ranks that are gone, or never came, and for the lack of which the world has failed, each with what became
    /// of it. There are none if nobody has joined.
    pub fn lost(&self) -> Vec<(Rank, String)> {
        lock(&self.world).lost()
    }

    /// For who started the ranks: the process of `rank` has ended, and `how`. If it had not joined, those that have
    /// need not wait for it.
    pub fn note_end(&self, rank: Rank, how: &str) {
        // The thread that decides ends when this is dropped.
        let _ = self.events.send(Event::Ended { rank, how: how.to_owned() });
    }

    /// What all ranks did last, once the world has failed and they have told.
    pub fn report(&self) -> Option<FlightReport> {
        lock(&self.world).report().cloned()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.reception.close();
        // The thread that decides may be gone, with nobody left to tell.
        let _ = self.events.send(Event::Closing);
        if self.deciding.take().is_some_and(|deciding| deciding.join().is_err()) {
            tracing::warn!("the thread of the coordinator panicked");
        }
    }
}

impl Host for Listener {
    /// Who it is, and what was read beyond that.
    type Guest = (Hello, Vec<u8>);

    fn meet(&self, purpose: &[u8], stream: &mut Timed<'_>) -> Result<Self::Guest, String> {
        if purpose != PURPOSE {
            return Err("it came for something else".to_owned());
        }
        let mut input = Vec::new();
        loop {
            match frame::decode(&mut input, MAX_FROM_RANK).map_err(|error| error.to_string())? {
                Some(FromRank::Join(hello)) => return Ok((hello, input)),
                Some(_) => return Err("it did not say who it is".to_owned()),
                None => read_more(stream, &mut input).map_err(|error| error.to_string())?,
            }
        }
    }

    fn take(&self, (hello, rest): Self::Guest, stream: TcpStream, address: SocketAddr) {
        let prepared = stream
            .set_read_timeout(None)
            .and_then(|()| stream.set_write_timeout(Some(UNREAD)))
            .and_then(|()| stream.try_clone());
        let writer = match prepared {
            Ok(writer) => writer,
            Err(error) => {
                tracing::warn!(%address, %error, "could not listen to a rank");
                if open_files::are_exhausted(&error) {
                    self.lacks_files(error);
                }
                return;
            }
        };
        let (line, events) = (self.lines.fetch_add(1, Ordering::Relaxed), &self.events);
        let hello = Box::new(hello);
        if events.send(Event::Joined { line, stream: writer, address, hello }).is_ok() {
            let how = listen(&stream, rest, |message| events.send(Event::Heard { line, message }).is_ok());
            // Nobody is left to tell if the coordinator is gone.
            let _ = events.send(Event::Lost { line, how });
        }
    }

    fn lacks_files(&self, error: io::Error) {
        // As above.
        let _ = self.events.send(Event::Full { how: open_files::advised(error).to_string() });
    }
}

/// Tells the world what happens, and does what it decides.
fn decide(world: &Mutex<World>, events: &Receiver<Event>, failed: impl FnOnce()) {
    let (mut lines, mut failed) = (Lines::default(), Some(failed));
    let mut until: Option<Instant> = None;
    loop {
        let next = lock(world).next().into_iter().chain(until).min();
        let left = next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now()));
        let event = match events.recv_timeout(left) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let now = Instant::now();
        let mut world = lock(world);
        match event {
            None => world.pass(now),
            Some(Event::Closing) => {
                until = now.checked_add(FAREWELL);
                lines.say_farewell();
            }
            Some(Event::Full { how }) => world.fill(how),
            Some(Event::Ended { rank, how }) => world.note_end(rank, how),
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
        let has_failed = world.failure().is_some();
        drop(world);
        if let Some(failed) = failed.take_if(|_| has_failed) {
            failed();
        }
        if until.is_some_and(|until| until <= now || lines.open.is_empty()) {
            break;
        }
    }
    lines.open.values().for_each(|line| drop(line.stream.shutdown(Shutdown::Both)));
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
