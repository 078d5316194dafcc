//! What saves and removals that did not end have left behind.

use std::io;

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
    names.iter().filter(|name| folder::is_temporary(name)).for_each(|name| remove(storage, name));
}

/// Removes a folder, marked for as long as that takes, if nobody else has marked it.
fn remove(storage: &dyn Storage, name: &str) {
    let removed = storage.mark(name, Usage::Exclusive).and_then(|mark| match mark {
        Some(_mark) => storage.remove_folder(name),
        None => Ok(()),
    });
    match removed {
        // Somebody else has removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(%storage, %name, %error, "a leftover of an earlier save cannot be removed");
        }
        Ok(()) => {}
    }
}

/// Where checkpoints are written in place: what has no manifest, is older than one that has, and is not marked. A save that
/// goes on is newer than all that are there, unless training was taken up from an older step; then its mark tells.
fn sweep_in_place(storage: &dyn Storage, names: &[String]) {
    let mut newest_seen = false;
    for name in names.iter().rev().filter(|name| name.parse::<StepFolder>().is_ok()) {
        let complete = storage.list(name).map(|files| files.iter().any(|file| file == NAME));
        match complete {
            Ok(true) => newest_seen = true,
            Ok(false) if newest_seen => remove(storage, name),
            Ok(false) | Err(_) => {}
        }
    }
}
