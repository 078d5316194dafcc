//! Reads from windows over a connection.
//!
//! A request is 32 bytes: group, window, offset and length, all little-endian. The answer is 16 bytes, what
//! became of it and how many bytes the window has, and then the bytes that were asked for.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::flight::GroupId;
use crate::windows::Windows;
use crate::{WindowKey, lock};

pub(super) const REQUEST: usize = 32;
pub(super) const ANSWER: usize = 16;

/// A read from a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) group: GroupId,
    pub(super) key: WindowKey,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Request {
    pub(super) fn encode(&self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        let words = [self.group.get(), self.key.get(), self.offset, self.length];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REQUEST]) -> Self {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[index * 8..][..8]);
            u64::from_le_bytes(word)
        };
        Self {
            group: GroupId::from_wire(word(0)),
            key: WindowKey::new(word(1)),
            offset: word(2),
            length: word(3),
        }
    }
}

/// What became of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The bytes follow.
    Bytes,
    /// There is no such window.
    Missing,
    /// The window has only so many bytes.
    Bounds(u64),
}

impl Answer {
    fn encode(self) -> [u8; ANSWER] {
        let (status, available) = match self {
            Self::Bytes => (0_u64, 0),
            Self::Missing => (1, 0),
            Self::Bounds(available) => (2, available),
        };
        let mut bytes = [0; ANSWER];
        bytes[..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..].copy_from_slice(&available.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ANSWER]) -> Option<Self> {
        let (status, available) = bytes.split_at(8);
        let available = u64::from_le_bytes(available.try_into().ok()?);
        match u64::from_le_bytes(status.try_into().ok()?) {
            0 => Some(Self::Bytes),
            1 => Some(Self::Missing),
            2 => Some(Self::Bounds(available)),
            _ => None,
        }
    }
}

/// Answers the readers of one rank's windows.
#[derive(Debug, Default)]
pub(super) struct Service {
    windows: Mutex<HashMap<GroupId, Arc<Windows>>>,
    /// The connections that are being answered, to end them.
    open: Mutex<HashMap<u64, TcpStream>>,
    opened: AtomicU64,
}

impl Service {
    pub(super) fn serve(&self, group: GroupId, windows: Arc<Windows>) {
        lock(&self.windows).insert(group, windows);
    }

    /// Answers requests until the reader closes the connection.
    pub(super) fn answer(&self, stream: &TcpStream) {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let prepared = stream
            .set_read_timeout(None)
            .and_then(|()| stream.set_write_timeout(None))
            .and_then(|()| stream.try_clone());
        match prepared {
            Ok(clone) => drop(lock(&self.open).insert(number, clone)),
            Err(error) => {
                tracing::warn!(%error, "could not serve a reader of windows");
                return;
            }
        }
        // A reader that goes away is no failure: it has finished, or the world learns of it otherwise.
        if let Err(error) = self.answer_all(stream) {
            tracing::debug!(%error, "a reader of windows is gone");
        }
        lock(&self.open).remove(&number);
    }

    /// Ends all connections.
    pub(super) fn close(&self) {
        for stream in lock(&self.open).values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn answer_all(&self, mut stream: &TcpStream) -> io::Result<()> {
        let mut request = [0; REQUEST];
        loop {
            match stream.read_exact(&mut request) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                outcome => outcome?,
            }
            let Request { group, key, offset, length } = Request::decode(&request);
            let windows = lock(&self.windows).get(&group).cloned();
            let region = windows.and_then(|windows| windows.get(key));
            let Some(region) = region else {
                stream.write_all(&Answer::Missing.encode())?;
                continue;
            };
            let bytes = region.bytes();
            match part(bytes, offset, length) {
                None => stream.write_all(&Answer::Bounds(bytes.len() as u64).encode())?,
                Some(part) => {
                    stream.write_all(&Answer::Bytes.encode())?;
                    stream.write_all(part)?;
                }
            }
        }
    }
}

pub(super) fn part(bytes: &[u8], offset: u64, length: u64) -> Option<&[u8]> {
    let (offset, length) = (usize::try_from(offset).ok()?, usize::try_from(length).ok()?);
    bytes.get(offset..)?.get(..length)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_part_lies_within_its_window() {
        let bytes = [1, 2, 3];
        assert_eq!(part(&bytes, 1, 2), Some(&[2, 3][..]));
        assert_eq!(part(&bytes, 3, 0), Some(&[][..]));
        for (offset, length) in [(4, 0), (0, 4), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(part(&bytes, offset, length), None);
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let request = Request {
            group: GroupId::WORLD.child(1, 2),
            key: WindowKey::new(u64::MAX),
            offset: 3,
            length: 4,
        };
        assert_eq!(Request::decode(&request.encode()), request);
        for answer in [Answer::Bytes, Answer::Missing, Answer::Bounds(7)] {
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(Answer::decode(&[9; ANSWER]), None);
    }

    #[test]
    fn a_service_that_closes_ends_its_connections() {
        let service = Arc::new(Service::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let answering = {
            let service = Arc::clone(&service);
            thread::spawn(move || service.answer(&stream))
        };
        let request = Request { group: GroupId::WORLD, key: WindowKey::new(1), offset: 0, length: u64::MAX };
        reader.write_all(&request.encode()).unwrap();
        let mut answer = [0; ANSWER];
        reader.read_exact(&mut answer).unwrap();
        assert_eq!(Answer::decode(&answer), Some(Answer::Missing));
        service.close();
        answering.join().unwrap();
        assert_eq!(reader.read(&mut answer).unwrap(), 0);
    }
}
