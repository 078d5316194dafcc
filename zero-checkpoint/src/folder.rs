//! What folders are called.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::error::CheckpointError;
use crate::storage::{Storage, Usage};

const PREFIX: &str = "step-";
const TEMPORARY: &str = ".tmp-";
const DIGITS: usize = 10;

/// How often a folder is made that somebody sweeps before it is marked.
const ATTEMPTS: usize = 3;

/// The folder of a step's checkpoint: `step-0000001000`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StepFolder(u64);

impl StepFolder {
    pub(crate) fn of(step: u64) -> Self {
        Self(step)
    }

    pub(crate) fn step(self) -> u64 {
        self.0
    }
}

impl fmt::Display for StepFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{:0DIGITS$}", self.0)
    }
}

impl FromStr for StepFolder {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let step: u64 = name.strip_prefix(PREFIX).ok_or(())?.parse().map_err(|_| ())?;
        // One name for one step.
        let folder = Self(step);
        if folder.to_string() == name { Ok(folder) } else { Err(()) }
    }
}

/// The name of a step's folder while it is not, or no longer, a checkpoint.
pub(crate) fn temporary(step: u64, nonce: &str) -> String {
    format!("{TEMPORARY}{}-{nonce}", StepFolder::of(step))
}

/// Makes such a folder, and marks it as in use.
pub(crate) fn make_temporary(
    storage: &dyn Storage,
    step: u64,
) -> Result<(String, Box<dyn Send + Sync>), CheckpointError> {
    for _ in 0..ATTEMPTS {
        let folder = temporary(step, &nonce());
        storage.create_folder(&folder).map_err(failed(storage, "make", &folder))?;
        match storage.mark(&folder, Usage::Shared) {
            Ok(Some(mark)) => return Ok((folder, mark)),
            // Somebody sweeps it.
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(storage, "mark", &folder)(error)),
        }
    }
    Err(CheckpointError::Swept { place: storage.to_string(), step })
}

/// Whether a name is one that [`temporary`] makes.
pub(crate) fn is_temporary(name: &str) -> bool {
    let parts = name.strip_prefix(TEMPORARY).and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(step, nonce)| {
        let is_nonce = nonce.len() == 16 && nonce.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_nonce && step.parse::<StepFolder>().is_ok()
    })
}

/// 16 hexadecimal digits that nobody else has.
pub(crate) fn nonce() -> String {
    let mut bytes = [0; 8];
    if getrandom::fill(&mut bytes).is_err() {
        // Without random numbers: no two processes share their number and the time.
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let mixed = (u128::from(std::process::id()) << 64) ^ time.as_nanos();
        bytes = ((mixed >> 64) as u64 ^ (mixed as u64).rotate_left(20)).to_le_bytes();
    }
    format!("{:016x}", u64::from_le_bytes(bytes))
}

/// The error of an action on a path of a storage.
pub(crate) fn failed<'a>(
    storage: &'a dyn Storage,
    action: &'static str,
    path: &'a str,
) -> impl Fn(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Storage { action, path: shown(storage, path), source }
}

/// A path with the storage that it is in.
pub(crate) fn shown(storage: &dyn Storage, path: &str) -> String {
    if path.is_empty() { storage.to_string() } else { format!("{storage}/{path}") }
}

/// The steps of all folders with a checkpoint's name, oldest first.
pub(crate) fn steps(storage: &dyn Storage) -> Result<Vec<u64>, CheckpointError> {
    let names = storage.list("").map_err(failed(storage, "list", ""))?;
    let mut steps: Vec<u64> =
        names.iter().filter_map(|name| name.parse::<StepFolder>().ok()).map(StepFolder::step).collect();
    steps.sort_unstable();
    Ok(steps)
}
