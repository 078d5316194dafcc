//! The word somebody meant.

/// How alike two words must be, from 0 to 1, before one is offered for the other: high enough that a word
/// from another vocabulary gets no suggestion.
const ALIKE: f64 = 0.8;

/// The entry of `known` that `key` is most probably a misspelling of; `None` if nothing is near.
///
/// Case and the choice between `-` and `_` do not count. Likeness is Jaro-Winkler's, which favours a common
/// beginning; of equally near entries the first wins.
///
/// ```
/// let known = ["stage", "bucket_bytes", "clip_norm"];
/// assert_eq!(zero_core::nearest("stgae", known), Some("stage"));
/// assert_eq!(zero_core::nearest("bucket-size", known), Some("bucket_bytes"));
/// assert_eq!(zero_core::nearest("warp_drive", known), None);
/// ```
pub fn nearest<'a>(key: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |word: &str| word.to_lowercase().replace('-', "_");
    let key = plain(key);
    let mut best = None;
    let mut likeness = ALIKE;
    for candidate in known {
        let alike = strsim::jaro_winkler(&key, &plain(candidate));
        if alike > likeness {
            (best, likeness) = (Some(candidate), alike);
        }
    }
    best
}
