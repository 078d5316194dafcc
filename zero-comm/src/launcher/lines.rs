//! Lines in a stream of bytes, and the last of them.

use std::collections::VecDeque;

use crate::last_words;

/// No more of one line than this is held back; a longer one is passed on in pieces. A line of news, with a rank's
/// last words, must not be.
pub(crate) const MAX_LINE: usize = 64 * 1024;

const _: () = assert!(last_words::MAX_BYTES + 1024 < MAX_LINE as u64);

/// How a piece of a line ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With `\n`.
    Newline,
    /// With a `\r` of its own: what follows is to be written over it, as progress bars do.
    Return,
    /// The line goes on in the next piece.
    More,
    /// The stream ends here, without `\n`.
    Stream,
}

/// Cuts a stream into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    held: Vec<u8>,
    /// How much of `held` has no end of a line in it.
    searched: usize,
}

impl Lines {
    /// Takes the next bytes of the stream and gives `each` every line that they complete, without its end.
    pub(crate) fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8], End)) {
        self.held.extend_from_slice(bytes);
        let (mut start, mut at) = (0, self.searched);
        while let Some(found) = self.held[at..].iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let end = at + found;
            let kind = match (self.held[end], self.held.get(end + 1)) {
                (b'\n', _) => End::Newline,
                // It may be half of an end of a line.
                (_, None) => break,
                // It is.
                (_, Some(b'\n')) => {
                    at = end + 1;
                    continue;
                }
                _ => End::Return,
            };
            each(&self.held[start..end], kind);
            (start, at) = (end + 1, end + 1);
        }
        self.held.drain(..start);
        if self.held.len() >= MAX_LINE {
            each(&self.held, End::More);
            self.held.clear();
        }
        self.searched = self.held.len().saturating_sub(1);
    }

    /// Gives `each` what is left when the stream has ended.
    pub(crate) fn finish(&mut self, mut each: impl FnMut(&[u8], End)) {
        if !self.held.is_empty() {
            each(&self.held, End::Stream);
        }
        *self = Self::default();
    }
}

/// The last lines of a stream, as far as a person would read them.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<Vec<u8>>,
    /// Whether the last line goes on.
    open: bool,
}

impl Tail {
    const LINES: usize = 20;
    const BYTES_PER_LINE: usize = 1000;

    pub(crate) fn push(&mut self, piece: &[u8], end: End) {
        if end == End::Return {
            return;
        }
        if !self.open {
            if self.lines.len() == Self::LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(Vec::new());
        }
        if let Some(line) = self.lines.back_mut() {
            let room = Self::BYTES_PER_LINE - line.len();
            line.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        self.open = end == End::More;
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        self.lines.iter().map(|line| String::from_utf8_lossy(line).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::{End, Lines, MAX_LINE, Tail};

    /// What comes of a stream that arrives in `chunks`, each piece with the sign of its end.
    fn pieces(chunks: &[&[u8]]) -> Vec<(Vec<u8>, End)> {
        let (mut lines, mut found) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.push(chunk, |piece, end| found.push((piece.to_vec(), end)));
        }
        lines.finish(|piece, end| found.push((piece.to_vec(), end)));
        found
    }

    fn piece(text: &str, end: End) -> (Vec<u8>, End) {
        (text.as_bytes().to_vec(), end)
    }

    #[test]
    fn cuts_do_not_depend_on_how_the_stream_arrives() {
        let stream = b"one\n\ntwo\r\n10%\r20%\r\r\n\rend";
        let expected = [
            piece("one", End::Newline),
            piece("", End::Newline),
            piece("two\r", End::Newline),
            piece("10%", End::Return),
            piece("20%", End::Return),
            piece("\r", End::Newline),
            piece("", End::Return),
            piece("end", End::Stream),
        ];
        assert_eq!(pieces(&[stream]), expected);
        for size in 1..stream.len() {
            let chunks: Vec<&[u8]> = stream.chunks(size).collect();
            assert_eq!(pieces(&chunks), expected, "{size}");
        }
    }

    #[test]
    fn a_stream_that_ends_with_its_line_leaves_nothing() {
        assert_eq!(pieces(&[b"a\n"]), [piece("a", End::Newline)]);
        assert_eq!(pieces(&[b"a\r"]), [piece("a\r", End::Stream)]);
        assert_eq!(pieces(&[b"", b""]), []);
    }

    #[test]
    fn a_line_that_is_too_long_comes_in_pieces_of_all_its_bytes() {
        let line = vec![b'x'; 3 * MAX_LINE + 5];
        let chunks: Vec<&[u8]> = line.chunks(1000).chain([&b"\n"[..]]).collect();
        let found = pieces(&chunks);
        assert!(found.len() == 3 && found.iter().all(|(piece, _)| piece.len() < MAX_LINE + 1000));
        assert_eq!(found.iter().map(|(piece, _)| piece.len()).sum::<usize>(), line.len());
        let (last, others) = found.split_last().unwrap();
        assert_eq!(last.1, End::Newline);
        assert!(others.iter().all(|(_, end)| *end == End::More));
    }

    #[test]
    fn a_tail_keeps_the_last_lines_bounded_and_without_progress() {
        let mut tail = Tail::default();
        for number in 0..100 {
            tail.push(b"50%", End::Return);
            tail.push(format!("line {number}").as_bytes(), End::Newline);
        }
        tail.push(&[b'x'; 800], End::More);
        tail.push(&[b'y'; 800], End::Newline);
        tail.push(b"\xFF!", End::Stream);
        let lines: Vec<String> = tail.lines().collect();
        assert_eq!(lines.len(), 20);
        assert_eq!((lines[0].as_str(), lines[17].as_str()), ("line 82", "line 99"));
        assert_eq!(lines[18], "x".repeat(800) + &"y".repeat(200));
        assert_eq!(lines[19], "\u{FFFD}!");
    }
}
