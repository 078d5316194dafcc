//! Looking for an address until somebody answers there.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use crate::clock::FOREVER;
use crate::open_files;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// The moment when `patience` is over.
pub(super) fn after(patience: Duration) -> Instant {
    Instant::now() + patience.min(FOREVER)
}

/// Why a search ended without success.
pub(super) enum Miss<E> {
    /// No address was found.
    Nothing,
    /// Nobody answered at the last one.
    Silent { address: String, cause: E },
}

/// Looks for an address and connects to it, until that succeeds or `deadline` comes.
///
/// What is found may have been left over by an earlier job, so an address that does not answer is looked up
/// again. `connect` gets an address and the time left, and has to come back within it.
///
/// # Errors
///
/// The outer error is the first of `look`. Without files to try again with, the search ends.
pub(super) fn search<T, E: Error + 'static, F>(
    deadline: Instant,
    mut look: impl FnMut() -> Result<Option<String>, F>,
    mut connect: impl FnMut(&str, Duration) -> Result<T, E>,
) -> Result<Result<T, Miss<E>>, F> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut miss = Miss::Nothing;
    loop {
        if let Some(address) = look()? {
            match connect(&address, left()) {
                Ok(found) => return Ok(Ok(found)),
                Err(cause) => {
                    let is_last = open_files::are_exhausted(&cause);
                    // A secret may follow.
                    let address = address.split_whitespace().next().unwrap_or_default().to_owned();
                    miss = Miss::Silent { address, cause };
                    if is_last {
                        return Ok(Err(miss));
                    }
                }
            }
        }
        thread::sleep(PAUSE.min(left()));
        if left().is_zero() {
            return Ok(Err(miss));
        }
    }
}
