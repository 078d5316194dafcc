//! Memory used in a circle.

use std::collections::VecDeque;
use std::ops::Range;

/// Which part of a fixed length is in use, where parts are given back in the order in which they were taken.
pub(crate) struct Circle {
    length: usize,
    /// The oldest first.
    taken: VecDeque<Range<usize>>,
}

impl Circle {
    pub(crate) fn new(length: usize) -> Self {
        Self { length, taken: VecDeque::new() }
    }

    /// Takes `bytes` in one piece; none if they are not free yet. If nothing is taken, up to the whole length is.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let (oldest, end) = match (self.taken.front(), self.taken.back()) {
            (Some(oldest), Some(youngest)) => (oldest.start, youngest.end),
            _ => (0, 0),
        };
        let start = if end > oldest || self.taken.is_empty() {
            // Free are the end, and the beginning up to the oldest.
            if self.length - end >= bytes {
                end
            } else if oldest >= bytes {
                0
            } else {
                return None;
            }
        } else if oldest - end >= bytes {
            end
        } else {
            return None;
        };
        let piece = start..start + bytes;
        self.taken.push_back(piece.clone());
        Some(piece)
    }

    /// Gives back the piece that was taken first.
    pub(crate) fn give_back(&mut self) {
        self.taken.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::Circle;

    #[test]
    fn pieces_go_round() {
        let mut circle = Circle::new(10);
        assert_eq!(circle.take(4), Some(0..4));
        assert_eq!(circle.take(4), Some(4..8));
        assert_eq!(circle.take(3), None);
        circle.give_back();
        assert_eq!(circle.take(5), None);
        assert_eq!(circle.take(3), Some(0..3));
        assert_eq!(circle.take(1), Some(3..4));
        assert_eq!(circle.take(1), None);
        circle.give_back();
        assert_eq!(circle.take(6), Some(4..10));
        assert_eq!(circle.take(1), None);
    }

    #[test]
    fn all_of_it_can_be_had_once_nothing_is_taken() {
        let mut circle = Circle::new(10);
        circle.take(7);
        circle.give_back();
        assert_eq!(circle.take(11), None);
        assert_eq!(circle.take(10), Some(0..10));
        assert_eq!(circle.take(1), None);
    }

    proptest! {
        #[test]
        fn pieces_lie_within_and_apart(steps in prop::collection::vec((any::<bool>(), 1_usize..40), 1..200)) {
            let mut circle = Circle::new(100);
            let mut held: VecDeque<std::ops::Range<usize>> = VecDeque::new();
            for (give_back, bytes) in steps {
                if give_back {
                    held.pop_front();
                    circle.give_back();
                }
                match circle.take(bytes) {
                    Some(piece) => {
                        prop_assert!(piece.len() == bytes && piece.end <= 100);
                        prop_assert!(held.iter().all(|other| other.end <= piece.start || piece.end <= other.start));
                        held.push_back(piece);
                    }
                    None => prop_assert!(!held.is_empty()),
                }
            }
        }
    }
}
