//! The gradient for which a step was skipped.

use std::fmt;

use zero_core::Rank;

/// A gradient with numbers that are infinite or not numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// The parameter's module path: of all such gradients of the rank the first in backward order.
    pub parameter: String,
    /// The lowest rank that has one.
    pub rank: Rank,
}

/// For errors, where it is known and where not.
pub(crate) fn describe(found: &Option<NotFinite>) -> String {
    found.as_ref().map_or_else(|| String::from("the gradient is not finite"), NotFinite::to_string)
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameter, rank } = self;
        write!(f, "the gradient of `{parameter}` on {rank} is not finite")
    }
}
