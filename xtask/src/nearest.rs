//! What a mistyped name may have meant.

/// The names, the most similar to `wanted` first.
pub(crate) fn nearest_first<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_by_key(|name| (strsim::damerau_levenshtein(name, wanted), *name));
    names
}

#[cfg(test)]
mod tests {
    use super::nearest_first;

    #[test]
    fn the_most_similar_name_comes_first_and_none_is_lost() {
        assert_eq!(nearest_first("stpe", ["all-reduce", "stop", "step"]), ["step", "stop", "all-reduce"]);
        assert!(nearest_first("gather", []).is_empty());
    }
}
