//! How a rank on another machine is reached: a script on the standard input of a remote shell, then names of
//! signals; the end of the input is the end of the rank.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ChildStdin;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use super::ending::Status;
use super::environment;
use super::signals;
use crate::last_words::{self, LastWords};

/// What is the same for all ranks.
const SCRIPT: &str = include_str!("remote.sh");

/// What another machine is told about a rank.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) folder: &'a Path,
    pub(crate) variables: &'a [(&'static str, String)],
    /// What the processes that a rank leaves behind get to end.
    pub(crate) grace: Duration,
    /// What begins a line of news.
    pub(crate) mark: &'a str,
}

impl Order<'_> {
    /// The script for a POSIX shell. It has the job's token in it.
    pub(crate) fn script(&self) -> io::Result<Vec<u8>> {
        let mut script = b"{\n".to_vec();
        let mut set = |name: &str, value: &OsStr| {
            script.extend_from_slice(name.as_bytes());
            script.push(b'=');
            script.extend_from_slice(&quoted(value)?);
            script.push(b'\n');
            io::Result::Ok(())
        };
        set("zr_mark", self.mark.as_ref())?;
        set("zr_folder", self.folder.as_ref())?;
        set("zr_grace", self.grace.as_secs_f64().ceil().to_string().as_ref())?;
        set("zr_max", last_words::MAX_BYTES.to_string().as_ref())?;
        set("zr_foreign", environment::foreign_pattern().as_ref())?;
        for (name, value) in environment::shared() {
            set(&format!("export {name}"), &value)?;
        }
        for (name, value) in self.variables {
            set(&format!("export {name}"), value.as_ref())?;
        }

        script.extend_from_slice(b"set --");
        for word in self.command {
            script.push(b' ');
            script.extend_from_slice(&quoted(word)?);
        }
        script.push(b'\n');
        script.extend_from_slice(SCRIPT.as_bytes());
        script.extend_from_slice(b"}\n");
        Ok(script)
    }
}

/// `text` as one word of a shell.
fn quoted(text: &OsStr) -> io::Result<Cow<'_, [u8]>> {
    shlex::bytes::try_quote(text.as_bytes()).map_err(io::Error::other)
}

/// The way to the other machine.
#[derive(Debug)]
pub(crate) struct Link {
    input: Option<Sender<Vec<u8>>>,
    /// Before this, what is sent could be taken for a part of the script.
    ready: bool,
    waiting: Vec<i32>,
}

impl Link {
    /// Sends the script on its way. Nothing here waits for the other machine.
    pub(crate) fn open(mut stdin: ChildStdin, script: Vec<u8>) -> io::Result<Self> {
        let (input, texts) = channel::<Vec<u8>>();
        let write = move || {
            for text in texts {
                if stdin.write_all(&text).is_err() {
                    // The remote shell has ended, which is noticed elsewhere.
                    break;
                }
            }
        };
        thread::Builder::new().name("remote".to_owned()).spawn(write)?;
        let link = Self { input: Some(input), ready: false, waiting: Vec::new() };
        link.send(script);
        Ok(link)
    }

    pub(crate) fn signal(&mut self, signal: i32) {
        if self.ready {
            let name = signals::name(signal);
            self.send(format!("{}\n", name.trim_start_matches("SIG")).into_bytes());
        } else {
            self.waiting.push(signal);
        }
    }

    pub(crate) fn ready(&mut self) {
        self.ready = true;
        for signal in std::mem::take(&mut self.waiting) {
            self.signal(signal);
        }
    }

    /// Ends the rank.
    pub(crate) fn close(&mut self) {
        self.input = None;
    }

    fn send(&self, text: Vec<u8>) {
        if let Some(input) = &self.input {
            // If the writer has ended, so has the remote shell.
            let _ = input.send(text);
        }
    }
}

/// What the other machine tells about its rank.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// It takes signals from now on.
    Ready,
    /// It does not start the rank.
    Refused { code: u8, reason: String },
    /// The rank has ended.
    Ended { status: Status, out_of_memory: bool, last_words: Option<LastWords> },
}

impl News {
    /// What follows the mark in a line.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(text);
        let mut words = text.trim_start().splitn(4, ' ');
        match words.next()? {
            "ready" => Some(Self::Ready),
            "refused" => {
                let code = words.next()?.parse().ok()?;
                Some(Self::Refused { code, reason: words.collect::<Vec<_>>().join(" ") })
            }
            "ended" => {
                let status = Status::from_shell(words.next()?.parse().ok()?);
                let out_of_memory = words.next()? == "out";
                let last_words = words.next().and_then(|words| LastWords::parse(words.as_bytes()));
                Some(Self::Ended { status, out_of_memory, last_words })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;
    use std::process::{Command, Stdio};

    use super::{News, quoted};
    use crate::launcher::ending::Status;

    #[test]
    fn news_is_what_the_script_writes() {
        assert_eq!(News::parse(b" ready"), Some(News::Ready));
        let refused = News::Refused { code: 127, reason: "there is no program a b  c".into() };
        assert_eq!(News::parse(b" refused 127 there is no program a b  c"), Some(refused));
        let ended = |status, out_of_memory| News::Ended { status, out_of_memory, last_words: None };
        assert_eq!(News::parse(b" ended 3 enough "), Some(ended(Status::Code(3), false)));
        assert_eq!(News::parse(b" ended 137 out {"), Some(ended(Status::Signal(9), true)));
        let words = News::parse(br#" ended 1 enough {"kind":"error","message":"a b  c d"}"#);
        let Some(News::Ended { last_words: Some(words), .. }) = words else { panic!("{words:?}") };
        assert_eq!(words.message, "a b  c d");
    }

    #[test]
    fn what_is_no_news_is_none() {
        for text in ["", " ", " other", " ended", " ended x enough", " refused 999 x"] {
            assert_eq!(News::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_quoted_word_means_itself_whatever_is_in_it() {
        let words = ["", "~", "it's", "a\nb", "$HOME `x` \\", "\"!*", "-e", "#", "\u{1}\u{7f}\u{fc}"];
        for word in words {
            let line = quoted(word.as_ref()).unwrap().into_owned();
            let text = OsStr::from_bytes(&line);
            let output = Command::new("sh")
                .args([OsStr::new("-c"), &OsString::from_iter([OsStr::new("printf %s. "), text])])
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert_eq!(output.stdout, format!("{word}.").into_bytes());
        }
    }
}
