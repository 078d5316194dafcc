//! The command line.

use std::ffi::OsString;
use std::time::Duration;

use clap::Parser;

use super::placement::{Host, ranks};
use crate::{LocalWorld, ProcessWorld};

/// Thirty years: a limit that far away still is a point in time.
const MAX_SECONDS: f64 = 1e9;

/// What reaches other machines by default.
const RSH: &str = "ssh -o BatchMode=yes -o ServerAliveInterval=15";

/// Starts the ranks of a job, ends them together, and says which failed first and why.
#[derive(Debug, Parser)]
#[command(name = "zero-run", version)]
pub struct LaunchOptions {
    /// How many ranks there are.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = ranks, required_unless_present = "hosts")]
    pub(crate) ranks: Option<usize>,

    /// Where they run, in the order of ranks: `a:2,b:2`, or with -n just `a,b`, for equal shares.
    ///
    /// `localhost`, `127.0.0.1` and the name of this machine are here; others are reached by --rsh.
    #[arg(long, value_name = "HOST[:RANKS],...", value_delimiter = ',')]
    pub(crate) hosts: Vec<Host>,

    /// Ends the job if it is not over after so many seconds, with exit code 124.
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    pub(crate) deadline: Option<Duration>,

    /// Gives up if not all ranks have joined after so many seconds.
    ///
    /// Ranks may have to wait for each other so long before their world begins. A program that does not use the
    /// library does not join.
    #[arg(long, value_name = "SECS", value_parser = seconds, default_value = "300")]
    pub(crate) join_deadline: Duration,

    /// Reaches other machines; is given `HOST sh -s` and a script on its standard input.
    #[arg(long, value_name = "PROGRAM", value_parser = words, requires = "hosts",
        default_value = RSH)]
    pub(crate) rsh: Words,

    /// Passes the ranks' output on as it is, without `[rank k] ` before each line.
    #[arg(long)]
    pub(crate) no_prefix: bool,

    /// How many seconds ranks that were asked to end get before they are killed [default: 5 after a signal,
    /// 2 after another rank's failure].
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    pub(crate) grace: Option<Duration>,

    /// What every rank runs.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

impl LaunchOptions {
    /// `ranks` ranks on this machine, each of which runs `command`, a program and its arguments.
    ///
    /// # Errors
    ///
    /// [`LaunchOptionsError`].
    pub fn local(
        ranks: usize,
        command: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, LaunchOptionsError> {
        let command: Vec<_> = command.into_iter().collect();
        if !(1..=ProcessWorld::MAX_RANKS).contains(&ranks) {
            return Err(LaunchOptionsError::Ranks { ranks });
        }
        if command.is_empty() {
            return Err(LaunchOptionsError::NoCommand);
        }
        Ok(Self {
            ranks: Some(ranks),
            hosts: Vec::new(),
            deadline: None,
            join_deadline: LocalWorld::DEFAULT_DEADLINE,
            rsh: Words(RSH.split(' ').map(str::to_owned).collect()),
            no_prefix: false,
            grace: None,
            command,
        })
    }
}

/// Why a job cannot be described so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchOptionsError {
    /// There are no ranks, or more than anybody means.
    #[error("a job cannot have {ranks} ranks; ask for 1 to {}", ProcessWorld::MAX_RANKS)]
    Ranks {
        /// How many were asked for.
        ranks: usize,
    },

    /// There is nothing to run.
    #[error("no program is named for the ranks to run; give its name and then its arguments")]
    NoCommand,
}

/// A program and its first arguments; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Words(pub(crate) Vec<String>);

fn words(text: &str) -> Result<Words, String> {
    match shlex::split(text) {
        Some(words) if !words.is_empty() => Ok(Words(words)),
        Some(_) => Err("names no program".to_owned()),
        None => Err("has a quote that is not closed".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 0.0..=MAX_SECONDS) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("{text:?} is no number of seconds from 0 to {MAX_SECONDS}")),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::time::Duration;

    use clap::{CommandFactory, Parser};

    use super::{LaunchOptions, LaunchOptionsError, Words, seconds, words};

    #[test]
    fn the_command_line_is_consistent() {
        LaunchOptions::command().debug_assert();
    }

    #[test]
    fn everything_after_the_command_belongs_to_it_with_and_without_dashes() {
        for line in [
            &["-n", "2", "--", "train", "-n", "3", "--", "x"][..],
            &["-n", "2", "train", "-n", "3", "--", "x"],
        ] {
            let cli = LaunchOptions::try_parse_from(["zero-run"].iter().chain(line)).unwrap();
            assert_eq!(cli.ranks, Some(2));
            assert_eq!(cli.command, ["train", "-n", "3", "--", "x"]);
        }
    }

    #[test]
    fn a_job_without_ranks_or_command_is_refused() {
        for line in [&["--", "train"][..], &["-n", "0", "--", "train"], &["-n", "2"], &["-n", "70000", "x"]] {
            assert!(LaunchOptions::try_parse_from(["zero-run"].iter().chain(line)).is_err(), "{line:?}");
        }
    }

    #[test]
    fn a_job_on_this_machine_is_what_the_command_line_says() {
        let command = ["train", "-n", "3"].map(OsString::from);
        let local = LaunchOptions::local(2, command.clone()).unwrap();
        let line = [OsString::from("zero-run"), "-n".into(), "2".into(), "--".into()];
        let parsed = LaunchOptions::try_parse_from(line.into_iter().chain(command)).unwrap();
        assert_eq!(format!("{local:?}"), format!("{parsed:?}"));
    }

    #[test]
    fn a_job_on_this_machine_has_ranks_and_a_command() {
        let local = |ranks, command: &[&str]| {
            LaunchOptions::local(ranks, command.iter().map(OsString::from)).map(|_| ()).unwrap_err()
        };
        assert_eq!(local(0, &["train"]), LaunchOptionsError::Ranks { ranks: 0 });
        assert_eq!(local(70_000, &["train"]), LaunchOptionsError::Ranks { ranks: 70_000 });
        assert_eq!(local(1, &[]), LaunchOptionsError::NoCommand);
    }

    #[test]
    fn seconds_may_have_fractions_but_must_be_within_reason() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("1e9"), Ok(Duration::from_secs(1_000_000_000)));
        for text in ["-1", "nan", "inf", "1e40", "two", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_remote_shell_may_have_arguments_and_quotes() {
        let expected = ["ssh", "-i", "my key"].map(str::to_owned);
        assert_eq!(words("ssh -i 'my key'"), Ok(Words(expected.to_vec())));
        assert!(words(" ").is_err() && words("ssh 'x").is_err());
    }
}
