//! What saves and removals that did not end have left behind.

use crate::folder::{self, StepFolder};
use crate::manifest::NAME;
use crate::storage::{Storage, Usage};

/// Removes leftovers that nobody writes to any more. What cannot be removed stays for the next time.
pub(crate) fn sweep(storage: &dyn Storage) {
    let names = match storage.list("") {
        Ok(names) => names,
        Err(error) => return tracing::warn!(%storage, %error, "cannot look for leftovers of earlier saves"),
    };
    if !storage.renames() {
        return sweep_in_place(storage, &names);
    }
    for name in names.iter().filter(|name| folder::is_temporary(name)) {
        // Marked for as long as it is being removed.
        let removed = storage.mark(name, Usage::Exclusive).and_then(|mark| match mark {
            Some(_mark) => storage.remove_folder(name),
            None => Ok(()),
        });
        if let Err(error) = removed {
            tracing::warn!(%storage, %name, %error, "a leftover of an earlier save cannot be removed");
        }
    }
}

/// Where checkpoints are written in place: what has no manifest and is older than one that has, for a save that still goes
/// on is newer than all that are there.
fn sweep_in_place(storage: &dyn Storage, names: &[String]) {
    let mut newest_seen = false;
    for name in names.iter().rev().filter(|name| name.parse::<StepFolder>().is_ok()) {
        let complete = storage.list(name).map(|files| files.iter().any(|file| file == NAME));
        match complete {
            Ok(true) => newest_seen = true,
            Ok(false) if newest_seen => {
                if let Err(error) = storage.remove_folder(name) {
                    tracing::warn!(%storage, %name, %error, "a leftover of an earlier save cannot be removed");
                }
            }
            Ok(false) | Err(_) => {}
        }
    }
}
