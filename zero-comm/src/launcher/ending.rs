//! How a rank ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Instant;

use super::memory::OutOfMemory;
use super::placement::Place;
use super::signals;
use crate::last_words::{Kind, LastWords};

/// How the process of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Code(i32),
    Signal(i32),
    /// Its machine would not start it, for this reason; the code is the one for the job.
    Refused {
        code: u8,
        reason: String,
    },
    /// What connected us with its machine ended so before it.
    Lost(ExitStatus),
    /// It did not end, not even when it was killed.
    Stuck,
}

impl Status {
    /// What a shell says about a process.
    pub(crate) fn from_shell(code: i32) -> Self {
        match code - 128 {
            signal @ 1.. if signal_hook::low_level::signal_name(signal).is_some() => Self::Signal(signal),
            _ => Self::Code(code),
        }
    }

    pub(crate) fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    /// What this program ends with if this is the cause.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Code(code) => u8::try_from(*code).unwrap_or(u8::MAX),
            Self::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Refused { code, .. } => *code,
            Self::Lost(_) => u8::MAX,
            Self::Stuck => 128 + 9,
        }
    }

    /// Whether it may have been the kernel that killed the process, or one that its shell ran.
    pub(crate) fn may_be_killed_by_kernel(&self) -> bool {
        matches!(self, Self::Signal(9) | Self::Code(137))
    }
}

impl From<ExitStatus> for Status {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            // Neither is what an ended process has.
            (None, None) => Self::Stuck,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signals::name(*signal)),
            Self::Refused { reason, .. } => write!(f, "not started: {reason}"),
            Self::Lost(status) => {
                write!(f, "its machine was lost: the remote shell ended first, with {}", Self::from(*status))
            }
            Self::Stuck => write!(f, "does not end, not even when killed: see what its process waits for"),
        }
    }
}

/// What the other ranks had to do without a rank for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) at: Instant,
    pub(crate) what: String,
}

/// All that is known about the end of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Ending {
    pub(crate) place: Place,
    pub(crate) at: Instant,
    pub(crate) status: Status,
    /// The signal by which this program had asked it to end before.
    pub(crate) asked: Option<i32>,
    pub(crate) last_words: Option<LastWords>,
    /// The last lines of its standard error.
    pub(crate) tail: Vec<String>,
    pub(crate) out_of_memory: Option<OutOfMemory>,
    pub(crate) fault: Option<Fault>,
}

/// Whose doing the failure of a rank is, those first that explain most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    Itself,
    /// It says that it is another rank's.
    Another,
    /// This program asked it to end.
    Launcher,
}

impl Ending {
    /// An end without explanation.
    pub(crate) fn new(place: Place, at: Instant, status: Status, asked: Option<i32>) -> Self {
        Self {
            place,
            at,
            status,
            asked,
            last_words: None,
            tail: Vec::new(),
            out_of_memory: None,
            fault: None,
        }
    }

    pub(crate) fn is_success(&self) -> bool {
        self.status.is_success() && self.fault.is_none()
    }

    /// What this program ends with if this is the cause: how the process was ended by this program is not.
    pub(crate) fn exit_code(&self) -> u8 {
        if self.own_fault().is_some() { 1 } else { self.status.exit_code() }
    }

    /// When it failed.
    pub(crate) fn failed_at(&self) -> Instant {
        self.fault.as_ref().map_or(self.at, |fault| fault.at.min(self.at))
    }

    /// What the other ranks had to do without it for, unless its process ended with a failure of its own.
    pub(crate) fn own_fault(&self) -> Option<&str> {
        let by_itself = self.asked.is_none() && !self.status.is_success();
        self.fault.as_ref().filter(|_| !by_itself).map(|fault| fault.what.as_str())
    }

    /// Whose doing it is, for a rank that failed.
    pub(crate) fn origin(&self) -> Origin {
        if self.last_words.as_ref().is_some_and(|words| words.kind == Kind::Stopped) {
            Origin::Another
        } else if self.asked.is_some() && self.fault.is_none() {
            Origin::Launcher
        } else {
            Origin::Itself
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Status;

    #[test]
    fn a_shell_reports_signals_above_128() {
        assert_eq!(Status::from_shell(0), Status::Code(0));
        assert_eq!(Status::from_shell(128), Status::Code(128));
        assert_eq!(Status::from_shell(137), Status::Signal(9));
        assert_eq!(Status::from_shell(255), Status::Code(255));
    }

    #[test]
    fn signals_have_their_names_and_the_exit_codes_of_shells() {
        assert_eq!(Status::Signal(11).to_string(), "killed by SIGSEGV");
        assert_eq!(Status::Signal(11).exit_code(), 139);
        assert_eq!((Status::Code(3).to_string().as_str(), Status::Code(3).exit_code()), ("exit code 3", 3));
    }
}
