//! Marks that this process alone sees.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::storage::Usage;

/// What is marked, and for what. Clones are the same table.
#[derive(Debug)]
pub(crate) struct Marks<K>(Arc<Mutex<HashMap<K, Marked>>>);

#[derive(Debug, Default)]
struct Marked {
    shared: usize,
    exclusive: bool,
}

impl<K> Clone for Marks<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> Default for Marks<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Clone + Eq + Hash> Marks<K> {
    /// Marks a folder; `None` if another mark does not go with it.
    pub(crate) fn mark(&self, folder: K, usage: Usage) -> Option<Mark<K>> {
        let mut table = self.table();
        let marked = table.entry(folder.clone()).or_default();
        match usage {
            _ if marked.exclusive => return None,
            Usage::Exclusive if marked.shared > 0 => return None,
            Usage::Exclusive => marked.exclusive = true,
            Usage::Shared => marked.shared += 1,
        }
        drop(table);
        Some(Mark { marks: self.clone(), folder, usage })
    }

    fn table(&self) -> MutexGuard<'_, HashMap<K, Marked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mark, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mark<K: Clone + Eq + Hash> {
    marks: Marks<K>,
    folder: K,
    usage: Usage,
}

impl<K: Clone + Eq + Hash> Drop for Mark<K> {
    fn drop(&mut self) {
        let mut table = self.marks.table();
        if let Some(marked) = table.get_mut(&self.folder) {
            match self.usage {
                Usage::Shared => marked.shared -= 1,
                Usage::Exclusive => marked.exclusive = false,
            }
            if marked.shared == 0 && !marked.exclusive {
                table.remove(&self.folder);
            }
        }
    }
}
