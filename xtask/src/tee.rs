//! Commands whose output is shown as it comes and kept.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::Context;

/// What a command did.
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    /// The lines of both its streams, each stream in its order.
    pub(crate) lines: Vec<String>,
}

/// Runs a command to its end without input.
pub(crate) fn stream(mut command: Command) -> anyhow::Result<Outcome> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
    let stdout = child.stdout.take().context("the command's output is not piped")?;
    let stderr = child.stderr.take().context("the command's error output is not piped")?;

    let lines = Mutex::new(Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| copy(stdout, io::stdout(), &lines));
        scope.spawn(|| copy(stderr, io::stderr(), &lines));
    });
    let status = child.wait()?;
    Ok(Outcome { status, lines: lines.into_inner().unwrap_or_else(PoisonError::into_inner) })
}

/// Copies lines until the command closes its end of the stream.
fn copy(from: impl Read, mut to: impl Write, lines: &Mutex<Vec<String>>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while matches!(from.read_until(b'\n', &mut line), Ok(count) if count > 0) {
        // Whoever was watching may have gone; the command has to end all the same.
        let _ = to.write_all(&line).and_then(|()| to.flush());
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        lines.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Mutex;

    use super::{copy, stream};

    #[test]
    fn output_is_shown_unchanged_and_kept_by_line() {
        let (mut shown, kept) = (Vec::new(), Mutex::default());
        copy(&b"one\r\n\ntwo \xFF\nno newline"[..], &mut shown, &kept);
        assert_eq!(shown, b"one\r\n\ntwo \xFF\nno newline");
        assert_eq!(kept.into_inner().unwrap(), ["one", "", "two \u{FFFD}", "no newline"]);
    }

    #[test]
    fn a_command_ends_with_its_lines_and_its_status() {
        let mut rustc = Command::new("rustc");
        rustc.arg("--version");
        let outcome = stream(rustc).unwrap();
        assert!(outcome.status.success());
        assert!(outcome.lines[0].starts_with("rustc "), "{:?}", outcome.lines);

        // Fails without a word.
        let mut git = Command::new("git");
        git.args(["config", "--get", "no.such-key"]);
        let outcome = stream(git).unwrap();
        assert_eq!((outcome.status.code(), outcome.lines.len()), (Some(1), 0));
    }

    #[test]
    fn a_command_that_does_not_exist_is_an_error_with_its_name() {
        let error = stream(Command::new("no-such-program")).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "cannot start no-such-program");
    }
}
