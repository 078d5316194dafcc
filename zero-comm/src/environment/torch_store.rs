//! A client of the key-value store that PyTorch's launcher serves.

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::search::{Miss, after, search};
use crate::{network, open_files};

/// What a client begins with.
const MAGIC: u32 = 0x3c85_f7ce;

/// What every key begins with on the wire, as PyTorch's own client has it.
const PREFIX: &str = "/";

/// The longest key or value, in bytes: what is kept in the store are addresses.
const MAX_LENGTH: usize = 1 << 20;

/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// The first byte of each request.
#[derive(Clone, Copy)]
enum Query {
    Validate = 0,
    Set = 1,
    Get = 3,
    Check = 5,
    Wait = 6,
}

/// A client of PyTorch's `TCPStore`, as `torchrun` serves it at `MASTER_ADDR` and `MASTER_PORT`.
///
/// All that it does together has one deadline, which is set when it connects. After an error the connection is
/// closed, and what follows fails.
#[derive(Debug)]
pub struct TorchStore {
    stream: TcpStream,
    /// `host:port`, for errors.
    address: String,
    patience: Duration,
    deadline: Instant,
}

/// Why a store did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchStoreError {
    /// Nobody listens at the address.
    #[error(
        "no store could be reached at {address} within {after:?}: {source}; see whether the launcher runs, and whether \
         MASTER_ADDR and MASTER_PORT are its own"
    )]
    Unreachable {
        /// Where a store was looked for.
        address: String,
        /// For how long.
        after: Duration,
        /// The last failure.
        source: io::Error,
    },

    /// There was no answer in time.
    #[error("store at {address}: no answer to {query} {key:?} within {after:?}{}", Advice(query))]
    Timeout {
        /// The store.
        address: String,
        /// What was asked.
        query: &'static str,
        /// The key it was about.
        key: String,
        /// The time that all of this client's queries had together.
        after: Duration,
    },

    /// The connection broke.
    #[error(
        "store at {address}: the connection broke at {query} {key:?}: {source}; see whether the launcher has ended"
    )]
    Lost {
        /// The store.
        address: String,
        /// What was asked.
        query: &'static str,
        /// The key it was about.
        key: String,
        /// How it broke.
        source: io::Error,
    },

    /// What answered is no store.
    #[error(
        "store at {address}: {query} {key:?} was answered by {answer}; see whether it is PyTorch's launcher \
         that listens there"
    )]
    BadAnswer {
        /// The supposed store.
        address: String,
        /// What was asked.
        query: &'static str,
        /// The key it was about.
        key: String,
        /// What came.
        answer: String,
    },

    /// The key or the value is too long to be kept. Nothing was sent.
    #[error("store at {address}: {length} bytes are too many for {key:?}; keep keys and values within 1 MiB")]
    TooLong {
        /// The store.
        address: String,
        /// The key, cut if it is what is too long.
        key: String,
        /// How many bytes.
        length: usize,
    },

    /// An address was found, but nobody answered there.
    #[error(
        "nobody answered at {found:?}, which the store at {address} has under {key:?}, within {after:?}: \
         {source}; see what became of rank 0, and whether that address can be reached from here"
    )]
    NobodyAnswers {
        /// The store.
        address: String,
        /// The key.
        key: String,
        /// The address under the key; what follows it there may be a secret, and is not shown.
        found: String,
        /// The time that all of this client's queries had together.
        after: Duration,
        /// The last failure to connect.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// What to do when there was no answer.
struct Advice<'a>(&'a str);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "wait" => f.write_str("; see why rank 0 did not set it"),
            _ => f.write_str("; see whether it is PyTorch's launcher that listens there"),
        }
    }
}

impl TorchStore {
    /// Connects to the store at `host` and `port`, and tries again while there is none. All that this client
    /// does has to be done within `patience` from now.
    ///
    /// # Errors
    ///
    /// [`TorchStoreError::Unreachable`], [`TorchStoreError::Timeout`], [`TorchStoreError::Lost`].
    pub fn connect(host: &str, port: u16, patience: Duration) -> Result<Self, TorchStoreError> {
        let address = format!("{host}:{port}");
        let deadline = after(patience);
        let stream = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match attempt(host, port, left) {
                Ok(stream) => break stream,
                Err(source) if left.is_zero() || open_files::are_exhausted(&source) => {
                    return Err(TorchStoreError::Unreachable { address, after: patience, source });
                }
                Err(_) => thread::sleep(PAUSE.min(left)),
            }
        };
        let mut store = Self { stream, address, patience, deadline };
        let mut request = vec![Query::Validate as u8];
        request.extend(MAGIC.to_le_bytes());
        store.send(&request, "validate", "")?;
        Ok(store)
    }

    /// Sets `key` to `value`, and returns when the store has it.
    ///
    /// # Errors
    ///
    /// All but [`TorchStoreError::Unreachable`] and [`TorchStoreError::NobodyAnswers`].
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), TorchStoreError> {
        let mut request = vec![Query::Set as u8];
        self.append(&mut request, key, &wire_key(key))?;
        self.append(&mut request, key, value)?;
        // Setting is not answered. A check, of which the answer is known, is.
        request.extend(self.about(Query::Check, key)?);
        self.send(&request, "set", key)?;
        self.expect_zero("set", key)
    }

    /// Waits until somebody has set `key`.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    pub fn wait(&mut self, key: &str) -> Result<(), TorchStoreError> {
        let request = self.about(Query::Wait, key)?;
        self.send(&request, "wait", key)?;
        self.expect_zero("wait", key)
    }

    /// The value of `key`, for which it waits.
    ///
    /// # Errors
    ///
    /// As [`set`](Self::set).
    pub fn get(&mut self, key: &str) -> Result<Vec<u8>, TorchStoreError> {
        self.wait(key)?;
        let mut request = vec![Query::Get as u8];
        self.append(&mut request, key, &wire_key(key))?;
        self.send(&request, "get", key)?;
        let mut length = [0; 8];
        self.receive(&mut length, "get", key)?;
        let length = u64::from_le_bytes(length);
        match usize::try_from(length) {
            Ok(length) if length <= MAX_LENGTH => {
                let mut value = vec![0; length];
                self.receive(&mut value, "get", key)?;
                Ok(value)
            }
            _ => Err(self.bad_answer("get", key, format!("{length} bytes"))),
        }
    }

    /// Connects to the address that is kept under `key`. What is found may be of an earlier run of the job, so
    /// if `connect` fails the address is looked up again, until the deadline.
    ///
    /// `connect` gets the address and the time left, and has to return within that time.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get), and [`TorchStoreError::NobodyAnswers`].
    pub fn find<T, E>(
        &mut self,
        key: &str,
        connect: impl FnMut(&str, Duration) -> Result<T, E>,
    ) -> Result<T, TorchStoreError>
    where
        E: Error + Send + Sync + 'static,
    {
        let deadline = self.deadline;
        let look = || {
            let value = match self.get(key) {
                // How the search has gone so far says more.
                Err(TorchStoreError::Timeout { .. }) => return Ok(None),
                value => value?,
            };
            match String::from_utf8(value) {
                Ok(address) => Ok(Some(address)),
                Err(_) => Err(self.bad_answer("get", key, "bytes that are no text".to_owned())),
            }
        };
        match search(deadline, look, connect)? {
            Ok(found) => Ok(found),
            Err(Miss::Nothing) => Err(self.timeout("wait", key)),
            Err(Miss::Silent { address: found, cause }) => Err(TorchStoreError::NobodyAnswers {
                address: self.address.clone(),
                key: key.to_owned(),
                found,
                after: self.patience,
                source: Box::new(cause),
            }),
        }
    }

    /// A request about one key.
    fn about(&self, query: Query, key: &str) -> Result<Vec<u8>, TorchStoreError> {
        let mut request = vec![query as u8];
        request.extend(1_u64.to_le_bytes());
        self.append(&mut request, key, &wire_key(key))?;
        Ok(request)
    }

    /// Appends a string or a value of a request about `key`.
    fn append(&self, request: &mut Vec<u8>, key: &str, bytes: &[u8]) -> Result<(), TorchStoreError> {
        if bytes.len() > MAX_LENGTH {
            let key = key.chars().take(100).collect();
            return Err(TorchStoreError::TooLong { address: self.address.clone(), key, length: bytes.len() });
        }
        request.extend((bytes.len() as u64).to_le_bytes());
        request.extend(bytes);
        Ok(())
    }

    /// Reads the one byte that answers a query about keys that are there.
    fn expect_zero(&mut self, query: &'static str, key: &str) -> Result<(), TorchStoreError> {
        let mut answer = [0];
        self.receive(&mut answer, query, key)?;
        match answer {
            [0] => Ok(()),
            [other] => Err(self.bad_answer(query, key, format!("the byte {other}"))),
        }
    }

    fn send(&mut self, mut bytes: &[u8], query: &'static str, key: &str) -> Result<(), TorchStoreError> {
        while !bytes.is_empty() {
            let sent = self.in_time(query, key, |stream, left| {
                stream.set_write_timeout(Some(left))?;
                stream.write(bytes)
            })?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    fn receive(
        &mut self,
        mut bytes: &mut [u8],
        query: &'static str,
        key: &str,
    ) -> Result<(), TorchStoreError> {
        while !bytes.is_empty() {
            let received = self.in_time(query, key, |stream, left| {
                stream.set_read_timeout(Some(left))?;
                stream.read(bytes)
            })?;
            bytes = &mut bytes[received..];
        }
        Ok(())
    }

    /// Moves some bytes, at least one, before the deadline.
    fn in_time(
        &mut self,
        query: &'static str,
        key: &str,
        mut transfer: impl FnMut(&mut TcpStream, Duration) -> io::Result<usize>,
    ) -> Result<usize, TorchStoreError> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.timeout(query, key));
            }
            let source = match transfer(&mut self.stream, left) {
                Ok(0) => io::ErrorKind::UnexpectedEof.into(),
                Ok(count) => return Ok(count),
                // Which of these it is depends on the system; whether time is up, the deadline tells.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            self.close();
            let (address, key) = (self.address.clone(), key.to_owned());
            return Err(TorchStoreError::Lost { address, query, key, source });
        }
    }

    fn timeout(&self, query: &'static str, key: &str) -> TorchStoreError {
        self.close();
        let (address, key) = (self.address.clone(), key.to_owned());
        TorchStoreError::Timeout { address, query, key, after: self.patience }
    }

    fn bad_answer(&self, query: &'static str, key: &str, answer: String) -> TorchStoreError {
        self.close();
        TorchStoreError::BadAnswer { address: self.address.clone(), query, key: key.to_owned(), answer }
    }

    /// Ends the connection: what would come now could be the answer to another query.
    fn close(&self) {
        // It fails only if the other side has ended it already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn wire_key(key: &str) -> Vec<u8> {
    [PREFIX.as_bytes(), key.as_bytes()].concat()
}

/// Tries every address of the host once, all within `left`.
fn attempt(host: &str, port: u16, left: Duration) -> io::Result<TcpStream> {
    let start = Instant::now();
    let addresses = network::resolve(&format!("{host}:{port}"), left)?;
    let stream = network::connect(&addresses, left.saturating_sub(start.elapsed()))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
