//! Which parts of a file are taken.

use std::collections::BTreeMap;
use std::ops::Range;

/// The free parts of a file that grows at its end; all lengths are whole pages.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Where the file ends.
    end: u64,
    /// The length of each free part, by where it begins. No two touch.
    free: BTreeMap<u64, u64>,
}

impl Space {
    /// Takes the first free part that is long enough, or what lies beyond the end.
    pub(crate) fn take(&mut self, length: u64) -> Range<u64> {
        let fitting = self.free.iter().find(|part| *part.1 >= length).map(|(&start, &found)| (start, found));
        let Some((start, found)) = fitting else {
            let start = self.end;
            self.end += length;
            return start..self.end;
        };
        self.free.remove(&start);
        if found > length {
            self.free.insert(start + length, found - length);
        }
        start..start + length
    }

    /// Returns what was taken. What borders on the end makes the file shorter.
    pub(crate) fn give_back(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start == end {
            return;
        }
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.free.insert(start, end - start);
        }
    }

    /// Where the file ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// How much is taken.
    pub(crate) fn used(&self) -> u64 {
        self.end - self.free.values().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::Space;

    #[test]
    fn the_first_part_that_fits_is_taken() {
        let mut space = Space::default();
        let [a, b, c, d] = [4, 2, 4, 1].map(|length| space.take(length));
        assert_eq!((a.clone(), b, c.clone(), d), (0..4, 4..6, 6..10, 10..11));
        space.give_back(a);
        space.give_back(c);
        assert_eq!((space.used(), space.end()), (3, 11));
        assert_eq!(space.take(3), 0..3);
        assert_eq!(space.take(2), 6..8);
        assert_eq!(space.take(3), 11..14);
        assert_eq!(space.take(1), 3..4);
    }

    #[test]
    fn parts_that_touch_become_one_and_the_end_moves_back() {
        let mut space = Space::default();
        let [a, b, c, d] = [1, 1, 1, 1].map(|length| space.take(length));
        space.give_back(a);
        space.give_back(c);
        space.give_back(b);
        assert_eq!(space.take(3), 0..3);
        space.give_back(0..3);
        space.give_back(d);
        assert_eq!((space.used(), space.end()), (0, 0));
    }

    #[test]
    fn nothing_takes_no_space() {
        let mut space = Space::default();
        let page = space.take(1);
        let nothing = space.take(0);
        assert!(nothing.is_empty());
        space.give_back(nothing);
        space.give_back(page);
        assert_eq!((space.used(), space.end()), (0, 0));
    }
}
