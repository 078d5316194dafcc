//! Which checkpoints are kept.

use std::io;
use std::num::{NonZeroU64, NonZeroUsize};

use crate::error::CheckpointError;
use crate::folder::{self, StepFolder};
use crate::load;
use crate::storage::{Storage, Usage};

/// Which checkpoints are kept when a new one is there; by default all.
///
/// The newest one is kept in any case, and so is what somebody is reading. After a save, the newest is the one just saved:
/// if training was taken up from an older step, checkpoints of later steps are kept until it has come to them again. If none
/// of those that would be kept is good (its manifest is valid and its files are there, as long as they should be; hashes of
/// files are not compared), then nothing is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Retention {
    /// How many of the newest are kept; `None` for all.
    pub last: Option<NonZeroUsize>,
    /// Besides, those whose step is a multiple of this.
    pub every: Option<NonZeroU64>,
}

impl Retention {
    /// Of steps that are there, oldest first, those that need not be. `newest` is the one that was saved last, if that is
    /// not the last step.
    fn superfluous(self, steps: &[u64], newest: Option<u64>) -> Vec<u64> {
        let Some(last) = self.last else { return Vec::new() };
        let saved = steps.partition_point(|&step| newest.is_none_or(|newest| step <= newest));
        let older = &steps[..saved.saturating_sub(last.get())];
        let is_kept = |step: &u64| self.every.is_some_and(|every| *step % every == 0);
        older.iter().copied().filter(|step| !is_kept(step)).collect()
    }
}

/// Removes what need not be there after the save of a step. It has succeeded anyway, so problems are only told.
pub(crate) fn apply(storage: &dyn Storage, retention: Retention, saved: u64) {
    if let Err(error) = prune_up_to(storage, retention, Some(saved)) {
        tracing::warn!(%storage, %error, "old checkpoints are not all removed");
    }
}

/// Removes the checkpoints that need not be there, but for those that somebody reads; gives the steps of those removed.
///
/// # Errors
///
/// [`CheckpointError::NoneGood`]; [`Pruned`](CheckpointError::Pruned), after all others have been removed, if one of them
/// cannot be; those of the storage.
pub fn prune(storage: &dyn Storage, retention: Retention) -> Result<Vec<u64>, CheckpointError> {
    prune_up_to(storage, retention, None)
}

fn prune_up_to(
    storage: &dyn Storage,
    retention: Retention,
    newest: Option<u64>,
) -> Result<Vec<u64>, CheckpointError> {
    let (mut removed, mut failed) = (Vec::new(), None);
    for step in superfluous_up_to(storage, retention, newest)? {
        match remove(storage, step) {
            Ok(true) => removed.push(step),
            Ok(false) => {}
            Err(error) => failed = failed.or(Some((step, error))),
        }
    }
    match failed {
        None => Ok(removed),
        Some((step, error)) => Err(CheckpointError::Pruned { removed, step, source: Box::new(error) }),
    }
}

/// The steps that [`prune`] would remove, if nobody reads them.
///
/// # Errors
///
/// [`CheckpointError::NoneGood`]; those of the storage.
pub fn superfluous(storage: &dyn Storage, retention: Retention) -> Result<Vec<u64>, CheckpointError> {
    superfluous_up_to(storage, retention, None)
}

fn superfluous_up_to(
    storage: &dyn Storage,
    retention: Retention,
    newest: Option<u64>,
) -> Result<Vec<u64>, CheckpointError> {
    let steps = load::complete_steps(storage)?;
    let superfluous = retention.superfluous(&steps, newest);
    if superfluous.is_empty() {
        return Ok(superfluous);
    }
    let kept = steps.iter().rev().filter(|step| !superfluous.contains(step));
    if !kept.into_iter().any(|&step| load::is_good(storage, step)) {
        return Err(CheckpointError::NoneGood { place: storage.to_string() });
    }
    Ok(superfluous)
}

/// Removes a checkpoint, at once for whoever looks; whether it did: not while somebody reads or replaces it, nor if somebody
/// else has removed it.
fn remove(storage: &dyn Storage, step: u64) -> Result<bool, CheckpointError> {
    let folder = StepFolder::of(step).to_string();
    let mark = match storage.mark(&folder, Usage::Exclusive) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        mark => mark.map_err(folder::failed(storage, "mark", &folder))?,
    };
    let Some(_mark) = mark else { return Ok(false) };
    let mut doomed = folder.clone();
    if storage.renames() {
        doomed = folder::temporary(step, &folder::nonce());
        storage.rename(&folder, &doomed).map_err(folder::failed(storage, "rename", &folder))?;
        // Else a crash could bring the name back, but not all files.
        storage.sync_folder("").map_err(folder::failed(storage, "sync", ""))?;
    }
    storage.remove_folder(&doomed).map_err(folder::failed(storage, "remove", &doomed))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU64, NonZeroUsize};

    use super::Retention;

    #[test]
    fn the_last_and_every_nth_are_kept() {
        let steps = [10, 20, 25, 30, 40];
        let superfluous = |last, every| {
            let retention = Retention { last: NonZeroUsize::new(last), every: NonZeroU64::new(every) };
            retention.superfluous(&steps, None)
        };
        assert!(superfluous(0, 0).is_empty());
        assert!(superfluous(0, 7).is_empty());
        assert_eq!(superfluous(2, 0), [10, 20, 25]);
        assert_eq!(superfluous(1, 20), [10, 25, 30]);
        assert!(superfluous(9, 0).is_empty());
    }

    #[test]
    fn later_steps_than_the_one_just_saved_do_not_count() {
        let retention = Retention { last: NonZeroUsize::new(2), every: None };
        assert!(retention.superfluous(&[150, 200, 300], Some(150)).is_empty());
        assert_eq!(retention.superfluous(&[150, 160, 170, 200, 300], Some(170)), [150]);
        assert_eq!(retention.superfluous(&[190, 200, 210, 300], Some(210)), [190]);
    }
}
