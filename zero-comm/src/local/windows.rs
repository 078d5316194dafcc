//! The windows that one rank exposes to a group.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::{Region, WindowKey};

#[derive(Default)]
pub(super) struct Windows(Mutex<HashMap<WindowKey, Arc<dyn Region>>>);

impl Windows {
    pub(super) fn expose(&self, key: WindowKey, region: Arc<dyn Region>) {
        // A region may do anything when it goes, so it goes after the lock.
        let old = lock(&self.0).insert(key, region);
        drop(old);
    }

    pub(super) fn withdraw(&self, key: WindowKey) {
        let old = lock(&self.0).remove(&key);
        drop(old);
    }

    /// The region to copy from; holding it keeps it, whatever the owner does.
    pub(super) fn get(&self, key: WindowKey) -> Option<Arc<dyn Region>> {
        lock(&self.0).get(&key).cloned()
    }
}
