//! The windows that one rank exposes to a group.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::lock;
use crate::{Region, WindowKey};

/// What one rank shows to one group.
#[derive(Default)]
pub(crate) struct Windows(Mutex<HashMap<WindowKey, Arc<dyn Region>>>);

impl Windows {
    pub(crate) fn expose(&self, key: WindowKey, region: Arc<dyn Region>) {
        // A region may do anything when it goes, so it goes after the lock.
        let old = lock(&self.0).insert(key, region);
        drop(old);
    }

    pub(crate) fn withdraw(&self, key: WindowKey) {
        let old = lock(&self.0).remove(&key);
        drop(old);
    }

    /// The region to copy from; holding it keeps it, whatever the owner does.
    pub(crate) fn get(&self, key: WindowKey) -> Option<Arc<dyn Region>> {
        lock(&self.0).get(&key).cloned()
    }
}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(lock(&self.0).keys()).finish()
    }
}
