//! A rank's side of the control plane.

use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zero_core::Rank;

use super::coordinator::read_more;
use super::frame::{self, MAX_FROM_RANK, MAX_TO_RANK};
use super::handshake::{self, HandshakeError};
use super::join_error::JoinError;
use super::message::{FromRank, Hello, PURPOSE, Roster, ToRank};
use super::{Timed, Token, tune};
use crate::clock::FOREVER;
use crate::failure::Failure;
use crate::process::{Finish, Standing};
use crate::{CommError, LossCause, lock, network, open_files};

/// How long to wait after a call that nobody answered.
const PAUSE: Duration = Duration::from_millis(50);

/// How long one call may take.
const CALL: Duration = Duration::from_secs(5);

/// A rank's connection to the coordinator, before it has joined.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    address: String,
    token: Token,
}

/// A rank's connection to the coordinator. It is served until it is dropped.
pub(crate) struct Agent {
    standing: Arc<Standing>,
    stream: TcpStream,
    threads: Vec<JoinHandle<()>>,
}

impl Connection {
    /// Calls the coordinator at `address`, until it answers or `patience` is over.
    pub(crate) fn connect(address: &str, token: &Token, patience: Duration) -> Result<Self, JoinError> {
        let until = Instant::now() + patience.min(FOREVER);
        let left = || until.saturating_duration_since(Instant::now());
        loop {
            match Self::call(address, token, (patience, until)) {
                // A port that another program has just left may answer anything; what follows may be right.
                Err(JoinError::Unreachable { .. }) if !left().is_zero() => thread::sleep(PAUSE.min(left())),
                outcome => return outcome,
            }
        }
    }

    /// One try of those that end at `until`, which is after `patience`.
    fn call(address: &str, token: &Token, (patience, until): (Duration, Instant)) -> Result<Self, JoinError> {
        let left = || until.saturating_duration_since(Instant::now());
        let address = address.to_owned();
        let unreachable = |source| {
            if open_files::are_exhausted(&source) {
                return JoinError::System { source };
            }
            JoinError::Unreachable { address: address.clone(), after: patience, source }
        };
        let addresses = match network::resolve(&address, left().max(PAUSE)) {
            Ok(addresses) => addresses,
            Err(source) if source.kind() == io::ErrorKind::InvalidInput => {
                return Err(JoinError::Address { address, source });
            }
            // A name may become known.
            Err(source) => return Err(unreachable(source)),
        };
        let limit = Instant::now() + left().clamp(PAUSE, CALL);
        let time = limit.saturating_duration_since(Instant::now());
        let stream = network::connect(&addresses, time).map_err(unreachable)?;
        tune(&stream).map_err(unreachable)?;
        let mut timed = Timed::new(&stream, limit.max(Instant::now() + PAUSE));
        match handshake::connect(&mut timed, token, PURPOSE) {
            Ok(purpose) if purpose == PURPOSE => Ok(Self { stream, address, token: token.clone() }),
            Ok(_) => Err(JoinError::Stranger { address, found: "it is a rank".to_owned() }),
            Err(HandshakeError::Io(error)) => Err(unreachable(error)),
            Err(HandshakeError::Version { theirs }) => Err(JoinError::Version { address, theirs }),
            Err(HandshakeError::Refused) => Err(JoinError::Token { address }),
            Err(HandshakeError::Unproven) => Err(JoinError::Impostor { address }),
            Err(error @ (HandshakeError::Stranger | HandshakeError::TooLong(_))) => {
                Err(JoinError::Stranger { address, found: error.to_string() })
            }
        }
    }

    /// The address of the interface by which the coordinator is reached.
    pub(crate) fn local_ip(&self) -> Result<IpAddr, JoinError> {
        let address = self.stream.local_addr().map_err(|source| JoinError::System { source })?;
        Ok(address.ip())
    }

    pub(crate) const fn token(&self) -> &Token {
        &self.token
    }

    /// Joins the world, and returns when all ranks have; `patience` is a little more than the coordinator's.
    pub(crate) fn join(self, hello: Hello, patience: Duration) -> Result<(Agent, Roster), JoinError> {
        let system = |error| JoinError::System { source: open_files::advised(error) };
        let lost =
            |error: io::Error| JoinError::Lost { address: self.address.clone(), how: error.to_string() };
        let (rank, size) = (hello.rank, hello.size);
        let mut timed = Timed::new(&self.stream, Instant::now() + patience.saturating_add(CALL).min(FOREVER));
        send(&mut timed, &FromRank::Join(hello)).map_err(lost)?;
        let (mut input, mut hellos) = (Vec::new(), Vec::new());
        let (host, silence) = loop {
            let message = frame::decode(&mut input, MAX_TO_RANK);
            match message.map_err(|error| lost(io::Error::other(error)))? {
                Some(ToRank::Present(hello)) => hellos.push(hello),
                Some(ToRank::Start { host, silence }) => break (host, silence),
                Some(ToRank::Refused(refusal)) => return Err(refusal.into()),
                Some(_) => {}
                None => read_more(&mut timed, &mut input).map_err(lost)?,
            }
        };
        self.stream.set_read_timeout(Some(silence)).map_err(system)?;
        self.stream.set_write_timeout(Some(CALL)).map_err(system)?;
        let (notices, notified) = mpsc::channel();
        let standing = Standing::new(rank, size, host, notices);
        let stream = self.stream.try_clone().map_err(system)?;
        let mut agent = Agent { standing, stream, threads: Vec::new() };
        let line = Arc::new(Line {
            reader: self.stream.try_clone().map_err(system)?,
            writer: Mutex::new(self.stream),
            host,
        });
        let (standing, reading) = (Arc::clone(&agent.standing), Arc::clone(&line));
        agent.spawn("zero-comm-agent", move || reading.read(&standing, input)).map_err(system)?;
        agent
            .spawn("zero-comm-notices", move || {
                for notice in notified {
                    // A line that is broken is the reader's business, too.
                    if let Err(error) = line.send(&FromRank::Notice(notice)) {
                        tracing::warn!(%error, "could not tell the coordinator");
                    }
                }
            })
            .map_err(system)?;
        Ok((agent, Roster { hellos, host }))
    }
}

fn send(stream: &mut impl Write, message: &FromRank) -> io::Result<()> {
    let frame = frame::encode(message, MAX_FROM_RANK).map_err(io::Error::other)?;
    stream.write_all(&frame)
}

/// The connection, as the threads of the agent use it.
struct Line {
    reader: TcpStream,
    /// Held for whole messages.
    writer: Mutex<TcpStream>,
    /// The rank in whose process the coordinator runs.
    host: Option<Rank>,
}

impl Line {
    fn send(&self, message: &FromRank) -> io::Result<()> {
        send(&mut *lock(&self.writer), message)
    }

    /// Does what the coordinator says, until it says nothing any more.
    fn read(&self, standing: &Standing, mut input: Vec<u8>) {
        let how = loop {
            match frame::decode(&mut input, MAX_TO_RANK) {
                Ok(Some(message)) => {
                    if let Err(error) = self.obey(standing, message) {
                        break error.to_string();
                    }
                }
                Ok(None) => {
                    if let Err(error) = read_more(&mut &self.reader, &mut input) {
                        break match error.kind() {
                            io::ErrorKind::UnexpectedEof => "its process ended without a word".to_owned(),
                            io::ErrorKind::WouldBlock => "nothing was heard of it for too long".to_owned(),
                            _ => error.to_string(),
                        };
                    }
                }
                Err(error) => break error.to_string(),
            }
        };
        standing.close();
        if !standing.is_over() {
            standing.settle(match self.host {
                Some(rank) => Failure::Lost { rank, cause: LossCause::Died(how) },
                None => Failure::Error { error: CommError::CoordinatorLost { how }, blamed: None },
            });
        }
    }

    fn obey(&self, standing: &Standing, message: ToRank) -> io::Result<()> {
        match message {
            ToRank::Go => standing.note_start(),
            ToRank::Ping => self.send(&FromRank::Pong)?,
            ToRank::Ask(lane) => {
                let recorder = standing.recorder();
                // What is forgotten was not left out.
                let begun = lane.map_or(0, |lane| recorder.begun_in(lane).unwrap_or(u64::MAX));
                self.send(&FromRank::State { begun, records: recorder.records() })?;
            }
            ToRank::Verdict(failure) => standing.settle(failure),
            ToRank::Finished { rank, order, begun } => standing.note_finish(rank, Finish { order, begun }),
            ToRank::Forget(group) => standing.forget(group),
            // Whoever hosts the coordinator shows it.
            ToRank::Flight(report) => tracing::debug!("{report}"),
            // Said before the start only.
            ToRank::Present(_) | ToRank::Start { .. } | ToRank::Refused(_) => {}
        }
        Ok(())
    }
}

impl Agent {
    pub(crate) const fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(run)?);
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.standing.close();
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::warn!("a thread of the control plane panicked");
            }
        }
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("standing", &self.standing).finish_non_exhaustive()
    }
}
