//! The way of one output stream of a rank to ours.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use zero_core::Rank;

use super::job::Event;
use super::lines::{End, Lines, Tail};
use super::printer::{Page, Printer};
use super::remote::News;

/// What is done with a stream. Whatever becomes of what it is copied to, the stream is read to its end.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) rank: Rank,
    pub(crate) printer: Arc<Printer>,
    /// Where its last lines are kept.
    pub(crate) tail: Option<Arc<Mutex<Tail>>>,
    /// What announces news of another machine, among the lines of the rank.
    pub(crate) mark: Option<String>,
    pub(crate) events: Sender<Event>,
}

impl Relay {
    /// Copies `source` to its end, or until `lifeline` is closed and nothing more is there: a process that
    /// nobody waits for may keep the stream open for ever.
    pub(crate) fn run(self, source: OwnedFd, lifeline: &UnixStream) {
        let mut source = File::from(source);
        let mut lines = Lines::default();
        let mut chunk = vec![0; 64 * 1024];
        while wait(&source, lifeline) {
            match source.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => self.print(|each| lines.push(&chunk[..count], each)),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.print(|each| lines.finish(each));
        self.tell(Event::Closed { rank: self.rank });
    }

    /// Prints all pieces that `cut` gives, at once.
    fn print(&self, cut: impl FnOnce(&mut dyn FnMut(&[u8], End))) {
        let mut page = self.printer.page();
        cut(&mut |piece, end| self.take(&mut page, piece, end));
        if let Err(error) = page.send() {
            self.tell(Event::OutputFailed(error));
        }
    }

    fn take(&self, page: &mut Page<'_>, piece: &[u8], end: End) {
        let (piece, end, news) = match self.mark.as_ref().and_then(|mark| find(piece, mark.as_bytes())) {
            // What stands before the mark is the rank's last line, which has no end.
            Some((before, news)) => (before, End::Stream, News::parse(news)),
            None => (piece, end, None),
        };
        if let Some(news) = news {
            self.tell(Event::Told { rank: self.rank, at: Instant::now(), news });
            if piece.is_empty() {
                return;
            }
        }
        page.add(self.rank, piece, end);
        if let Some(tail) = &self.tail {
            tail.lock().unwrap_or_else(PoisonError::into_inner).push(piece, end);
        }
    }

    fn tell(&self, event: Event) {
        // Nobody listens any more once the job is given up.
        let _ = self.events.send(event);
    }
}

/// Splits a line at a mark.
fn find<'a>(line: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = line.windows(mark.len()).position(|window| window == mark)?;
    Some((&line[..at], &line[at + mark.len()..]))
}

/// Waits until there is something to read, or the end of `source`; false if there is not and `lifeline` is
/// closed.
fn wait(source: &File, lifeline: &UnixStream) -> bool {
    loop {
        let mut streams = [
            PollFd::from_borrowed_fd(source.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(lifeline.as_fd(), PollFlags::IN),
        ];
        match poll(&mut streams, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
            Ok(_) => return !streams[0].revents().is_empty(),
        }
    }
}
