//! The windows that one rank exposes to a group.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
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

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
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

/// Where `length` bytes from `offset` on lie in a window of `available`, if they do.
pub(crate) fn part(available: usize, offset: u64, length: u64) -> Option<Range<usize>> {
    let end = usize::try_from(offset.checked_add(length)?).ok()?;
    // No greater than the end.
    (end <= available).then_some(offset as usize..end)
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn a_part_lies_within_its_window() {
        assert_eq!(part(3, 1, 2), Some(1..3));
        assert_eq!(part(3, 3, 0), Some(3..3));
        for (offset, length) in [(4, 0), (0, 4), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(part(3, offset, length), None);
        }
    }
}
