//! One of our output streams, which the ranks share.

use std::io::{self, IsTerminal};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use zero_core::Rank;

use super::lines::End;

/// Writes the lines of all ranks to one stream, each whole.
#[derive(Debug)]
pub(crate) struct Printer {
    stream: BorrowedFd<'static>,
    /// What stands before the lines of each rank.
    labels: Option<Vec<String>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The rank whose line is not complete.
    open: Option<Rank>,
    page: Vec<u8>,
    broken: bool,
}

impl Printer {
    /// A printer to our standard output or standard error.
    pub(crate) fn new(stream: BorrowedFd<'static>, ranks: usize, prefix: bool) -> Self {
        let color = stream.is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let label = |rank: usize| match color {
            // Red is for errors, and black and white may be the background.
            true => format!("\x1b[3{}m[rank {rank}]\x1b[0m ", 2 + rank % 5),
            false => format!("[rank {rank}] "),
        };
        let labels = prefix.then(|| (0..ranks).map(label).collect());
        Self { stream, labels, state: Mutex::default() }
    }

    /// Begins to write; nobody else writes to this stream before the page has been sent or dropped.
    pub(crate) fn page(&self) -> Page<'_> {
        Page { printer: self, state: self.state.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// What is about to be written.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    printer: &'a Printer,
    state: MutexGuard<'a, State>,
}

impl Page<'_> {
    /// Adds a piece of a line of `rank`.
    pub(crate) fn add(&mut self, rank: Rank, piece: &[u8], end: End) {
        if self.state.broken {
            return;
        }
        if self.state.open.is_some_and(|open| open != rank) {
            self.end_line();
        }
        let label = self.printer.labels.as_ref().map(|labels| labels[rank.index()].as_bytes());
        let State { open, page, .. } = &mut *self.state;
        if let Some(label) = label {
            // Progress bars begin with it.
            if piece.is_empty() && end == End::Return {
                return;
            }
            if open.is_none() {
                page.extend_from_slice(label);
            }
        }
        page.extend_from_slice(piece);
        let (sign, stays_open) = match end {
            End::Newline => ("\n", false),
            End::More => ("", true),
            // With labels, what would be written over becomes a line: others may write in between.
            End::Return | End::Stream if label.is_some() => ("\n", false),
            End::Return => ("\r", true),
            End::Stream => ("", true),
        };
        page.extend_from_slice(sign.as_bytes());
        *open = stays_open.then_some(rank);
    }

    /// Makes sure that what follows begins a line.
    fn end_line(&mut self) {
        if self.state.open.take().is_some() {
            self.state.page.push(b'\n');
        }
    }

    /// Adds text that is not of a rank, from the begin of a line on.
    pub(crate) fn add_text(&mut self, text: &str) {
        self.end_line();
        self.state.page.extend_from_slice(text.as_bytes());
    }

    /// Writes the page. The first error is returned; then the stream is given up, and all that follows is lost
    /// without a word.
    pub(crate) fn send(mut self) -> io::Result<()> {
        let page = std::mem::take(&mut self.state.page);
        if self.state.broken {
            return Ok(());
        }
        let result = write_all(self.printer.stream, &page);
        self.state.broken = result.is_err();
        result
    }
}

/// Writes, also to a stream that whoever shares it with us has made non-blocking.
fn write_all(stream: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(stream, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::from_borrowed_fd(stream, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes to standard error what is not of a rank. Where nobody can read it, nothing can be done about it.
pub(crate) fn say(text: &str) {
    let _ = write_all(rustix::stdio::stderr(), text.as_bytes());
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use zero_core::Rank;

    use super::Printer;
    use crate::launcher::lines::End;

    /// What is written for pieces of ranks.
    fn printed(prefix: bool, pieces: &[(usize, &str, End)]) -> String {
        let mut file = tempfile::tempfile().unwrap();
        let copy: &'static File = Box::leak(Box::new(file.try_clone().unwrap()));
        let printer = Printer::new(copy.as_fd(), 3, prefix);
        for &(rank, piece, end) in pieces {
            let mut page = printer.page();
            page.add(Rank::new(rank), piece.as_bytes(), end);
            page.send().unwrap();
        }
        let mut text = String::new();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn every_line_has_the_label_of_its_rank() {
        let pieces = [(0, "a", End::Newline), (2, "", End::Newline), (1, "last", End::Stream)];
        assert_eq!(printed(true, &pieces), "[rank 0] a\n[rank 2] \n[rank 1] last\n");
        assert_eq!(printed(false, &pieces), "a\n\nlast");
    }

    #[test]
    fn a_line_in_pieces_is_one_line_unless_others_write() {
        let alone = [(0, "a", End::More), (0, "b", End::More), (0, "c", End::Newline)];
        assert_eq!(printed(true, &alone), "[rank 0] abc\n");
        let others = [(0, "a", End::More), (1, "x", End::Newline), (0, "b", End::Newline)];
        assert_eq!(printed(true, &others), "[rank 0] a\n[rank 1] x\n[rank 0] b\n");
        assert_eq!(printed(false, &others), "a\nx\nb\n");
    }

    #[test]
    fn progress_becomes_lines_with_labels_and_stays_progress_without() {
        let pieces = [(0, "", End::Return), (0, "1%", End::Return), (0, "2%", End::Newline)];
        assert_eq!(printed(true, &pieces), "[rank 0] 1%\n[rank 0] 2%\n");
        assert_eq!(printed(false, &pieces), "\r1%\r2%\n");
    }

    #[test]
    fn a_broken_stream_is_one_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let ours: &'static UnixStream = Box::leak(Box::new(ours));
        let stream: BorrowedFd<'static> = ours.as_fd();
        let printer = Printer::new(stream, 1, true);
        let send = || {
            let mut page = printer.page();
            page.add(Rank::ROOT, b"x", End::Newline);
            page.send()
        };
        assert_eq!(send().unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        assert!(send().is_ok());
    }
}
