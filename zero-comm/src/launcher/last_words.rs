//! What a rank wrote about its end, into the file that it was given for this.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use zero_core::Rank;

/// More than this of a file is not read. A line with it must fit [`MAX_LINE`](super::lines::MAX_LINE).
pub(crate) const MAX_BYTES: u64 = 32 * 1024;

/// Why a rank failed, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct LastWords {
    pub(crate) kind: Kind,
    #[serde(default)]
    pub(crate) message: String,
    /// Whose failure was the reason.
    #[serde(default)]
    pub(crate) because_of: Option<Rank>,
}

/// How a rank failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Panic,
    Error,
    /// It had to stop because another had failed.
    Stopped,
}

impl LastWords {
    /// What stands in a file; nothing if it is not there or is no such thing.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let mut text = Vec::new();
        File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut text).ok()?;
        Self::parse(&text)
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use zero_core::Rank;

    use super::{Kind, LastWords};

    #[test]
    fn what_is_not_known_is_ignored_and_what_is_missing_is_empty() {
        let words = LastWords::parse(br#"{"rank":1,"kind":"stopped","message":"m","because_of":3,"new":[]}"#);
        let because_of = Some(Rank::new(3));
        assert_eq!(words, Some(LastWords { kind: Kind::Stopped, message: "m".into(), because_of }));
        let words = LastWords::parse(br#"{"kind":"panic","because_of":null}"#);
        assert_eq!(words, Some(LastWords { kind: Kind::Panic, message: String::new(), because_of: None }));
    }

    #[test]
    fn garbage_and_absence_are_no_words() {
        for text in ["", "{", "[]", r#"{"kind":"odd"}"#, r#"{"message":"m"}"#, "\u{0}"] {
            assert_eq!(LastWords::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(LastWords::parse(b"\xFF"), None);
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(LastWords::read(&folder.path().join("none")), None);
        assert_eq!(LastWords::read(folder.path()), None);
    }

    #[test]
    fn a_file_without_end_is_not_read_to_it() {
        assert_eq!(LastWords::read("/dev/zero".as_ref()), None);
    }
}
