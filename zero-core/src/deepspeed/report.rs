//! What became of each key.

use std::fmt;

/// What became of each key of a `ds_config.json`, in the order of the file; then what the file leaves to
/// DeepSpeed's defaults.
///
/// Displays as an aligned table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeepSpeedReport {
    pub(super) entries: Vec<DeepSpeedEntry>,
}

impl DeepSpeedReport {
    /// Every entry.
    pub fn entries(&self) -> &[DeepSpeedEntry] {
        &self.entries
    }

    /// The entry of `key`, a path with points such as `zero_optimization.stage`.
    pub fn find(&self, key: &str) -> Option<&DeepSpeedEntry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// The entries that are refused, with why; none in the report of a successful import.
    pub fn refused(&self) -> impl Iterator<Item = (&DeepSpeedEntry, &str)> {
        self.entries.iter().filter_map(|entry| match &entry.verdict {
            DeepSpeedVerdict::Refused { why } => Some((entry, why.as_str())),
            _ => None,
        })
    }
}

/// What became of one key.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedEntry {
    /// The key's path in the file, with points.
    pub key: String,
    /// The value that was taken, as text.
    pub value: String,
    /// Where the value comes from.
    pub source: DeepSpeedSource,
    /// What became of it.
    pub verdict: DeepSpeedVerdict,
}

/// Where the value of a key comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeepSpeedSource {
    /// The file.
    File,
    /// The field of [`DeepSpeedGiven`](crate::DeepSpeedGiven) of this name; the file says `"auto"`.
    Given(&'static str),
    /// DeepSpeed; the file does not say, or says `"auto"`.
    Default,
}

impl fmt::Display for DeepSpeedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.pad("file"),
            Self::Given(_) => f.pad("given"),
            Self::Default => f.pad("default"),
        }
    }
}

/// What became of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeepSpeedVerdict {
    /// Training does what DeepSpeed would.
    Honoured {
        /// The part of the import that holds the value.
        by: String,
    },
    /// Training does nearly what DeepSpeed would.
    Approximated {
        /// What it does.
        how: String,
    },
    /// Training is the same without it.
    WithoutEffect {
        /// The reason.
        why: String,
    },
    /// Training would not be what the file asks for, so that nothing is imported.
    Refused {
        /// The reason, and what to do.
        why: String,
    },
}

impl DeepSpeedVerdict {
    pub(super) fn refused(why: impl Into<String>) -> Self {
        Self::Refused { why: why.into() }
    }

    pub(super) fn approximated(how: impl Into<String>) -> Self {
        Self::Approximated { how: how.into() }
    }

    pub(super) fn without_effect(why: impl Into<String>) -> Self {
        Self::WithoutEffect { why: why.into() }
    }
}

impl fmt::Display for DeepSpeedVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Honoured { by } => write!(f, "honoured: {by}"),
            Self::Approximated { how } => write!(f, "approximated: {how}"),
            Self::WithoutEffect { why } => write!(f, "without effect: {why}"),
            Self::Refused { why } => write!(f, "refused: {why}"),
        }
    }
}

impl fmt::Display for DeepSpeedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |text: &str| text.chars().count();
        let values: Vec<_> = self.entries.iter().map(|entry| shortened(&entry.value)).collect();
        let keys = self.entries.iter().map(|entry| width(&entry.key)).fold(3, usize::max);
        let value_width = values.iter().map(|value| width(value)).fold(5, usize::max);
        write!(f, "{:keys$}  {:value_width$}  {:7}  verdict", "key", "value", "from")?;
        for (entry, value) in self.entries.iter().zip(&values) {
            let (key, source, verdict) = (&entry.key, entry.source, &entry.verdict);
            write!(f, "\n{key:keys$}  {value:value_width$}  {source:7}  {verdict}")?;
        }
        Ok(())
    }
}

/// A value that leaves room for the other columns.
pub(super) fn shortened(value: &str) -> String {
    const MOST: usize = 32;
    if value.chars().count() <= MOST {
        return value.to_owned();
    }
    value.chars().take(MOST - 1).chain(['…']).collect()
}
