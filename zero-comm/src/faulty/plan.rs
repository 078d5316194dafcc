//! Which faults are to happen, and where.

use std::fmt;
use std::num::{NonZeroU64, ParseIntError};
use std::str::FromStr;
use std::time::Duration;

use zero_core::{Rank, nearest};

use super::FaultPlanError;

/// Faults to happen, for all ranks; read from text such as `rank=1,op=20,kill`.
///
/// Faults are separated by `;`. Each has a `rank`, an `op`, which is the number of the rank's operation
/// counted from 1, and one of `drop`, `delay=TIME`, `corrupt`, `kill` and `panic`, in any order; see
/// [`FaultKind`]. A `TIME` has a unit, as in `250ms` or `1m 30s`. Text without a fault is a plan without.
///
/// ```
/// use zero_comm::FaultPlan;
///
/// let plan: FaultPlan = "rank=1,op=20,kill; rank=0,op=3,delay=250ms".parse()?;
/// assert_eq!(plan.faults().len(), 2);
///
/// let error = "rank=1,op=20,kil".parse::<FaultPlan>().unwrap_err();
/// assert!(error.to_string().contains("\"kil\" is not known (did you mean kill?)"));
/// # Ok::<_, zero_comm::FaultPlanError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan(Vec<Fault>);

/// One fault to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank of the world to which it happens.
    pub rank: Rank,
    /// The number of that rank's operation with which it happens, counted from 1 over all its groups:
    /// collective operations, sends, receives and reads.
    pub operation: NonZeroU64,
    /// What happens.
    pub kind: FaultKind,
}

/// What happens to a rank at one of its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// The rank does not take part. Its call returns when the world has failed because of that, with the
    /// error that names this rank: whoever waits for it gets [`CommError::Timeout`](crate::CommError::Timeout)
    /// at the latest when its own deadline is over. If the world stands after twice this rank's deadline,
    /// nobody waits, and the rank aborts the world.
    Drop,
    /// The rank comes later, by this time.
    Delay(Duration),
    /// One bit of every element that the rank sends is inverted, on a copy of the data. Where the rank only
    /// receives (a receive, a read, a broadcast of another rank), it is what the rank receives. An operation
    /// without data cannot be corrupted; the fault then waits for the rank's next one that has some.
    Corrupt,
    /// The process ends at once, without unwinding and without a word: by `SIGKILL` where there is one.
    Kill,
    /// The calling thread panics: what a rank that is a thread does instead of being killed.
    Panic,
}

impl FaultPlan {
    /// The faults, in the order given.
    pub fn faults(&self) -> &[Fault] {
        &self.0
    }
}

impl From<Vec<Fault>> for FaultPlan {
    fn from(faults: Vec<Fault>) -> Self {
        Self(faults)
    }
}

impl FromStr for FaultPlan {
    type Err = FaultPlanError;

    fn from_str(text: &str) -> Result<Self, FaultPlanError> {
        let faults = text.split(';').map(str::trim).filter(|fault| !fault.is_empty());
        Ok(Self(faults.map(parse).collect::<Result<_, _>>()?))
    }
}

/// Reads one fault.
fn parse(text: &str) -> Result<Fault, FaultPlanError> {
    let fault = || text.to_owned();
    let (mut rank, mut operation, mut kind) = (None, None, None);
    for word in text.split(',').map(str::trim) {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name.trim_end(), Some(value.trim_start())),
            None => (word, None),
        };
        let bad = |reason: String| FaultPlanError::Value { fault: fault(), word: word.to_owned(), reason };
        let number = |error: ParseIntError| bad(error.to_string());
        let again = match (name, value) {
            ("rank", Some(value)) => rank.replace(Rank::new(value.parse().map_err(number)?)).is_some(),
            ("op", Some(value)) => operation.replace(value.parse().map_err(number)?).is_some(),
            ("delay", Some(value)) => {
                let time = humantime::parse_duration(value).map_err(|error| bad(error.to_string()))?;
                kind.replace(FaultKind::Delay(time)).is_some()
            }
            ("drop", None) => kind.replace(FaultKind::Drop).is_some(),
            ("corrupt", None) => kind.replace(FaultKind::Corrupt).is_some(),
            ("kill", None) => kind.replace(FaultKind::Kill).is_some(),
            ("panic", None) => kind.replace(FaultKind::Panic).is_some(),
            ("rank" | "op" | "delay", None) => return Err(bad("it needs a value".to_owned())),
            ("drop" | "corrupt" | "kill" | "panic", Some(_)) => {
                return Err(bad("it takes no value".to_owned()));
            }
            _ => {
                let meant = nearest(name, ["rank", "op", "delay", "drop", "corrupt", "kill", "panic"]);
                return Err(FaultPlanError::Unknown { fault: fault(), word: word.to_owned(), meant });
            }
        };
        if again {
            return Err(FaultPlanError::Twice { fault: fault(), word: word.to_owned() });
        }
    }
    let missing = |what| FaultPlanError::Missing { fault: fault(), what };
    Ok(Fault {
        rank: rank.ok_or_else(|| missing("rank=RANK"))?,
        operation: operation.ok_or_else(|| missing("op=NUMBER"))?,
        kind: kind.ok_or_else(|| missing("one of drop, delay=TIME, corrupt, kill and panic"))?,
    })
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, fault) in self.0.iter().enumerate() {
            write!(f, "{}{fault}", if position == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank={},op={},{}", self.rank.index(), self.operation, self.kind)
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drop => f.pad("drop"),
            Self::Delay(time) => write!(f, "delay={}", humantime::format_duration(*time)),
            Self::Corrupt => f.pad("corrupt"),
            Self::Kill => f.pad("kill"),
            Self::Panic => f.pad("panic"),
        }
    }
}
