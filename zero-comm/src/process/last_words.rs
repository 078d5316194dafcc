//! What a failing rank leaves for whoever started it.

use std::env;
use std::fs;
use std::path::PathBuf;

use serde::Serialize;
use zero_core::Rank;

/// Why a rank ended, in a file that its launcher reads.
#[derive(Debug, Serialize)]
pub(crate) struct LastWords<'a> {
    pub(crate) rank: Rank,
    pub(crate) kind: Kind,
    pub(crate) message: &'a str,
    /// The rank that failed first, if that was another.
    pub(crate) because_of: Option<Rank>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Error,
    Panic,
    /// Another rank failed first.
    Stopped,
}

impl LastWords<'_> {
    /// Leaves them where `ZERO_LAST_WORDS` says, and, for `torchrun`, where `TORCHELASTIC_ERROR_FILE` says.
    pub(crate) fn leave(&self) {
        let path = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        if let Some(path) = path("ZERO_LAST_WORDS") {
            write(path, self);
        }
        // Its agent takes the first of these for the root cause.
        if let Some(path) = path("TORCHELASTIC_ERROR_FILE").filter(|_| self.kind != Kind::Stopped) {
            let extra = serde_json::json!({ "rank": self.rank.index().to_string() });
            write(path, &serde_json::json!({ "message": self.message, "extraInfo": extra }));
        }
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
        let words = LastWords {
            rank: Rank::new(2),
            kind: Kind::Stopped,
            message: "rank 1 died",
            because_of: Some(Rank::new(1)),
        };
        assert_eq!(
            serde_json::to_string(&words).unwrap(),
            r#"{"rank":2,"kind":"stopped","message":"rank 1 died","because_of":1}"#
        );
    }
}
