//! Answers to who reads windows over a connection.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::flight::GroupId;
use crate::lock;
use crate::reading::{ReadAnswer, ReadRequest};
use crate::windows::Windows;

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

    pub(super) fn forget(&self, group: GroupId) -> Option<Arc<Windows>> {
        lock(&self.windows).remove(&group)
    }

    /// Answers requests until the reader closes the connection.
    ///
    /// # Errors
    ///
    /// Those of the operating system, if it can answer none.
    pub(super) fn answer(&self, stream: &TcpStream) -> io::Result<()> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        lock(&self.open).insert(number, stream.try_clone()?);
        // A reader that goes away is no failure: it has finished, or the world learns of it otherwise.
        if let Err(error) = self.answer_all(stream) {
            tracing::debug!(%error, "a reader of windows is gone");
        }
        lock(&self.open).remove(&number);
        Ok(())
    }

    /// Ends all connections.
    pub(super) fn close(&self) {
        for stream in lock(&self.open).values() {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn answer_all(&self, mut stream: &TcpStream) -> io::Result<()> {
        let mut request = [0; ReadRequest::BYTES];
        loop {
            match stream.read_exact(&mut request) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                outcome => outcome?,
            }
            let request = ReadRequest::decode(&request);
            let windows = lock(&self.windows).get(&request.group).cloned();
            match request.find(windows.as_deref()) {
                Err(answer) => stream.write_all(&answer.encode())?,
                Ok(part) => {
                    stream.write_all(&ReadAnswer::Bytes.encode())?;
                    stream.write_all(part.bytes())?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::WindowKey;

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
        let request = ReadRequest::new(GroupId::WORLD, WindowKey::new(1), 0, &[]);
        reader.write_all(&request.encode()).unwrap();
        let mut answer = [0; ReadAnswer::BYTES];
        reader.read_exact(&mut answer).unwrap();
        assert_eq!(ReadAnswer::decode(&answer), Some(ReadAnswer::Missing));
        service.close();
        answering.join().unwrap().unwrap();
        assert_eq!(reader.read(&mut answer).unwrap(), 0);
    }
}
