//! What a failing rank leaves for whoever started it: one JSON object in a file.

use std::env;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use zero_core::Rank;

use crate::text;

/// Names the file into which a rank writes why it failed.
pub(crate) const LAST_WORDS: &str = "ZERO_LAST_WORDS";

/// More than this of a file is not read.
pub(crate) const MAX_BYTES: u64 = 56 << 10;

// JSON writes a byte in six at most; what stands around the message is short.
const _: () = assert!(6 * text::MESSAGE_BYTES as u64 + 1024 < MAX_BYTES);

/// Why a rank failed, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastWords {
    /// Who says so. It is known to who reads it, so other programs may leave it out.
    #[serde(default)]
    pub(crate) rank: Option<Rank>,
    pub(crate) kind: Kind,
    #[serde(default)]
    pub(crate) message: String,
    /// The rank that failed first, if that was another.
    #[serde(default)]
    pub(crate) because_of: Option<Rank>,
}

/// How a rank failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Error,
    Panic,
    /// It had to stop because another had failed.
    Stopped,
}

impl LastWords {
    /// Those of `rank`, whose failure was that of `because_of`, if there is one. A long `message` is cut.
    pub(crate) fn new(rank: Rank, kind: Kind, message: &str, because_of: Option<Rank>) -> Self {
        let kind = if because_of.is_some() { Kind::Stopped } else { kind };
        let mut message = message.to_owned();
        text::cut(&mut message);
        Self { rank: Some(rank), kind, message, because_of }
    }

    /// Leaves them where `ZERO_LAST_WORDS` says, and, for `torchrun`, where `TORCHELASTIC_ERROR_FILE` says.
    pub(crate) fn leave(&self) {
        let path = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        if let Some(path) = path(LAST_WORDS) {
            write(path, self);
        }
        // Its agent takes the first of these for the root cause.
        if let Some(path) = path("TORCHELASTIC_ERROR_FILE").filter(|_| self.kind != Kind::Stopped) {
            let rank = self.rank.map(|rank| rank.index().to_string());
            let extra = serde_json::json!({ "rank": rank });
            write(path, &serde_json::json!({ "message": self.message, "extraInfo": extra }));
        }
    }

    /// What stands in a file; nothing if it is not there or is no such thing.
    #[cfg(feature = "launcher")]
    pub(crate) fn read(path: &std::path::Path) -> Option<Self> {
        use std::io::Read;

        let mut text = Vec::new();
        fs::File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut text).ok()?;
        Self::parse(&text)
    }

    #[cfg(feature = "launcher")]
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}

fn write(path: PathBuf, words: &impl Serialize) {
    let text = serde_json::to_vec(words).unwrap_or_default();
    if let Err(error) = fs::write(&path, text) {
        tracing::warn!(%error, path = %path.display(), "could not leave last words");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_what_launchers_read() {
        let words = LastWords::new(Rank::new(2), Kind::Error, "rank 1 died", Some(Rank::new(1)));
        assert_eq!(
            serde_json::to_string(&words).unwrap(),
            r#"{"rank":2,"kind":"stopped","message":"rank 1 died","because_of":1}"#
        );
    }

    #[test]
    fn long_last_words_are_cut_and_can_be_read_to_their_end() {
        // What JSON writes longest.
        for message in ["\u{1b}".repeat(1 << 20), "\"ä".repeat(1 << 19)] {
            let words = LastWords::new(Rank::ROOT, Kind::Panic, &message, None);
            assert!(words.message.ends_with("bytes in all)"), "{}", words.message);
            let json = serde_json::to_vec(&words).unwrap();
            assert!(json.len() as u64 <= MAX_BYTES);
            assert_eq!(serde_json::from_slice::<LastWords>(&json).unwrap(), words);
        }
    }
}

#[cfg(all(test, feature = "launcher"))]
mod reading {
    use super::*;

    #[test]
    fn what_is_not_known_is_ignored_and_what_is_missing_is_empty() {
        let words = LastWords::parse(br#"{"rank":1,"kind":"stopped","message":"m","because_of":3,"new":[]}"#);
        assert_eq!(words, Some(LastWords::new(Rank::new(1), Kind::Stopped, "m", Some(Rank::new(3)))));
        let words = LastWords::parse(br#"{"kind":"panic","because_of":null}"#);
        let expected = LastWords { rank: None, kind: Kind::Panic, message: String::new(), because_of: None };
        assert_eq!(words, Some(expected));
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
